"""What a wrong trainer, plugin or command says: the rows of the last table in docs/troubleshooting.md."""

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

_PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ROWS = dict(re.findall(r"^\| (\d+) \| .+? \| `(.+?)` \|$", _PAGE.read_text(), re.MULTILINE))
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
CASES: dict[str, Callable[[str, Path, pytest.MonkeyPatch], object]] = {
    "1": lambda u, t, m: publish("bucket#first", base=t / "base"),
    "2": lambda u, t, m: Publisher(f"{u}#new"),
    "3": lambda u, t, m: publish(f"{u}#new", base=t / "nothing"),
    "4": lambda u, t, m: publish(f"{u}#new", encoding="tiny"),
    "5": lambda u, t, m: publish(f"{u}#new", keep="much"),
    "6": lambda u, t, m: publish(f"{u}#new", mirror="gpu"),
    "7": lambda u, t, m: publish(f"{u}#new", signing_key="secret"),
    "8": lambda u, t, m: (m.setenv(PUBLIC_KEY, new_pair()[PUBLIC_KEY]), publish(f"{u}#new")),
    "9": lambda u, t, m: publish(f"{u}#new", PEFT.items()),
    "10": lambda u, t, m: publish(f"{u}#new", {"norm.weight": torch.ones(4, device="meta")}),
    "11": lambda u, t, m: publish(f"{u}#first", {"norm.weight": torch.ones(5)}),
    "12": lambda u, t, m: start(u, m, **{RUN: "buckets/me/short"}),
    "13": lambda u, t, m: start(u, m, **{RUN: u}),
    "14": lambda u, t, m: start(u, m, DELTA_WEIGHT_SYNC_PUBLIC_KEY="abc"),
    "15": lambda u, t, m: start(u, m, DELTA_WEIGHT_SYNC_SIGNING_KEY="secret"),
    "16": lambda u, t, m: start(u, m, DELTA_WEIGHT_SYNC_POLL="1"),
    "17": lambda u, t, m: start(u, m, DELTA_WEIGHT_SYNC_FOLDER="/dev/null/x"),
    "18": lambda u, t, m: run("log", f"{u}#frist"),
    "19": lambda u, t, m: run("log", f"{u}#first", "--run", "second"),
    "20": lambda u, t, m: run("show", f"{u}#first", "--version", 7),
    "21": lambda u, t, m: run("checkout", f"{u}#first", "--out", t / "base"),
    "22": lambda u, t, m: run("follow", f"{u}#first", "--into", t / "base"),
    "23": lambda u, t, m: run("gc", f"{u}#first", "--keep", "much"),
}


@pytest.mark.parametrize("number", ROWS)
def test_a_misconfiguration_is_one_sentence_with_the_fix(number, url, tmp_path, monkeypatch, capsys):
    try:
        CASES[number](url, tmp_path, monkeypatch)
        said = capsys.readouterr().err
    except errors.DeltaWeightSyncError as error:
        said = str(error)
    pattern = ".*".join(map(re.escape, ROWS[number].split("…")))
    assert re.search(pattern, said), said
    assert len(said.strip().splitlines()) == 1


def test_the_table_is_complete_and_a_plugin_without_its_other_half_is_noticed(url, monkeypatch):
    assert CASES.keys() == ROWS.keys()
    monkeypatch.setenv(RUN, url)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with mock.patch.object(plugin._log, "warning") as warning:
        plugin.register()
    assert "DELTA_WEIGHT_SYNC_RUN also needs VLLM_PLUGINS" in warning.call_args[0][0]
