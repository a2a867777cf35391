"""What a wrong trainer, plugin or command says: one sentence with the fix."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from delta_weight_sync import Publisher, errors
from delta_weight_sync.signing import PUBLIC_KEY, new_pair
from delta_weight_sync.vllm import plugin
from tests.cli.command import command

RUN = "DELTA_WEIGHT_SYNC_RUN"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket with the runs `first` and `second`; beside it is their base."""
    monkeypatch.setattr(plugin._log, "parent", plugin._log.parent)  # which `register` changes
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    url = (tmp_path / "bucket").as_uri()
    for run in ("first", "second"):
        publish(f"{url}#{run}", {"norm.weight": torch.ones(4)})
    return url


def publish(url: str, weights: object = (), base: object = "", **options: object) -> None:
    base = base or Path(url.partition("#")[0].removeprefix("file://")).parent / "base"
    with Publisher(url, base, **options) as publisher:
        publisher.publish(weights)


def start(url: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """As vLLM does, before it loads an engine. It ends with the sentence."""
    values = {"VLLM_PLUGINS": plugin.NAME, RUN: f"{url}#first"} | variables
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        plugin.register()
    print(stop.value.code, file=sys.stderr)


def run(*words: object) -> None:
    done = command(*words)
    assert done.code == 1, "a failure, not wrong usage"
    print(done.complaint, file=sys.stderr)


PEFT = {"base_model.model.norm.weight": torch.ones(4)}
CASES: list[tuple[str, Callable[[str, Path, pytest.MonkeyPatch], object]]] = [  # … is anything
    (
        "'bucket' is not the URL of a bucket: write hf://buckets/<owner>/<name>, …",
        lambda u, t, m: publish("bucket#first", base=t / "base"),
    ),
    (
        "run 'new' in … is new: name the checkpoint that the policy was loaded from, as in base=",
        lambda u, t, m: Publisher(f"{u}#new"),
    ),
    (
        "is neither a folder nor a model of the Hub that can be read here",
        lambda u, t, m: publish(f"{u}#new", base=t / "nothing"),
    ),
    ("encoding is 'tiny', not one of 'fast', 'small'", lambda u, t, m: publish(f"{u}#new", encoding="tiny")),
    (
        "'much' is neither a size nor an age: write it as 20GB, 7d or 12h",
        lambda u, t, m: publish(f"{u}#new", keep="much"),
    ),
    ("mirror is 'gpu', not one of 'host', 'device'", lambda u, t, m: publish(f"{u}#new", mirror="gpu")),
    (
        "the given DELTA_WEIGHT_SYNC_SIGNING_KEY is neither a key, which begins with …, nor a file that",
        lambda u, t, m: publish(f"{u}#new", signing_key="secret"),
    ),
    (
        "would refuse versions without a signature: set DELTA_WEIGHT_SYNC_SIGNING_KEY, or unset …",
        lambda u, t, m: (m.setenv(PUBLIC_KEY, new_pair()[PUBLIC_KEY]), publish(f"{u}#new")),
    ),
    (
        "base_model.model.norm.weight is PEFT's name of a parameter, which …: publish the model itself,",
        lambda u, t, m: publish(f"{u}#new", PEFT.items()),
    ),
    (
        "parameter norm.weight is on the meta device, without values: load the parameter before you publish",
        lambda u, t, m: publish(f"{u}#new", {"norm.weight": torch.ones(4, device="meta")}),
    ),
    (
        "norm.weight: shape changed from (4,) to (5,); start a new run for it",
        lambda u, t, m: publish(f"{u}#first", {"norm.weight": torch.ones(5)}),
    ),
    (
        "delta_weight_sync: 'buckets/me/short' is not the URL of a bucket",
        lambda u, t, m: start(u, m, **{RUN: "buckets/me/short"}),
    ),
    (
        "does not hold exactly one run: it holds first, second; name one: …#first",
        lambda u, t, m: start(u, m, **{RUN: u}),
    ),
    (
        "correct these variables: DELTA_WEIGHT_SYNC_PUBLIC_KEY: … is not a key",
        lambda u, t, m: start(u, m, DELTA_WEIGHT_SYNC_PUBLIC_KEY="abc"),
    ),
    (
        "DELTA_WEIGHT_SYNC_SIGNING_KEY: only the trainer may have it: unset it here",
        lambda u, t, m: start(u, m, DELTA_WEIGHT_SYNC_SIGNING_KEY="secret"),
    ),
    (
        "correct these variables: DELTA_WEIGHT_SYNC_…: there is no such variable",
        lambda u, t, m: start(u, m, DELTA_WEIGHT_SYNC_POLL="1"),
    ),
    (
        "DELTA_WEIGHT_SYNC_FOLDER: /dev/null/x cannot be created or locked",
        lambda u, t, m: start(u, m, DELTA_WEIGHT_SYNC_FOLDER="/dev/null/x"),
    ),
    (
        "run 'frist' in … has not published a first version; the bucket holds first, second",
        lambda u, t, m: run("log", f"{u}#frist"),
    ),
    (
        "the URL names run 'first', and --run names 'second': name one",
        lambda u, t, m: run("log", f"{u}#first", "--run", "second"),
    ),
    ("has no version 7; its newest is version 0", lambda u, t, m: run("show", f"{u}#first", "--version", 7)),
    (
        "is not empty: name a new folder, or replace a checkout there with --force",
        lambda u, t, m: run("checkout", f"{u}#first", "--out", t / "base"),
    ),
    (
        "holds other files: name an empty folder, or a new one",
        lambda u, t, m: run("follow", f"{u}#first", "--into", t / "base"),
    ),
    ("'much' is neither a size nor an age", lambda u, t, m: run("gc", f"{u}#first", "--keep", "much")),
]


@pytest.mark.parametrize(("sentence", "mistake"), CASES)
def test_a_misconfiguration_is_one_sentence_with_the_fix(
    sentence, mistake, url, tmp_path, monkeypatch, capsys
):
    try:
        mistake(url, tmp_path, monkeypatch)
        said = capsys.readouterr().err
    except errors.DeltaWeightSyncError as error:
        said = str(error)
    pattern = ".*".join(map(re.escape, sentence.split("…")))
    assert re.search(pattern, said), said
    assert len(said.strip().splitlines()) == 1


def test_a_plugin_without_its_other_half_is_noticed(url, monkeypatch):
    monkeypatch.setenv(RUN, url)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with mock.patch.object(plugin._log, "warning") as warning:
        plugin.register()
    assert "DELTA_WEIGHT_SYNC_RUN also needs VLLM_PLUGINS" in warning.call_args[0][0]
