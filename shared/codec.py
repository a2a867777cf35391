"""Old bits + new bits -> delta file -> patches; exact for every bf16 bit pattern.

A delta file is plain safetensors. `safe_open(...).metadata()` shows what it is: its format, the versions
it joins and, per tensor, name, shape and number of changes. The changes of all tensors follow each other
in three uint8 streams, each one zstd frame:

    gaps   distance to the previous change minus one, in base 255: every 255 adds 255, a smaller byte ends
    low    low byte of the zigzag-coded change in units in the last place (ULP)
    high   high byte of it; almost always zero, so that zstd removes it

A change is `(new - old) mod 2^16` on the raw bits, read as signed: +1 is the next larger magnitude. Most
changes of an RL step are +-1 ULP, which is why this is small: 1.25 bytes per change where 1 % changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

DELTA_FORMAT = "delta-weight-sync-gap/1"
ZSTD_LEVEL = 1
MAX_TENSOR = 1 << 40

Bits = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
_TABLE: TypeAdapter[list[tuple[str, list[int], int]]] = TypeAdapter(list[tuple[str, list[int], int]])


class CodecError(ValueError):
    """A delta file that cannot be what a publisher wrote; nothing of it may be applied."""


_UNREADABLE = (SafetensorError, zstandard.ZstdError, ValidationError, ValueError, LookupError, MemoryError)


@dataclass(frozen=True)
class Patch:
    """The changed elements of one tensor.

    `index`: int64 [n], strictly increasing row-major positions. `ulps`: uint16 [n], `(new - old) mod 2^16`
    of the bf16 bits, never zero.
    """

    name: str
    shape: tuple[int, ...]
    index: NDArray[np.int64]
    ulps: Bits


@dataclass(frozen=True)
class Delta:
    """A decoded delta file: patches that turn `base` into `version`."""

    base: int
    version: int
    patches: tuple[Patch, ...]


def diff(name: str, old: Bits, new: Bits) -> Patch:
    """Exact difference of two bit arrays of one shape; -0.0 and every NaN pattern count as themselves."""
    if old.shape != new.shape:
        raise CodecError(f"{name}: shape changed from {old.shape} to {new.shape} within a run")
    flat_old, flat_new = old.reshape(-1), new.reshape(-1)
    index = np.flatnonzero(flat_old != flat_new)
    return Patch(name, new.shape, index, flat_new[index] - flat_old[index])


def apply(patch: Patch, bits: Bits) -> None:
    """Add the patch to `bits` (C-contiguous, the base's) in place."""
    if bits.shape != patch.shape:
        raise CodecError(f"{patch.name}: the delta is for shape {patch.shape}, the model has {bits.shape}")
    bits.reshape(-1)[patch.index] += patch.ulps


def merge(first: Sequence[Patch], second: Sequence[Patch]) -> list[Patch]:
    """One patch per tensor that does what `first` and then `second` do; changes that cancel are gone."""
    merged = {p.name: p for p in first}
    for patch in second:
        merged[patch.name] = _merge_one(merged[patch.name], patch) if patch.name in merged else patch
    return [p for p in merged.values() if p.index.size]


def _merge_one(first: Patch, second: Patch) -> Patch:
    index, inverse = np.unique(np.concatenate([first.index, second.index]), return_inverse=True)
    ulps = np.zeros(index.size, np.uint16)
    ulps[inverse[: first.index.size]] = first.ulps
    ulps[inverse[first.index.size :]] += second.ulps
    kept = ulps != 0
    return Patch(first.name, first.shape, index[kept], ulps[kept])


def encode(patches: Iterable[Patch], *, base: int, version: int) -> bytes:
    """The delta file as bytes."""
    changed = [p for p in patches if p.index.size]
    ulps = np.concatenate([p.ulps for p in changed] or [np.empty(0, np.uint16)])
    zigzag = (ulps << 1) ^ (0 - (ulps >> 15)).astype(np.uint16)
    streams = {
        "gaps": _pack(np.concatenate([_gap_bytes(p.index) for p in changed] or [np.empty(0, np.uint8)])),
        "low": _pack(zigzag.astype(np.uint8)),
        "high": _pack((zigzag >> 8).astype(np.uint8)),
    }
    table = json.dumps([[p.name, list(p.shape), p.index.size] for p in changed])
    metadata = {"format": DELTA_FORMAT, "base": str(base), "version": str(version), "tensors": table}
    return save(streams, metadata)


def decode(path: Path) -> Delta:
    """Read a delta file; raises `CodecError` naming the file and what is wrong with it."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            streams = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return _decode(metadata, streams)
    except _UNREADABLE as error:
        raise CodecError(f"{path.name} is not a readable delta: {error}") from error


def _decode(metadata: dict[str, str], streams: dict[str, Bytes]) -> Delta:
    if metadata.get("format") != DELTA_FORMAT or set(streams) != {"gaps", "low", "high"}:
        raise CodecError(f"format {metadata.get('format')!r}, this reader knows {DELTA_FORMAT!r}")
    table = _TABLE.validate_json(metadata["tensors"])
    counts = [count for _, _, count in table]
    sizes = [_numel(name, shape) for name, shape, _ in table]
    if any(not 0 < n <= size for n, size in zip(counts, sizes, strict=True)):
        raise CodecError("a tensor lists more changes than it has elements")
    total = sum(counts)
    low, high = (_unpack(streams[key], total, total).astype(np.uint16) for key in ("low", "high"))
    gaps = _unpack(streams["gaps"], total, total + sum(sizes) // 255)
    zigzag = low | (high << 8)
    ulps: Bits = ((zigzag >> 1) ^ (0 - (zigzag & 1))).astype(np.uint16)
    if np.any(ulps == 0):
        raise CodecError("a listed change changes nothing")
    patches = tuple(_split(table, gaps, ulps))
    return Delta(int(metadata["base"]), int(metadata["version"]), patches)


def _split(table: list[tuple[str, list[int], int]], gaps: Bytes, ulps: Bits) -> Iterable[Patch]:
    ends = np.flatnonzero(gaps < 255)
    if ends.size != ulps.size or (gaps.size and gaps[-1] == 255):
        raise CodecError(f"{ends.size} positions for {ulps.size} changes")
    steps = np.add.reduceat(gaps, np.concatenate([[0], ends[:-1] + 1]), dtype=np.int64) if ends.size else ends
    start = 0
    for name, shape, count in table:
        index = np.cumsum(steps[start : start + count] + 1) - 1
        if index[-1] >= _numel(name, shape):
            raise CodecError(f"{name}: position {index[-1]} lies outside shape {shape}")
        yield Patch(name, tuple(shape), index, ulps[start : start + count])
        start += count


def _gap_bytes(index: NDArray[np.int64]) -> Bytes:
    gaps = np.diff(index, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1) - 1
    out = np.full(ends[-1] + 1, 255, np.uint8)
    out[ends] = gaps % 255
    return out


def _pack(stream: Bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(stream.tobytes()), np.uint8)


def _unpack(frame: Bytes, at_least: int, at_most: int) -> Bytes:
    size = zstandard.frame_content_size(frame.tobytes())
    if not at_least <= size <= at_most:
        raise CodecError(f"a stream of {size} bytes where {at_least} to {at_most} are possible")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.tobytes()), np.uint8)


def _numel(name: str, shape: Sequence[int]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    if any(length < 0 for length in shape) or numel > MAX_TENSOR:
        raise CodecError(f"{name}: impossible shape {list(shape)}")
    return numel
