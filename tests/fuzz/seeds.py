"""A small model and valid deltas of it, one of each mode: what the fuzzer starts from."""

import functools

import numpy as np

from delta_weight_sync import codec
from tests.fuzz.mutate import Parts, put_together, take_apart

State = dict[str, np.ndarray]
_RNG = np.random.default_rng(0)


def _weights(*shape: int) -> np.ndarray:
    return (_RNG.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


OLD: State = {
    "a.weight": _weights(30, 50),
    "a.bias": _weights(63),
    "scale": np.array(0x3F80, np.uint16),
    "b.weight": _weights(4, 17, 65),  # more than the 4,096 weights that are sorted into bands at once
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
