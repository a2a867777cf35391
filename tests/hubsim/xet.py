"""The two binary formats of Xet that a server has to read: shards (files -> chunks) and xorbs (chunks)."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

RECORD = 48  # every record of a shard has this size, its header included
LAST = b"\xff" * 32
HAS_VERIFICATION, HAS_METADATA = 1 << 31, 1 << 30


@dataclass(frozen=True)
class Term:
    """A run of chunks [start, end) of one xorb; `size` is their length when unpacked."""

    xorb: str
    start: int
    end: int
    size: int


@dataclass(frozen=True)
class Xorb:
    """Where each chunk lies: packed in bytes [offsets[i], offsets[i + 1]), unpacked to sizes[i] bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read the chunk headers; the footer that may follow starts with a byte other than 0."""
        offsets, sizes = [0], []
        while offsets[-1] < len(data) and data[offsets[-1]] == 0:
            header = data[offsets[-1] : offsets[-1] + 8]
            offsets.append(offsets[-1] + 8 + int.from_bytes(header[1:4], "little"))
            sizes.append(int.from_bytes(header[5:8], "little"))
        if offsets[-1] > len(data):
            raise ValueError("xorb ends inside a chunk")
        return cls(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard; `sha256` is empty where the client left it out, as it does for buckets."""

    hash: str
    terms: list[Term]
    sha256: str


def parse_shard(data: bytes) -> list[ShardFile]:
    """The files of an uploaded shard."""
    files, position = [], RECORD
    while data[position : position + 32] != LAST:
        file_hash, flags, count = struct.unpack_from("<32sII", data, position)
        terms = list(_terms(data, position + RECORD, count))
        position += RECORD + RECORD * count * (2 if flags & HAS_VERIFICATION else 1)
        sha256 = _hex(data[position : position + 32]) if flags & HAS_METADATA else ""
        position += RECORD if flags & HAS_METADATA else 0
        files.append(ShardFile(_hex(file_hash), terms, sha256))
    return files


def _terms(data: bytes, position: int, count: int) -> Iterator[Term]:
    for offset in range(position, position + RECORD * count, RECORD):
        xorb, _flags, size, start, end = struct.unpack_from("<32s4I", data, offset)
        yield Term(_hex(xorb), start, end, size)


def _hex(raw: bytes) -> str:
    """Xet writes a hash as four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))
