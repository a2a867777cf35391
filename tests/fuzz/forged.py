"""A small real run, and forgeries of it: one object is wrong, and all hashes fit.

If versions are not signed, anyone who may write to the bucket can make every hash fit, so that readers get
past them: the manifest gets the hash of a changed file, and HEAD gets the hash of a changed manifest.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests.fuzz.deltas import mutate, mutate_header, mutate_raw, mutate_tree
from tests.support.parted import parted
from tests.support.real_run import RealRun, games

RUN = "forged"
Files = dict[str, bytes]
_TERMINAL_CODES = "\x1b]0;owned\x07\x1b[2J"
_TEXTS = (
    *(
        _TERMINAL_CODES,
        "\x00",
        "\r\n",
        "\u202e",
        "\ud800",
        "<script>",
        "{{7*7}}",
        "../../etc/passwd",
        "/etc/passwd",
    ),
    *("x" * 5000, "9" * 4400, "runs/forged", "runs/forged/run.json", "1" * 64, "NaN", "-0", "1e400"),
)
_NUMBERS = (5e-324, 1e-300, 1e15, -1e15, 1e16, 1e300, 1e308, 253402300799, (1 << 62) - 1, 1 << 62, 1 << 63)


@cache
def intact_run() -> Files:
    """Key -> content of a run of four versions."""
    with tempfile.TemporaryDirectory() as folder:
        bucket = open_bucket(Path(folder).as_uri(), create=True)
        run = RealRun(bucket, run=RUN, layers=2, width=8)
        for reward in (0.1, 0.2, 0.3):
            run.step(reward, games())
        run.end()
        return {info.key: bucket.get(info.key) for info in bucket.list("")}


@cache
def intact_parts() -> Files:
    """The same run as two ranks publish it."""
    with tempfile.TemporaryDirectory() as folder:
        return parted(RunReader(open_bucket(write_files(intact_run(), Path(folder) / "bucket")), RUN))


def write_files(files: Files, folder: Path) -> str:
    """Make the folder a bucket with these objects; returns its URL."""
    shutil.rmtree(folder, ignore_errors=True)
    for key, content in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(content)
    return folder.as_uri()


def forged(rng: Random) -> tuple[str, Files]:
    """Which kind of object was changed, and the run; deterministic given the generator's state."""
    files = dict(rng.choice((intact_run, intact_parts))())
    kind = rng.choice(list(_FORGE))
    _FORGE[kind](files, rng)
    return kind, files


def newest(files: Files, kind: str) -> str:
    return max(key for key in files if f"/{kind}/" in key)


def _manifest(files: Files, rng: Random) -> None:
    key = newest(files, "manifests")
    files[key] = _record(files[key], rng)
    name_in_head(files, key)


def _unreferenced(files: Files, key: str, rng: Random) -> None:
    """A record whose hash no other one has."""
    files[key] = _record(files[key], rng)


def _log(files: Files, rng: Random) -> None:
    key = newest(files, "log")
    lines = zstandard.decompress(files[key]).split(b"\n")
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(lines))
        lines[at] = _record(lines[at], rng)
    files[key] = zstandard.compress(b"\n".join(lines))
    if rng.random() < 0.2:
        files[key] = mutate_raw(files[key], rng)


def _delta(files: Files, rng: Random) -> None:
    change_object(files, newest(files, "deltas"), lambda content: mutate(content, rng))


def _anchor(files: Files, rng: Random) -> None:
    change = rng.choice((mutate_header, mutate_raw))
    anchors = [key for key in files if "/anchors/" in key and key.endswith(".safetensors")]
    change_object(files, rng.choice(anchors), lambda content: change(content, rng))


def _misplaced(files: Files, rng: Random) -> None:
    """An object that lies where it does not belong."""
    key = rng.choice(list(files))
    folder, _, name = key.rpartition("/")
    other = rng.choice((f"{key}2", f"{folder}/9{name}", f"{folder}/{'9' * 200}{name[8:]}", f"{key}x/{name}"))
    files[other] = files[key] if rng.random() < 0.5 else rng.randbytes(9)


def _same_tensors(tree: Any, files: Files) -> None:
    row = tree["deltas"][-1]
    *_, last = keys_of(tree, "deltas", row)
    row[3] = row[3] | {"r2": row[3]["r1"]}
    files[last.replace(".r1", ".r2")] = files[last]
    _update_entry(tree, files, "deltas", row)


def _without_part(tree: Any, files: Files) -> None:
    row = tree["deltas"][-1]
    row[3] = {"r0": row[3]["r0"], "r7": row[3]["r1"]}
    files[keys_of(tree, "deltas", row)[1]] = files[keys_of(tree, "deltas", row)[0]]
    _update_entry(tree, files, "deltas", row)


# What is wrong with the newest manifest of a run whose deltas and anchors come in parts, or with its files.
PARTS: dict[str, Callable[[Any, Files], object]] = {
    "parts in another order": lambda tree, _: tree["deltas"][-1].__setitem__(
        3, dict(reversed(tree["deltas"][-1][3].items()))
    ),
    "a part that the manifest leaves out": lambda tree, _: tree["deltas"][-1][3].pop("r1"),
    "a part in place of another": _without_part,
    "a part that is missing": lambda tree, files: files.pop(keys_of(tree, "deltas", tree["deltas"][-1])[-1]),
    "a part with an impossible name": lambda tree, _: tree["deltas"][-1][3].update({"../r2": 1}),
    "more parts than a trainer writes": lambda tree, _: tree["deltas"][-1][3].update(
        {f"r{part}": 1 for part in range(65)}
    ),
    "a delta of an impossible writer": lambda tree, _: tree["deltas"][-1].append("t1-../../x"),
    "a jump of one version": lambda tree, _: tree["jumps"].extend(tree["deltas"][-1:]),
    "two parts with the same tensors": _same_tensors,
    "an anchor without one of its files": lambda tree, _: tree["anchor"]["files"].pop(
        next(i for i, (name, *_) in enumerate(tree["anchor"]["files"]) if "00002-of" in name)
    ),
    "an anchor without weights": lambda tree, _: tree["anchor"].update(files=tree["anchor"]["files"][:1]),
}


def forged_parts(name: str) -> Files:
    """A run with one of `PARTS`; all hashes fit."""
    files = dict(intact_parts())
    key = newest(files, "manifests")
    tree = json.loads(files[key])
    del tree["seal"]
    PARTS[name](tree, files)
    files[key] = json.dumps(tree).encode()
    name_in_head(files, key)
    return files


_FORGE: dict[str, Callable[[Files, Random], None]] = {
    "head": lambda files, rng: _unreferenced(files, newest(files, "heads"), rng),
    "manifest": _manifest,
    "description": lambda files, rng: _unreferenced(files, f"runs/{RUN}/run.json", rng),
    "log": _log,
    "delta": _delta,
    "anchor": _anchor,
    "name": _misplaced,
}


def _record(content: bytes, rng: Random) -> bytes:
    """A record with one to three things wrong, and with no seal, so that it gets the one that fits."""
    if rng.random() < 0.1:
        return mutate_raw(content, rng)
    try:
        tree = json.loads(content)
        tree.pop("seal", None)
    except (ValueError, AttributeError):  # it was damaged before
        return mutate_raw(content, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if tree:
            _leaf(tree, rng) if rng.random() < 0.5 else mutate_tree(tree, rng)
    return json.dumps(tree).encode(errors="replace")


def _leaf(tree: Any, rng: Random) -> None:
    while True:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = rng.choice(keys)
        if not (isinstance(tree[key], dict | list) and tree[key]):
            break
        tree = tree[key]
    if isinstance(tree, dict) and rng.random() < 0.1:
        tree[rng.choice(_TEXTS)] = tree.pop(key)
    else:
        tree[key] = rng.choice(_TEXTS if isinstance(tree[key], str) else _NUMBERS)


def change_object(files: Files, key: str, change: Callable[[bytes], bytes]) -> None:
    """Change an object, and put its new size and hash into the newest manifest and HEAD."""
    files[key] = change(files[key])
    manifest = newest(files, "manifests")
    tree = json.loads(files[manifest])
    del tree["seal"]
    for kind in ("deltas", "jumps"):
        for row in tree[kind]:
            if key in keys_of(tree, kind, row):
                _update_entry(tree, files, kind, row)
    for row in tree["anchor"]["files"]:
        if key.endswith(f"/{row[0]}") and "/anchors/" in key:
            row[1:3] = _reference(files[key]).values()
    files[manifest] = json.dumps(tree).encode()
    name_in_head(files, manifest)


def keys_of(tree: Any, kind: str, row: list[Any]) -> list[str]:
    """The keys of a delta's or jump's files, from its entry in the manifest `tree`."""
    base, version, _, size, _, *other = row
    writer = other[0] if other else f"t{tree['writer_term']}-{tree['writer'][:8]}"
    start = f"{base:08d}-" if kind == "jumps" else ""
    parts = [f".{part}" for part in size] if isinstance(size, dict) else [""]
    return [f"runs/{RUN}/{kind}/{start}{version:08d}.{writer}{part}.safetensors" for part in parts]


def _update_entry(tree: Any, files: Files, kind: str, row: list[Any]) -> None:
    """Put the sizes and the hash of its files into an entry."""
    found = [files[key] for key in keys_of(tree, kind, row)]
    if isinstance(row[3], dict):
        row[3] = dict(zip(row[3], map(len, found), strict=True))
        row[4] = hashlib.sha256(b"".join(hashlib.sha256(file).digest() for file in found)).hexdigest()
    else:
        row[3:5] = _reference(found[0]).values()


def name_in_head(files: Files, manifest: str) -> None:
    """Put the size and hash of the manifest into HEAD."""
    key = newest(files, "heads")
    head = json.loads(files[key])
    del head["seal"]
    head["manifest"].update(_reference(files[manifest]))
    files[key] = json.dumps(head).encode()


def _reference(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
