"""Valid deltas of a small model, one of each mode; their damage; and what a reader may make of it.

Damage hits where it hurts: a file's bytes, its header, its metadata field by field, its streams.

A safetensors file is the length of a JSON header (8 bytes), the header, and the tensors' bytes. The header is
mutated as a tree, so that a file stays well-formed around the one thing that is wrong in it.
"""

import copy
import functools
import json
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import zstandard
from pydantic import ValidationError
from safetensors import SafetensorError

from delta_weight_sync import codec
from delta_weight_sync.errors import CodecError

Tree = Any
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, zstandard.ZstdError)
JSON_FIELDS = ("tensors", "groups")  # metadata values that are JSON themselves
FRAMES = (".mask", ".low", ".high")  # streams that are zstd frames
DTYPES = (
    *("U8", "I8", "BOOL", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "I64", "U64", "F64", "C64"),
    *("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "X"),
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 8, 14, 15, 40, 41, 63, 64, 65, 127, 128, 255, 256, 4095, 32766, 32767, 65535, 65536),
    *(2**25, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
    *(-2, -64, -(2**31), -(2**63), -(2**63) - 1, 0.0, 1.0, 1.5, -0.0, 1e308, float("nan"), float("inf")),
)
MODES = ("gaps", "bands", "mask", "dense", "raw")
OTHERS = (True, False, None, "", "0", "-1", "1e3", "a.bias", [], {}, [[]], *MODES, *DTYPES)


class Parts(NamedTuple):
    """A delta file taken apart: metadata with its JSON parsed, and name -> [dtype, shape, content]."""

    metadata: dict[str, Tree]
    streams: dict[str, tuple[str, Tree, bytes]]


def mutate(content: bytes, rng: Random) -> bytes:
    """`content` with one to three things wrong; deterministic given the generator's state."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choices((_metadata, _stream, mutate_header, mutate_raw), (12, 16, 3, 1))[0]
        try:
            content = kind(content, rng)
        except _DAMAGED:
            content = mutate_raw(content, rng)  # too damaged to be taken apart again
    return content


def take_apart(content: bytes) -> Parts:
    """Raises all kinds of errors if it is no safetensors file."""
    header, body = _split(content)
    metadata = header.pop("__metadata__")
    streams = {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    parsed = {key: json.loads(metadata[key]) for key in JSON_FIELDS if key in metadata}
    return Parts(metadata | parsed, streams)


def put_together(parts: Parts) -> bytes:
    metadata = {key: v if isinstance(v, str) else json.dumps(v) for key, v in parts.metadata.items()}
    header: dict[str, Tree] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, content) in parts.streams.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    return _join(header, b"".join(content for _, _, content in parts.streams.values()))


def replace_stream(parts: Parts, name: str, content: bytes) -> None:
    """Give a stream other bytes, and the shape that goes with them."""
    dtype, (items, *_), before = parts.streams[name]
    width = max(len(before) // max(items, 1), 1)
    parts.streams[name] = (dtype, [len(content) // width], content[: len(content) // width * width])


def _split(content: bytes) -> tuple[dict[str, Tree], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _join(header: Tree, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def _metadata(content: bytes, rng: Random) -> bytes:
    parts = take_apart(content)
    mutate_tree(parts.metadata, rng)
    return put_together(parts)


def mutate_header(content: bytes, rng: Random) -> bytes:
    header, body = _split(content)
    mutate_tree(header, rng)
    return _join(header, body)


def _stream(content: bytes, rng: Random) -> bytes:
    parts = take_apart(content)
    name = rng.choice(list(parts.streams))
    other = rng.choice(list(parts.streams))
    _, shape, stream = parts.streams[name]
    action = rng.randrange(20)
    if action == 0:
        del parts.streams[name]
    elif action == 1:
        parts.streams[name] = parts.streams[other]
    elif action == 2:
        parts.streams[rng.choice(("0.", "1.", "")) + other[2:]] = parts.streams[name]
    elif action == 3:
        parts.streams[name] = (rng.choice(DTYPES), rng.choice((shape, [*shape, 1], [1, *shape], [])), stream)
    elif name.endswith(FRAMES):
        replace_stream(parts, name, _frame(stream, rng))
    else:
        replace_stream(parts, name, mutate_raw(stream, rng))
    return put_together(parts)


def _frame(frame: bytes, rng: Random) -> bytes:
    """A damaged frame, or a whole one of damaged content that may not say how long it is."""
    if rng.random() < 0.3 or not 0 <= zstandard.frame_content_size(frame) <= 1 << 20:
        return mutate_raw(frame, rng)
    content = mutate_raw(zstandard.ZstdDecompressor().decompress(frame), rng)
    says = rng.random() < 0.8
    return zstandard.ZstdCompressor(write_content_size=says).compress(content)


def mutate_raw(content: bytes, rng: Random) -> bytes:
    """Flipped bits, other bytes, zeros or ones; rarely missing or more bytes, which the first check finds."""
    damaged = bytearray(content)
    at = rng.randrange(len(content) + 1)
    size = min(rng.choice((1, 1, 2, 8, 9, len(content))), len(content) - at)
    action = rng.choices(range(6), (6, 3, 2, 1, 1, 1))[0]
    if action == 0 and content:
        damaged[at % len(content)] ^= 1 << rng.randrange(8)
    elif action == 1:
        damaged[at : at + size] = rng.randbytes(size)
    elif action == 2:
        damaged[at : at + size] = bytes([rng.choice((0, 255))]) * size
    elif action == 3:
        damaged[at:at] = rng.randbytes(min(size, 64))
    else:
        del damaged[at : at + size if action == 4 else None]
    return bytes(damaged)


def mutate_tree(tree: Tree, rng: Random) -> None:
    """Remove, add, repeat, nudge or replace one node of a JSON tree, in place."""
    holder, key = _place(tree, rng)
    action = rng.randrange(8)
    if action == 0:
        del holder[key]
    elif action == 1:
        _insert(holder, key, _value(tree, rng))
    elif action == 2:
        _insert(holder, key, holder[key])
    elif action <= 4 and isinstance(holder[key], int):
        holder[key] += rng.choice((1, -1, 7, -8, 64, 2**32))
    else:
        holder[key] = _value(tree, rng)


def _place(tree: Tree, rng: Random) -> tuple[Tree, Any]:
    """(holder, key) of one node: a walk from the root, rather into lists and objects than past them."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        inner = [key for key in keys if tree[key] and isinstance(tree[key], dict | list)]
        if not inner or rng.random() < 0.2:
            return tree, rng.choice(keys)
        key = rng.choice(inner)
        if rng.random() < 0.1:
            return tree, key
        tree = tree[key]


def _insert(holder: Tree, key: Any, value: Tree) -> None:
    if isinstance(holder, dict):
        holder[key + "2"] = value
    else:
        holder.insert(key, value)


def _value(tree: Tree, rng: Random) -> Tree:
    """A number or word that may hurt, a number of any length, or another node of the tree."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(OTHERS)
    if kind == 2:
        return rng.getrandbits(rng.choice((3, 6, 9, 14)))
    holder, key = _place(tree, rng)
    return copy.deepcopy(holder[key])


State = dict[str, np.ndarray]
_RNG = np.random.default_rng(0)


def _weights(*shape: int) -> np.ndarray:
    return (_RNG.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


OLD: State = {
    "a.weight": _weights(30, 50),
    "a.bias": _weights(63),
    "scale": np.array(0x3F80, np.uint16),
    "b.weight": _weights(4, 17, 65),  # more than the 4,096 weights that are sorted into bands in one go
    "b.bias": _weights(64),
    "none": np.empty((0, 3), np.uint16),
}


def _moved(old: np.ndarray, share: float, far: float, moves: tuple[int, ...] = (1, 65535)) -> np.ndarray:
    steps = _RNG.choice(np.array(moves, np.uint16), old.shape)
    steps = np.where(_RNG.random(old.shape) < far, _RNG.integers(1, 65536, old.shape), steps)
    return old + np.where(_RNG.random(old.shape) < share, steps, 0).astype(np.uint16)


def _rows(old: np.ndarray) -> np.ndarray:
    new = old.copy()
    new.reshape(-1)[old.size // 3 : old.size // 2] += np.uint16(1)
    return new


def _delta(new: State, encoding: codec.Encoding) -> bytes:
    patches = [codec.diff(name, OLD[name], bits) for name, bits in new.items()]
    content = codec.encode(patches, OLD.__getitem__, base=3, version=4, encoding=encoding)
    metadata, streams = take_apart(content)
    return put_together(Parts(dict(sorted(metadata.items())), streams))  # safetensors shuffles metadata


@functools.cache
def seeds() -> dict[str, bytes]:
    """What each seed is called -> the file."""
    sparse = {name: _moved(old, 0.05, 0.1) for name, old in OLD.items()}
    most = {name: _moved(old, 0.9, 0.0) for name, old in OLD.items()}
    rows = {name: _rows(old) for name, old in OLD.items()}
    far = {name: _moved(old, 0.6, 0.0, (40, 50, 60)) for name, old in OLD.items()}
    other = {name: _weights(*old.shape) for name, old in OLD.items()}
    kinds = [sparse, rows, far, other, sparse, most]
    mixed = {name: kind[name] for name, kind in zip(OLD, kinds, strict=True)}
    return {
        "gaps": _delta(sparse, "fast"),
        "bands": _delta(sparse, "small"),
        "flipped gaps": _delta(most, "fast"),
        "flipped bands": _delta(most, "small"),
        "mask": _delta(rows, "fast"),
        "dense": _delta(far, "fast"),
        "raw": _delta(other, "fast"),
        "mixed": _delta(mixed, "small"),
        "nothing": _delta({}, "fast"),
    }


# what `Delta.patches` states
PER_BYTE = 64
PER_ELEMENT = 16
ALWAYS = 1 << 16  # Python's own objects around an open file and an error
_CHECKS = (SafetensorError, zstandard.ZstdError, ValidationError, CodecError)


def check(path: Path, old: State = OLD) -> bool:
    """True if the file was decoded, False if it was refused; an AssertionError if the reader misbehaved."""
    tracemalloc.start()
    accepted = decoded(path, old)
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stated = PER_BYTE * path.stat().st_size + PER_ELEMENT * sum(bits.size for bits in old.values()) + ALWAYS
    assert allocated <= stated, f"it allocated {allocated} bytes, {stated} are stated"
    return accepted


def decoded(path: Path, old: State = OLD) -> bool:
    """`check` without the memory: the first call of a kernel loads code."""
    try:
        patches = list(codec.Delta(path).patches({n: b.shape for n, b in old.items()}, old.__getitem__))
    except CodecError as error:
        _is_plain(error, path)
        return False
    for patch in patches:
        _fits(patch, old[patch.name])
    return True


def _is_plain(error: CodecError, path: Path) -> None:
    """One short line that names the file, caused by a check and not by an accident such as an IndexError."""
    text = str(error)
    cause = error.__cause__
    assert path.name in text
    assert len(text) < 400, text[:1000]
    assert text.isprintable(), repr(text)
    assert type(cause) in (KeyError, ValueError) or isinstance(cause, _CHECKS), repr(cause)


def _fits(patch: codec.Patch, old: np.ndarray) -> None:
    index = patch.index
    ulps = patch.ulps
    assert (index.dtype, ulps.dtype) == (np.int64, np.uint16)
    assert patch.shape == old.shape
    assert index.shape == ulps.shape
    assert np.all(index[1:] > index[:-1])
    assert np.all(ulps != 0)
    codec.apply(patch, old.copy())
