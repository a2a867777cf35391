"""A run of 20,000 versions: memory, files, threads and requests per version stay those of the first thousand.

    python -m pytest -s tests/library/test_long_run.py      prints the table of docs/limits-and-costs.md

One process publishes a tiny model, follows it into a folder, and shows it on a dashboard. The commands run in
processes of their own, whose peaks of memory are compared.
"""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from delta_weight_sync import Publisher, Run, follow
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import AnchorRef, FileRef, Head, Manifest, Writer, reference
from delta_weight_sync.runlog import RunLogReader, StepEvent, SyncEvent
from delta_weight_sync.store import open_bucket
from delta_weight_sync.store.ledger import total
from inference_space.dashboard.page import body
from inference_space.dashboard.state import RunState
from tests.support.waiting import PATIENCE_S

FIRST = 1_000
LAST = 20_000
LIMIT_S = 1500.0  # on a slow machine, the comparison is made with the versions that came until then
AT_LEAST = 4_000
SIZE = 4096
RUN = "long"


class Figures(NamedTuple):
    """What was measured at a version. Requests are per version, since the last measurement."""

    version: int
    memory_mb: float
    files: int
    threads: int
    published: float
    followed: float
    shown: float


def process_now() -> tuple[float, int, int]:
    """Resident memory in MB, open files, threads."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len([*Path("/proc/self/fd").iterdir()])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6, files, threading.active_count()


# A process of its own, because a child's peak begins with the memory of the process that started it.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_mb(*words: object) -> float:
    """Peak memory of a command in MB, which must succeed."""
    command = [sys.executable, "-m", "delta_weight_sync", *map(str, words)]
    measured = subprocess.run(
        [sys.executable, "-S", "-c", MEASURE, *command], check=True, capture_output=True
    )
    return int(measured.stdout) / 1e3


class Loop:
    """A trainer, a follower and a dashboard, which take turns."""

    def __init__(self, folder: Path, publisher: Publisher) -> None:
        self._publisher = publisher
        url = (folder / "bucket").as_uri()
        followed = Run(url, RUN)
        self._buckets = [publisher.reader.bucket, followed._reader.bucket, open_bucket(url)]
        self._log = RunLogReader(self._buckets[2], RUN)
        self.state = RunState()
        # The follower looks again as soon as the next version is there.
        self._versions = follow(followed, folder / "followed", poll_s=0.001)
        self._chance = torch.Generator().manual_seed(0)
        self._weights = 0.02 * torch.randn(SIZE, generator=self._chance)
        self._counted = [0, 0, 0]
        self._measured = 0

    def close(self) -> None:
        self._versions.close()

    def step(self, version: int) -> None:
        chosen = torch.randint(0, SIZE, (20,), generator=self._chance)
        self._weights[chosen] *= 1.01
        metrics = {f"metric/{number}": version / (number + 1) for number in range(10)}
        assert self._publisher.log
        self._publisher.log.append(StepEvent(t=time.time(), step=version, reward=0.5, metrics=metrics))
        self._publisher.publish({"w": self._weights}, version)
        newest = self._publisher.flush()
        assert next(self._versions).digest == newest.digest
        if version % 10 == 0:
            self.state.add(self._log.poll())

    def measure(self, version: int) -> Figures:
        assert self._publisher._outbox.shortcuts.idle(PATIENCE_S)
        self.state.add(self._log.poll())
        progress = self.state.progress()
        assert progress is not None
        body(progress)
        requests = [total(bucket.ledger.counts()).requests for bucket in self._buckets]
        count = version - self._measured
        each = [(now - before) / count for now, before in zip(requests, self._counted, strict=True)]
        self._counted = requests
        self._measured = version
        return Figures(version, *process_now(), *each)


def policy(folder: Path) -> Path:
    base = folder / "base"
    base.mkdir()
    save_file({"w": torch.zeros(SIZE, dtype=torch.bfloat16)}, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    return base


@pytest.mark.long
def test_nothing_grows_with_the_number_of_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    url = f"{(tmp_path / 'bucket').as_uri()}#{RUN}"
    base = policy(tmp_path)
    figures: list[Figures] = []
    peaks: dict[int, dict[str, float]] = {}

    def commands(version: int) -> None:
        peaks[version] = {
            "log -n 20": peak_mb("log", url, "-n", 20),
            "log": peak_mb("log", url),
            "verify": peak_mb("verify", url),
        }

    with Publisher(url, base) as publisher, closing(Loop(tmp_path, publisher)) as loop:
        for version in range(LAST + 1):
            loop.step(version)
            late = time.monotonic() - started > LIMIT_S
            # The first measurement fills caches; requests are counted from there.
            if version in (FIRST // 2, FIRST, 5_000, 10_000, LAST) or late:
                figures.append(loop.measure(version))
            if version == FIRST:
                commands(FIRST)
            if late:
                break
    commands(version)
    with capsys.disabled():
        print(table(figures[1:], peaks))
    if version < AT_LEAST:
        pytest.skip(f"this machine published only {version} versions in {LIMIT_S:.0f} s")
    first = figures[1]
    last = figures[-1]
    assert last.memory_mb <= 1.1 * first.memory_mb
    assert last.files == first.files
    assert last.threads == first.threads
    for name in ("published", "followed", "shown"):
        assert getattr(last, name) <= 1.1 * getattr(first, name), name
    for command, peak in peaks[version].items():
        assert peak <= 1.1 * peaks[FIRST][command], command


def table(figures: list[Figures], peaks: dict[int, dict[str, float]]) -> str:
    heads = ["versions", "memory", "files", "threads", "requests: trainer", "follower", "dashboard"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for each in figures:
        requests = " | ".join(f"{number:.2f}" for number in each[4:])
        lines.append(
            f"| {each.version:,} | {each.memory_mb:.0f} MB | {each.files} | {each.threads} | {requests} |"
        )
    for version, found in peaks.items():
        lines.append(f"{version:,} versions, peak: " + ", ".join(f"{k} {v:.0f} MB" for k, v in found.items()))
    return "\n" + "\n".join(lines)


@pytest.mark.full
@pytest.mark.parametrize(
    "boundary", [64, 65_536, *(pytest.param(n, marks=pytest.mark.long) for n in (512, 1_024, 4_096))]
)
def test_versions_go_on_past_every_boundary(tmp_path: Path, boundary: int) -> None:
    """Windows, segments, strides and powers of two: the run is numbered as if it had come so far."""
    url = f"{(tmp_path / 'bucket').as_uri()}#{RUN}"
    base = policy(tmp_path)
    with Publisher(url, base) as publisher:
        publisher.publish({"w": torch.zeros(SIZE)})
        publisher.flush()
    reader = RunReader(open_bucket(url.partition("#")[0]), RUN)
    renumber(reader, boundary - 40)
    with Publisher(url) as publisher, closing(Loop(tmp_path, publisher)) as loop:
        for version in range(boundary - 39, boundary + 12):
            loop.step(version)
        newest = publisher.flush()
        assert publisher._outbox.shortcuts.idle(PATIENCE_S)
    assert newest.version == boundary + 11
    for held in (None, boundary - 1, boundary, boundary + 1):
        assert newest.recipe(held).deltas
    peak_mb("verify", url)  # raises if the command fails
    assert [event.version for event in sync_events(reader)][-51:] == list(range(boundary - 39, boundary + 12))
    peak_mb("checkout", url, "--version", boundary, "--out", tmp_path / "out")


def sync_events(reader: RunReader) -> Iterator[SyncEvent]:
    return (event for event in RunLogReader(reader.bucket, RUN).poll() if isinstance(event, SyncEvent))


def renumber(reader: RunReader, version: int) -> None:
    """Make version 0 the version `version`, published whole, and the oldest that was not deleted."""
    first = reader.newest()
    assert first is not None
    writer = Writer(first.writer_term, first.writer)
    files: list[FileRef] = []
    for file in first.anchor.files:
        key = reader.keys.anchor(version, writer, file.name)
        reader.bucket.put(key, reader.bucket.get(file.key))
        files.append(file.model_copy(update={"key": key}))
    parent = FileRef(key=reader.keys.manifest(version - 1, writer), size=1, sha256="0" * 64)
    changes = {"version": version, "anchor": AnchorRef(version=version, files=tuple(files)), "parent": parent}
    manifest = Manifest(**dict(first) | changes | {"seal": ""})
    key = reader.keys.manifest(version, writer)
    reader.bucket.put(key, manifest.to_bytes())
    head = reader.head_of(writer)
    named = {"version": version, "manifest": reference(key, manifest), "seal": ""}
    reader.bucket.put(reader.keys.head(writer), Head(**dict(head) | named).to_bytes())
    reader.bucket.delete([reader.keys.manifest(0, writer)])
