"""`watch`: what it prints, and what the real wandb, trackio and TensorBoard then have, each value once."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from delta_weight_sync.evaluation import Evaluations
from delta_weight_sync.exporters import Lines, export, open_target
from delta_weight_sync.reader import RunReader, open_run
from delta_weight_sync.records import Writer
from delta_weight_sync.runlog import CommitEvent, RunLogWriter, StepEvent
from tests.cli.command import command
from tests.support.published_run import write_run

VERSIONS = 3
# The values of the run that `url` gives: name -> place -> value.
WANTED = {
    "reward": {0: 0.0, 1: 0.5, 2: 1.0},
    "loss": {0: 1.0, 1: 0.75, 2: 0.5},
    "eval_loss": {2: 0.25},
    "replica/eu/version": {1: 1.0, 2: 2.0},
    "replica/eu/lag_s": {2: 0.125},
    "replica/eu/pause_ms": {2: 0.5},
    "score/eval/accuracy": {0: 0.0, 2: 2.0},
}


@pytest.fixture
def url(tmp_path):
    url = (tmp_path / "bucket").as_uri()
    write_run(url, tmp_path / "base", versions=VERSIONS)
    reader = open_run(url)
    log = _log(reader, 1)
    for step in range(3):
        _step(log, step, reward=step / 2, loss=1 - step / 4)
    _step(log, 2, eval_loss=0.25)  # as TRL does: metrics of an evaluation come after those of the step
    for version in (1, 2):
        log.append(
            CommitEvent(
                t=time.time(),
                replica="eu",
                version=version,
                digest="0" * 16,
                lag_s=0.125,
                fetch_s=0.0,
                stage_s=0.0,
                pause_ms=0.5,
                commit_ms=0.25,
                joined=version == 1,
            )
        )
    log.close()
    _score(reader, 0, 2)
    return f"{url}#test"


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """The packages keep their own files in `tmp_path`, and none of them asks for an account."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def _log(reader: RunReader, writer: int) -> RunLogWriter:
    return RunLogWriter(reader.bucket, reader.keys.run, Writer(writer, f"{writer:032x}"), every_s=3600.0)


def _step(log: RunLogWriter, step: int, reward: float | None = None, **metrics: float) -> None:
    log.append(StepEvent(t=time.time(), step=step, reward=reward, metrics=metrics))


def _score(reader: RunReader, *versions: int) -> None:
    evaluations = Evaluations(reader, "eval", 1)
    for version in evaluations.due(set(range(VERSIONS)) - set(versions)):
        manifest = reader.manifest(version)
        evaluations.add(manifest, {"accuracy": manifest.version}, 1.0)
    evaluations.close()


def _in_tensorboard(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(tag, e.step, e.value) for tag in found.Tags()["scalars"] for e in found.Scalars(tag)]


def _in_trackio(folder: Path) -> list[tuple[str, int, float]]:
    # In a process of its own, because the package reads TRACKIO_DIR when it is imported.
    code = (
        "import json, trackio; from trackio.sqlite_storage import SQLiteStorage as s;"
        "[run] = trackio.Api().runs('delta-weight-sync');"
        "print(json.dumps(s.get_logs('delta-weight-sync', run.name, run_id=run.id)))"
    )
    rows = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    return [
        (name, row["step"], value)
        for row in rows
        for name, value in row.items()
        if name not in ("step", "timestamp")
    ]


def _in_wandb(folder: Path) -> list[tuple[str, int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[tuple[str, int, float]] = []
    axes: dict[str, str] = {}
    ids = set[str]()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("metric") and record.metric.step_metric:
                axes[record.metric.name] = record.metric.step_metric
            if record.HasField("history"):
                row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                found += [(name, int(row[axes[name]]), float(row[name])) for name in row if name in axes]
    assert len(ids) == 1, "each start resumes the same run"
    return found


def _records(data: bytes) -> list[bytes]:
    """The records of a .wandb file: chunks in blocks of 32 KiB, after 7 bytes of header."""
    records: list[bytes] = []
    at = 7
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        chunk = data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 2):  # a whole record, or the first part of one
            records.append(chunk)
        else:
            records[-1] += chunk
    return records


READ = {"tensorboard": _in_tensorboard, "trackio": _in_trackio, "wandb": _in_wandb}
# On a machine under load, trackio may begin a second run, so its test is not for every change.
TARGETS = [pytest.param(name, marks=pytest.mark.long) if name == "trackio" else name for name in READ]


def test_without_a_target_it_prints_the_values(url):
    done = command("watch", url, "--once")
    assert (done.code, done.complaint) == (0, "")
    lines = done.output.splitlines()
    assert "step 1: loss 0.75  reward 0.5" in lines
    assert "version 2: replica/eu/version 2  replica/eu/lag_s 0.125  replica/eu/pause_ms 0.5" in lines
    assert "version 2: score/eval/accuracy 2" in lines
    assert sum(line.startswith(f"version {VERSIONS - 1}: version/sync {VERSIONS}  ") for line in lines) == 1


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_each_value_is_exported_once_whenever_the_export_is_started(url, quiet, tmp_path, target):
    words = ["watch", url, "--to", target, "--into", tmp_path / "out", "--once"]
    assert command(*words).code == 0
    assert command(*words).code == 0, "nothing is new"
    reader = open_run(url)
    log = _log(reader, 2)
    _step(log, 1, loss=9.0)  # a trainer that went back
    _step(log, 3, loss=0.25)
    log.close()
    _score(reader, 1)  # an evaluation that was made later
    done = command(*words)
    assert "training went back from step 2 to 1" in done.complaint

    found = READ[target](tmp_path / "out")
    assert not [value for value, count in Counter(value[:2] for value in found).items() if count > 1]
    places: dict[str, dict[int, float]] = {}
    for name, place, value in found:
        places.setdefault(name, {})[place] = value
    assert places["loss"] == WANTED["loss"] | {3: 0.25}
    assert places["score/eval/accuracy"] == {0: 0.0, 1: 1.0, 2: 2.0}
    assert {name: places[name] for name in WANTED.keys() - {"loss", "score/eval/accuracy"}} == {
        name: WANTED[name] for name in WANTED.keys() - {"loss", "score/eval/accuracy"}
    }
    assert places["version/payload_bytes"].keys() == set(range(VERSIONS))
    assert places["version/sync"] == {0: 1.0, 1: 2.0, 2: 3.0}


@pytest.mark.full
def test_an_event_file_that_was_cut_off_is_continued(url, quiet, tmp_path):
    words = ["watch", url, "--to", "tensorboard", "--into", tmp_path, "--once"]
    assert command(*words).code == 0
    whole = _in_tensorboard(tmp_path)
    [path] = tmp_path.glob("events.out.*")
    path.write_bytes(path.read_bytes()[:-100])  # as a kill leaves it
    assert len(_in_tensorboard(tmp_path)) < len(whole)
    assert command(*words).code == 0
    assert sorted(_in_tensorboard(tmp_path)) == sorted(whole)


@pytest.mark.full
def test_a_folder_has_one_run_and_one_exporter(url, quiet, tmp_path):
    folder = tmp_path / "out"
    words = ["--to", "tensorboard", "--into", folder, "--once"]
    target = open_target("tensorboard", open_run(url), folder, "")
    assert f"another process exports into {folder}" in command("watch", url, *words).complaint
    target.close()
    (tmp_path / "file").touch()
    into_file = command("watch", url, "--to", "tensorboard", "--into", tmp_path / "file")
    assert "is a file, or lies in one: name a folder" in into_file.complaint
    other = (tmp_path / "other").as_uri()
    write_run(other, tmp_path / "base", versions=1)
    refused = command("watch", other, *words)
    assert (refused.code, _in_tensorboard(folder)) == (1, [])
    assert "has the export of another run: name a new folder with --into" in refused.complaint


def test_a_missing_package_is_named_with_its_command(url, quiet, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused = command("watch", url, "--to", "wandb")
    assert refused.code == 1
    assert "--to wandb needs wandb, which is missing: run `pip install '.[wandb]'`" in refused.complaint


@pytest.mark.full
def test_without_an_account_it_says_so(url, quiet, tmp_path):
    # In a process of its own, because wandb reads its environment only once.
    without = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    refused = subprocess.run(
        [sys.executable, "-m", "delta_weight_sync", "watch", url, "--to", "wandb", "--once"],
        env=without | {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert refused.returncode == 1
    sentence = refused.stderr.splitlines()[-1]
    assert sentence.startswith("delta-weight-sync watch: the export failed (")
    assert "wandb login" in sentence


def test_a_failed_target_is_opened_again_and_gets_the_rest(url, capsys):
    stopped = threading.Event()
    said: list[str] = []
    printed: list[str] = []

    class Failing(Lines):
        def write(self, row):
            super().write(row)
            printed.append(f"{row.axis} {row.x}")
            if len(printed) == 2:
                raise ConnectionError("no route to host")

        def flush(self):
            if len(printed) > 2:
                stopped.set()

    reader = open_run(url)
    reader.bucket.report_every_s = 0.0
    target = Failing()  # remembers what it has, as a real target does
    export(reader, lambda: target, once=False, stopped=stopped, say=said.append)
    assert said == ["the export failed (no route to host); it is tried again"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == 2 + VERSIONS + 4 + 2


@pytest.mark.full
def test_it_follows_until_it_is_interrupted(url):
    watching = subprocess.Popen(
        [sys.executable, "-m", "delta_weight_sync", "watch", url], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in watching.stdout:
            if line.startswith("step 2: eval_loss"):
                break
        log = _log(open_run(url), 2)
        _step(log, 3, loss=0.125)
        log.close()
        for line in watching.stdout:
            if line == "step 3: loss 0.125\n":
                break
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130
    finally:
        watching.kill()
        watching.communicate()
