"""Compares two versions, of one run or of two runs with the same tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.checkpoint import DTYPES, Bits, dtypes_in
from delta_weight_sync.errors import CodecError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest
from delta_weight_sync.scratch import Scratch

_AS_FLOAT = {"F64": "f8", "F32": "f4", "F16": "f2"}
_AS_WHOLE = {
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U64": "u8",
    "U32": "u4",
    "U16": "u2",
    "U8": "u1",
}


@dataclass(frozen=True)
class TensorDiff:
    """The elements of a tensor whose bits differ between two versions.

    Attributes:
        name: The tensor's name in the checkpoint.
        dtype: Its dtype, by safetensors' name, such as "BF16".
        positions: Where the elements are in the flat tensor, ascending; int64.
        before: Their bits in the first version, as unsigned integers of the dtype's size.
        after: Their bits in the second version. `torch.from_numpy(diff.after).view(torch.bfloat16)` gives the
            values of a "BF16" tensor.
        shape: The tensor's shape.
    """

    name: str
    dtype: str
    positions: NDArray[np.int64]
    before: NDArray[np.unsignedinteger]
    after: NDArray[np.unsignedinteger]
    shape: tuple[int, ...]

    @property
    def largest_change(self) -> float | None:
        """The largest absolute difference of two values; NaN if one of the values is NaN. None for a dtype
        without ordinary numbers, such as float8."""
        before = _values(self.before, self.dtype)
        after = _values(self.after, self.dtype)
        if before is None or after is None:
            return None
        with np.errstate(invalid="ignore"):  # the difference of two infinities
            return float(np.max(np.abs(after - before), initial=0.0))


def differences(old: tuple[RunReader, Manifest], new: tuple[RunReader, Manifest]) -> Iterator[TensorDiff]:
    """Compare two versions; yield every tensor by name, also those without a change.

    Takes the disk space of two checkpoints.

    Raises:
        CodecError: A tensor is only in one of the versions, or has another shape or dtype there.
        DeltaWeightSyncError: As for `RunReader.checkout`.
    """
    with Scratch() as folder:
        before = old[0].checkout(old[1], folder / "before")
        after = new[0].checkout(new[1], folder / "after")
        dtypes = dtypes_in(folder / "after")
        old_dtypes = dtypes_in(folder / "before")
        if lacking := before.keys() ^ after.keys():
            raise CodecError(f"{min(lacking)} is only in one of the two versions: compare runs of one model")
        for name in sorted(after):
            if (before[name].shape, old_dtypes[name]) != (after[name].shape, dtypes[name]):
                raise CodecError(
                    f"{name} has another shape or dtype in the other version: compare runs of one model"
                )
        for name in sorted(after):
            old_elements = _elements(before[name], dtypes[name])
            new_elements = _elements(after[name], dtypes[name])
            positions = np.flatnonzero(old_elements != new_elements)
            changed = old_elements[positions], new_elements[positions]
            yield TensorDiff(name, dtypes[name], positions, *changed, shape=_shape(after[name], dtypes[name]))


def _shape(words: Bits, dtype: str) -> tuple[int, ...]:
    """The tensor's shape. The words of an element of more than two bytes are in the last dimension."""
    return words.shape[:-1] if DTYPES[dtype][1] > 2 else words.shape


def _elements(words: Bits, dtype: str) -> NDArray[np.unsignedinteger]:
    """The words of a tensor as one unsigned integer for each element."""
    size = DTYPES[dtype][1]
    flat = np.ascontiguousarray(words).reshape(-1)
    return flat.astype(np.uint8) if size == 1 else flat.view(f"u{size}")


def _values(bits: NDArray[np.unsignedinteger], dtype: str) -> NDArray[np.float64] | None:
    """The numbers that the bits of a dtype stand for."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kind = _AS_FLOAT.get(dtype) or _AS_WHOLE.get(dtype)
    return np.ascontiguousarray(bits).view(kind).astype(np.float64) if kind else None
