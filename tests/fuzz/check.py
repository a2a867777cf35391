"""What a delta file may do to its reader: be refused by name, or decode to patches that fit the model."""

import tracemalloc
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from zstandard import ZstdError

from delta_weight_sync import codec
from delta_weight_sync.errors import CodecError
from tests.fuzz.seeds import OLD, State

PER_BYTE, PER_ELEMENT = 64, 16  # what `Delta.patches` states
ALWAYS = 1 << 16  # Python's own objects around an open file and an error
_CHECKS = (SafetensorError, ZstdError, ValidationError, CodecError)


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
    text, cause = str(error), error.__cause__
    assert path.name in text
    assert len(text) < 400, text[:1000]
    assert text.isprintable(), repr(text)
    assert type(cause) in (KeyError, ValueError) or isinstance(cause, _CHECKS), repr(cause)


def _fits(patch: codec.Patch, old: np.ndarray) -> None:
    index, ulps = patch.index, patch.ulps
    assert (index.dtype, ulps.dtype) == (np.int64, np.uint16)
    assert patch.shape == old.shape
    assert index.shape == ulps.shape
    assert np.all(index[1:] > index[:-1])
    assert np.all(ulps != 0)
    codec.apply(patch, old.copy())
