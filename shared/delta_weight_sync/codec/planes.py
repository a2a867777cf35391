"""Tensors in which much or everything changed: a bitmask of the changes, or all elements, through zstd.

A zstd frame says how long its content is; that is held against the tensors before anything is unpacked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from delta_weight_sync.codec.patch import Bits, CodecError, Index

Bytes = NDArray[np.uint8]
_LEVEL = 1


def pack_mask(indices: Sequence[Index], sizes: Sequence[int]) -> Bytes:
    """One bit per element of the tensors, tensor after tensor, row-major, lowest bit first."""
    mask = np.zeros(sum(sizes), np.bool_)
    first = 0
    for index, size in zip(indices, sizes, strict=True):
        mask[first + index] = True
        first += size
    return pack(np.packbits(mask, bitorder="little"))


def unpack_mask(frame: Bytes, sizes: Sequence[int]) -> list[Index]:
    """The positions in each tensor."""
    packed = unpack(frame, (sum(sizes) + 7) // 8)
    mask = np.unpackbits(packed, count=sum(sizes), bitorder="little")
    edges = np.cumsum([0, *sizes])
    return [np.flatnonzero(mask[a:b]) for a, b in itertools.pairwise(edges)]


def pack_values(values: Bits) -> dict[str, Bytes]:
    """Any uint16 values as two planes of bytes."""
    return {"low": pack(values.astype(np.uint8)), "high": pack((values >> 8).astype(np.uint8))}


def unpack_values(streams: dict[str, Bytes], count: int) -> Bits:
    """What `pack_values` packed, if it was `count` values."""
    low, high = (unpack(streams[key], count).astype(np.uint16) for key in ("low", "high"))
    return (low | (high << 8)).astype(np.uint16)


def zigzag(ulps: Bits) -> Bits:
    """0, -1, +1, -2, ... -> 0, 1, 2, 3, ...: small moves of either sign have a zero high byte."""
    return ((ulps << 1) ^ (0 - (ulps >> 15)).astype(np.uint16)).astype(np.uint16)


def unzigzag(values: Bits) -> Bits:
    """The inverse of `zigzag`."""
    return ((values >> 1) ^ (0 - (values & 1)).astype(np.uint16)).astype(np.uint16)


def pack(content: Bytes) -> Bytes:
    """One zstd frame."""
    return np.frombuffer(zstandard.ZstdCompressor(level=_LEVEL).compress(content.tobytes()), np.uint8)


def unpack(frame: Bytes, size: int) -> Bytes:
    """The content of a frame that holds exactly `size` bytes."""
    if zstandard.frame_content_size(frame.tobytes()) != size:
        raise CodecError(f"a frame whose content is not {size} bytes")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.tobytes()), np.uint8)
