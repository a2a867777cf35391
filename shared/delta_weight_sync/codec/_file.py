"""The delta file: a safetensors file whose metadata says what is in it, see `docs/wire-format.md`.

The tensors in the file are the groups' uint8 streams: `<group>.gaps`, `<group>.signs` and so on. The model's
tensors of a group are coded as one sequence, with one set of parameters.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from delta_weight_sync.codec import groups
from delta_weight_sync.codec._patch import Bits, Patch, apply, merge
from delta_weight_sync.codec.groups import LAYOUTS, Group, Many, Mode, Old, Streams, TensorRow, decode_group
from delta_weight_sync.errors import CodecError
from delta_weight_sync.util import in_order

DELTA_FORMAT = "delta-weight-sync-delta/2"
Encoding = Literal["fast", "small"]
Shapes = Mapping[str, Sequence[int]]
_UNREADABLE = (SafetensorError, zstandard.ZstdError, ValidationError, ValueError, LookupError, MemoryError)
_LONGEST = 300  # characters of an error's reason
MAX_HEADER: Final = 16 << 20  # bytes of a header: some 200,000 tensors
_Number = Annotated[int, Field(ge=0, le=1 << 48)]  # a number of elements, or a group's index
_Shape = Annotated[Many[_Number], Field(max_length=32)]
_TABLE = TypeAdapter(Many[tuple[str, _Shape, _Number, _Number]])
_GROUPS = TypeAdapter(Many[Group])


class Delta:
    """A delta file whose header has been read; `patches` reads the changes."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises `CodecError`, which names the file, if it is not a delta."""
        self._path = path
        with _named(path):
            if (size := header_size(path)) > MAX_HEADER:
                raise CodecError(f"its header claims {size} bytes; at most {MAX_HEADER} are allowed")
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
            if metadata.get("format") != DELTA_FORMAT:
                raise CodecError(f"its format is {metadata.get('format')!r}, not {DELTA_FORMAT!r}")
            self.base, self.version = int(metadata["base"]), int(metadata["version"])
            rows = _TABLE.validate_json(metadata["tensors"], strict=True)
            self.tensors = [TensorRow(*row) for row in rows]
            self.groups = _GROUPS.validate_json(metadata["groups"], strict=True)
            self._check_table()

    def patches(self, shapes: Shapes, old: Old) -> Iterator[Patch]:
        """Yield the changes, one tensor at a time.

        Memory is bounded for any file: 64 bytes per byte of the file, and 16 per element of the model. Of
        these 16, a yielded change takes 10; each thread needs the rest for the group that it decodes.

        Args:
            shapes: Shapes of the model's tensors. The table is checked against them first.
            old: Returns the bits of a tensor at version `base` (uint16, C-contiguous). Called only for modes
                that need it.

        Raises:
            CodecError: The file is damaged or does not fit the model. Discard what was yielded before.
        """
        with _named(self._path):
            for tensor in self.tensors:
                if tensor.name not in shapes or tuple(shapes[tensor.name]) != tensor.shape:
                    raise CodecError(
                        f"it changes {tensor.name} {list(tensor.shape)}, which this model does not have"
                    )
            with safe_open(self._path, framework="numpy") as file:
                for patches in in_order(lambda job: decode_group(*job), self._decode_jobs(file, old)):
                    yield from patches

    def _decode_jobs(self, file: Any, old: Old) -> Iterator[tuple[Group, list[TensorRow], Streams, Old]]:
        members: list[list[TensorRow]] = [[] for _ in self.groups]
        for tensor in self.tensors:
            members[tensor.group].append(tensor)
        for number, (group, rows) in enumerate(zip(self.groups, members, strict=True)):
            streams = {name: _stream(file, f"{number}.{name}") for name in LAYOUTS[group.mode].streams}
            yield group, rows, streams, groups.read_old([group.mode], rows, old)

    def _check_table(self) -> None:
        """Check the table without a model. A group must end where `encode` ends it, which bounds its size."""
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise CodecError("a tensor is listed twice")
        elements = Counter[int]()
        for name, shape, changes, group in self.tensors:
            numel = math.prod(shape)
            if not 0 < changes <= numel:
                raise CodecError(f"{name} lists {changes} changes of {numel} elements")
            if elements[group] >= groups.GROUP_ELEMENTS:
                raise CodecError(f"group {group} continues after {elements[group]} elements")
            elements[group] += numel
        if elements.keys() != set(range(len(self.groups))):
            raise CodecError(f"it has {len(self.groups)} groups, but its tensors name other groups")


def header_size(path: Path) -> int:
    """Size of a safetensors file's header in bytes, as the file claims it."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def _stream(file: Any, key: str) -> NDArray[np.uint8]:
    stored = file.get_slice(key)
    if stored.get_dtype() != "U8" or len(stored.get_shape()) != 1:
        raise CodecError(f"stream {key} is not bytes")
    return cast(NDArray[np.uint8], file.get_tensor(key))


def encode(
    patches: Iterable[Patch], old: Old, *, base: int, version: int, encoding: Encoding = "fast"
) -> bytes:
    """Encode a delta file.

    Args:
        patches: The changes. They are consumed one by one, so not all of them have to be in memory.
        old: Returns the bits of a tensor at version `base` (uint16, C-contiguous).
        base: The version that the patches start from.
        version: The version that they lead to.
        encoding: `fast`, or `small`: about 30 % fewer bytes, but more computation.

    Returns:
        The bytes of the file.
    """
    changed = (patch for patch in patches if patch.index.size)
    table: list[TensorRow] = []
    described: list[Group] = []
    streams: Streams = {}
    sparse: list[Mode] = ["bands", "gaps"] if encoding == "small" else ["gaps"]
    jobs = groups.encode_jobs(changed, old, sparse)
    for members, (group, coded) in in_order(lambda job: (job[1], groups.encode_smallest(*job)), jobs):
        table += [TensorRow(p.name, p.shape, p.index.size, len(described)) for p in members]
        streams |= {f"{len(described)}.{key}": stream for key, stream in coded.items()}
        described.append(group)
    metadata = {
        "format": DELTA_FORMAT,
        "base": str(base),
        "version": str(version),
        "tensors": json.dumps(table),
        "groups": json.dumps([group.model_dump(exclude_defaults=True) for group in described]),
    }
    return _canonical(save(streams, metadata))


def _canonical(data: bytes) -> bytes:
    """Sort the keys of the file's header, because safetensors writes metadata in random order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return data[:8] + header.encode().ljust(end - 8) + data[end:]


def chain(deltas: Sequence[Delta], shapes: Shapes, old: Old) -> list[Patch]:
    """Merge consecutive deltas into one patch per tensor. `old` gives the bits at the first delta's base."""
    merged: dict[str, Patch] = {}

    def between(name: str) -> Bits:
        if name not in merged:
            return old(name)
        bits = old(name).copy()
        apply(merged[name], bits)
        return bits

    for delta in deltas:
        patches = list(delta.patches(shapes, between))
        merged = {p.name: p for p in (merge(list(merged.values()), patches) if merged else patches)}
    return list(merged.values())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn the exceptions of a damaged file into a `CodecError` that names the file."""
    try:
        yield
    except _UNREADABLE as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        # A hostile file must not put long texts, line breaks or terminal codes into a log.
        line = "".join(letter for letter in " ".join(reason.split())[:_LONGEST] if letter.isprintable())
        raise CodecError(f"{path.name} is not a readable delta: {line}") from error
