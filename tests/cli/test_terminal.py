"""What a command prints of a bucket is lines of text: no terminal's codes, and no traceback."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from delta_weight_sync import codec
from delta_weight_sync.codec import Patch
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.records import Writer
from delta_weight_sync.store import Bucket, open_bucket
from tests.cli.command import command
from tests.support.real_run import RealRun

pytestmark = pytest.mark.finding(18)

CODES = "\x1b]0;owned\x07\x1b[2J\r\n\u202e"
Record = dict[str, Any]


class Forger:
    """Rewrites a run so that every hash in it fits."""

    def __init__(self, bucket: Bucket) -> None:
        run = RealRun(bucket, run="r", layers=1, width=4)
        run.step()
        run.close()
        self.bucket, self._reader = bucket, run.reader
        newest = run.reader.manifest()
        writer = Writer(newest.writer_term, newest.writer)
        self._head, self._manifest = run.reader.keys.head(writer), run.reader.keys.manifest(1, writer)

    def head(self, change: Callable[[Record], object]) -> None:
        """Change HEAD."""
        record = json.loads(self.bucket.get(self._head))
        del record["seal"]
        change(record)
        self.bucket.put(self._head, json.dumps(record).encode())

    def manifest(self, change: Callable[[Record], object]) -> None:
        """Change the newest manifest."""
        record = json.loads(self.bucket.get(self._manifest))
        del record["seal"]
        change(record)
        data = json.dumps(record).encode()
        self.bucket.put(self._manifest, data)
        self.head(lambda head: head["manifest"].update(_pin(data)))

    def file(self, ref: Callable[[Record], Record], data: bytes) -> None:
        """Change a file that the newest manifest names."""

        def change(record: Record) -> None:
            found = ref(record)
            self.bucket.put(found["key"], data)
            found.update(_pin(data))

        self.manifest(change)


def _pin(data: bytes) -> Record:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def forger(tmp_path: Path) -> Forger:
    return Forger(open_bucket((tmp_path / "bucket").as_uri(), create=True))


def weights(record: Record) -> Record:
    return next(file for file in record["anchor"]["files"] if file["key"].endswith("model.safetensors"))


def strange_delta() -> bytes:
    """Of a tensor whose name is written in codes."""
    patch = Patch(CODES, (4,), np.arange(2), np.ones(2, np.uint16))
    return codec.encode([patch], lambda _: np.zeros(4, np.uint16), base=0, version=1)


ATTACKS: dict[str, Callable[[Forger], None]] = {
    "a field's name": lambda forger: forger.head(lambda record: record.update({CODES: 1})),
    "a field of a manifest": lambda forger: forger.manifest(lambda record: record.update({CODES: 1})),
    "a tensor's name": lambda forger: forger.file(lambda record: record["deltas"][-1], strange_delta()),
    "a time": lambda forger: forger.manifest(lambda record: record.update(created_at=1e300)),
    "no delta": lambda forger: forger.file(lambda record: record["deltas"][-1], CODES.encode()),
    "no anchor": lambda forger: forger.file(weights, CODES.encode()),
    "another anchor": lambda forger: forger.file(weights, save({CODES: np.zeros(3, np.float32)})),
    "an anchor of odd types": lambda forger: forger.file(weights, save({"w": np.zeros(3, np.bool_)})),
    "an empty anchor": lambda forger: forger.file(weights, b""),
    "a name in the listing": lambda forger: _plant(forger, f"runs/r/deltas/{CODES[:3]}"),
}


def _plant(forger: Forger, name: str) -> None:
    root = Path(forger.bucket.url.removeprefix("file://"))
    (root / name).write_bytes(b"x")


@pytest.mark.parametrize("name", ATTACKS)
def test_commands_say_it_in_plain_lines(forger: Forger, tmp_path: Path, name: str) -> None:
    ATTACKS[name](forger)
    url = forger.bucket.url
    for words in (
        ("log", url),
        ("show", url),
        ("show", url, "--version", 0),
        ("verify", url),
        ("checkout", url, "--out", tmp_path / "out"),
        ("gc", url, "--keep", "1GB", "--dry-run"),
        ("follow", url, "--into", tmp_path / "into", "--once"),
    ):
        result = command(*words)  # anything but a sentence is raised here
        printed = (result.output + result.complaint).splitlines()
        assert all(line.isprintable() for line in printed), printed
        assert result.code == 0 or len(result.complaint.splitlines()) == 1


@pytest.mark.full
def test_exporting_says_it_in_plain_lines(forger: Forger, tmp_path: Path) -> None:
    forger.file(lambda record: record["deltas"][-1], CODES.encode())
    forger.bucket.put("runs/r/log/00000001.jsonl", CODES.encode())
    words = ("--bucket", forger.bucket.url, "--export", str(tmp_path / "site"))
    done = subprocess.run(
        [sys.executable, "-m", "inference_space.dashboard", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed = (done.stdout + done.stderr).splitlines()
    assert all(line.isprintable() for line in printed), printed
    assert any("lines of the run's log are left out" in line for line in printed)
    assert any("v1 is left out" in line for line in printed)


def test_an_error_is_a_line_whatever_it_quotes() -> None:
    assert str(DeltaWeightSyncError(f"it says {CODES}")).isprintable()
    assert len(str(DeltaWeightSyncError("x" * 10**6))) < 10_000
