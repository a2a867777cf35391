"""Whatever is in a bucket, the dashboard, the commands, followers and publishers take it or say a sentence.

Objects are forged so that every hash fits; `python -m tests.fuzz.bucket` goes on with as many as one likes.
"""

import contextlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from delta_weight_sync import codec
from delta_weight_sync.errors import DeltaWeightSyncError, ProtocolError, printable
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Keys, LogKey, Writer
from delta_weight_sync.signing import PUBLIC_KEY, PublicKeys, new_pair
from delta_weight_sync.store import SMALL, Bucket, open_bucket
from inference_space.dashboard.export import export
from tests.cli.command import command
from tests.fuzz.forged import (
    PARTS,
    RUN,
    Files,
    change_object,
    forged_parts,
    intact_parts,
    intact_run,
    name_in_head,
    newest,
    write_files,
)
from tests.support.records import WRITER

CODES = "\x1b]0;owned\x07\x1b[2J\r\n\u202e"
_PATCH = codec.Patch(CODES, (4,), np.arange(2), np.ones(2, np.uint16))
STRANGE_DELTA = codec.encode([_PATCH], lambda _: np.zeros(4, np.uint16), base=2, version=3)


def manifest(changes: dict[str, object]) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        key = newest(files, "manifests")
        _change(files, key, changes)
        name_in_head(files, key)

    return change


def file(kind: str, data: bytes) -> Callable[[Files], None]:
    """Replaces the newest delta or the weights of the anchor."""
    return lambda files: change_object(files, newest(files, kind), lambda _: data)


def _change(files: Files, key: str, changes: dict[str, object]) -> None:
    record = json.loads(files[key])
    del record["seal"]
    files[key] = json.dumps(record | changes).encode()


ATTACKS: dict[str, Callable[[Files], object]] = {
    "a field's name": lambda files: _change(files, newest(files, "heads"), {CODES: 1}),
    "a field of a manifest": manifest({CODES: 1}),
    "a tensor's name": file("deltas", STRANGE_DELTA),
    "a time": manifest({"created_at": 1e300}),
    "no delta": file("deltas", CODES.encode()),
    "no anchor": file("anchors", CODES.encode()),
    "another anchor": file("anchors", save({CODES: np.zeros(3, np.float32)})),
    "an anchor of odd types": file("anchors", save({"w": np.zeros(3, np.bool_)})),
    "an empty anchor": file("anchors", b""),
    "a name in the listing": lambda files: files.update({f"runs/{RUN}/deltas/{CODES[:3]}": b"x"}),
    "a run's name": lambda files: files.update({f"runs/{CODES}/x": b"x"}),
}
SAYS = {
    "parts in another order": "parts of the delta from version 2 to 3 .* are not the published objects",
    "a part that the manifest leaves out": "is not the published object",
    "a part in place of another": "version 3 has digest",
    "a part with an impossible name": "not 1 to 64 named sizes",
    "more parts than a trainer writes": "not 1 to 64 named sizes",
    "a delta of an impossible writer": "the writer of a delta is wrong",
    "a part that is missing": "does not exist",
    "a jump of one version": "a jump spans less than two versions",
    "two parts with the same tensors": "version 3 has digest",
    "an anchor without one of its files": "has digest|which this model does not have",
    "an anchor without weights": r"the anchor of version \d has no weights",
}


@pytest.mark.finding(18)
@pytest.mark.parametrize("name", ATTACKS)
def test_commands_print_plain_lines(tmp_path: Path, name: str) -> None:
    files = dict(intact_run())
    ATTACKS[name](files)
    url = write_files(files, tmp_path / "bucket")
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
        if (name, words) == ("a tensor's name", ("show", url)):
            assert repr(CODES)[1:-1] in result.output


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_fit_are_refused_by_a_sentence(tmp_path: Path, name: str) -> None:
    url = write_files(forged_parts(name), tmp_path / "bucket")
    result = command("verify", url)
    assert re.search(SAYS[name], result.complaint)
    assert len(result.complaint.splitlines()) == 1
    assert command("verify", write_files(intact_parts(), tmp_path / "bucket")).code == 0


@pytest.mark.finding(18)
def test_exporting_prints_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = intact_run() | {Keys(RUN).log_part(LogKey(WRITER, 7, 7)): CODES.encode()}
    ATTACKS["no delta"](files)
    export(open_bucket(write_files(files, tmp_path / "bucket")), None, tmp_path / "site")
    printed = "".join(capsys.readouterr()).splitlines()
    assert all(line.isprintable() for line in printed), printed
    assert any("lines of the run's log are left out" in line for line in printed)
    assert any("v3 is left out" in line for line in printed)


@pytest.mark.finding(18)
def test_an_error_is_a_line_whatever_it_quotes() -> None:
    assert str(DeltaWeightSyncError(f"it says {CODES}")).isprintable()
    assert len(str(DeltaWeightSyncError("x" * 10**6))) < 10_000
    assert printable("größer, 模型 weight") == "größer, 模型 weight"


@pytest.mark.parametrize(
    ("cases", "seed"),
    [pytest.param(60, 1, marks=pytest.mark.full), pytest.param(10_000, 2, marks=pytest.mark.long)],
)
def test_forged_runs(cases: int, seed: int) -> None:
    """In a process of its own, whose memory is that of these cases."""
    command = [sys.executable, "-m", "tests.fuzz.bucket", "--cases", str(cases), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    assert f"{cases} cases" in done.stdout
    for reader in ("dashboard", "command_line", "follower", "publisher"):
        assert f"{reader} took" in done.stdout
        assert f"{reader} refused" in done.stdout


class Counting:
    """Counts what is read of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.read: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def get(self, key: str, limit: int = SMALL) -> bytes:
        data = self._bucket.get(key, limit)
        self.read.append((key.split("/")[2], len(data)))
        return data


@pytest.mark.full
@pytest.mark.finding("M5")
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [200, 500_000, 1 << 20, 8 << 20])
def test_a_search_for_the_newest_version_reads_little_whatever_a_bucket_holds(
    tmp_path: Path, signed: bool, size: int
) -> None:
    url = write_files(intact_run(), tmp_path / "bucket")
    bucket: Any = Counting(open_bucket(url.partition("#")[0]))
    keys = Keys(RUN)
    for number in range(20):
        forger = Writer(100 + number, f"{number:032x}")
        bucket.put(keys.head(forger), b"{" if number % 2 else b"?" * (1 << 20))
        for version in range(5, 13):
            bucket.put(keys.manifest(version, forger), b'{"x":"' + b"y" * size + b'"}')
    trusted = PublicKeys(new_pair()[PUBLIC_KEY] if signed else "")
    with contextlib.suppress(ProtocolError):
        RunReader(bucket, RUN, trusted).head()
    kinds = Counter(kind for kind, _ in bucket.read)
    assert kinds["heads"] <= 16
    assert kinds["manifests"] <= 32
    assert sum(size for _, size in bucket.read) < 10 << 20


@pytest.mark.finding("M5")
def test_a_few_forged_manifests_hide_no_version(tmp_path: Path) -> None:
    url = write_files(intact_run(), tmp_path / "bucket")
    reader = RunReader(open_bucket(url.partition("#")[0]), RUN)
    newest = reader.newest()
    keys = Keys(RUN)
    for number in range(3):
        forger = Writer(100 + number, f"{number:032x}")
        reader.bucket.put(keys.head(forger), b"{")
        for version in range(5, 13):
            reader.bucket.put(keys.manifest(version, forger), b"{}")
        reader.bucket.put(keys.manifest(99, forger), b"?" * (2 << 20))
    assert reader.newest() == newest
