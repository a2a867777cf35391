"""What vLLM meets when this package is installed: nothing, unless it asks for it."""

import sys
from types import ModuleType

import pytest

from delta_weight_sync.vllm import plugin


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
