"""A vLLM that does not ask for the plugin is left alone; one that cannot follow is refused in a sentence."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from delta_weight_sync.errors import SettingsError
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, new_pair
from delta_weight_sync.vllm import plugin
from delta_weight_sync.vllm.server import PREFIX, settings_from
from delta_weight_sync.vllm.worker import call

PAIR = new_pair()
PARALLEL = {"data_parallel_size": 1, "enable_eplb": False, "world_size": 1}


@pytest.fixture
def another_vllm(monkeypatch):
    """A release that is not the tested one, and in which every import but its own fails."""
    module = ModuleType("vllm")
    module.__version__ = "0.99.0"
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("asked_for", [None, "", "someone_elses", "lora_filesystem_resolver,someone_elses"])
def test_a_vllm_that_does_not_ask_for_it_is_left_alone(another_vllm, monkeypatch, asked_for):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if asked_for is not None:
        monkeypatch.setenv("VLLM_PLUGINS", asked_for)
    plugin.register()


@pytest.mark.parametrize("asked_for", ["delta_weight_sync", "someone_elses,delta_weight_sync"])
def test_one_that_does_and_is_not_the_tested_release_is_told(another_vllm, monkeypatch, asked_for):
    monkeypatch.setenv("VLLM_PLUGINS", asked_for)
    with pytest.raises(
        RuntimeError, match=r"tested with vllm 0\.32, found 0\.99\.0; pip install 'vllm==0\.32"
    ):
        plugin.register()


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (
            {"data_parallel_size": 2},
            "a mixture of experts whose engines compute together (--data-parallel-size) cannot take a commit"
            " between two steps of all of them; start one replica per copy",
        ),
        (
            {"enable_eplb": True},
            "--enable-eplb moves experts away from where deltas go; start vLLM without it",
        ),
    ],
)
def test_options_that_move_weights_are_refused(option, sentence):
    config = SimpleNamespace(parallel_config=SimpleNamespace(**PARALLEL | option))
    answer = call(SimpleNamespace(vllm_config=config), "learn", shapes={})
    assert answer == {"error": sentence, "kind": "route"}


def test_a_vllm_that_follows_is_given_the_public_half_of_a_key_and_no_other():
    run = {f"{PREFIX}RUN": "file:///b#a"}
    settings = settings_from(run | {PUBLIC_KEY: PAIR[PUBLIC_KEY]})
    assert settings.public_key == PAIR[PUBLIC_KEY]
    for name, said in ((SIGNING_KEY, "the trainer's alone: unset it here"), (PUBLIC_KEY, "is not a key")):
        with pytest.raises(SettingsError, match=said) as refusal:
            settings_from(run | {name: PAIR[SIGNING_KEY]})
        assert PAIR[SIGNING_KEY][15:] not in str(refusal.value)
