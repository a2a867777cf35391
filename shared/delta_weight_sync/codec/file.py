"""The delta file: plain safetensors whose metadata tells people and readers what is in it.

`safe_open(...).metadata()` shows

    format, base, version     what it is, and the two versions that it joins
    tensors                   JSON rows [name, shape, changes, group] of every changed tensor
    groups                    JSON objects: the mode of each group of tensors and its parameters

and its tensors are the uint8 streams of the groups: `<group>.gaps`, `<group>.signs` and so on. Changes run
on from tensor to tensor within a group, so that a group has one set of parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from delta_weight_sync.codec import groups, original
from delta_weight_sync.codec.modes import LAYOUTS, Group, Listed, Many, Mode, Old, decode_group
from delta_weight_sync.codec.patch import Bits, CodecError, Patch, apply, merge
from delta_weight_sync.codec.values import Streams
from delta_weight_sync.parallel import in_order

DELTA_FORMAT = "delta-weight-sync-delta/2"
Encoding = Literal["fast", "small", "original"]
Shapes = Mapping[str, Sequence[int]]
_UNREADABLE = (SafetensorError, zstandard.ZstdError, ValidationError, ValueError, LookupError, MemoryError)
_LONGEST = 300  # characters of a reason
MAX_HEADER: Final = 16 << 20  # bytes of what a delta says of itself: some 200,000 tensors
_Number = Annotated[int, Field(ge=0, le=1 << 48)]  # of elements or of a group
_Shape = Annotated[Many[_Number], Field(max_length=32)]
_TABLE = TypeAdapter(Many[tuple[str, _Shape, _Number, _Number]])
_GROUPS = TypeAdapter(Many[Group])


class Delta:
    """A delta file whose table was read; `patches` reads the changes themselves."""

    def __init__(self, path: Path) -> None:
        """Raises `CodecError` naming the file if it is not a delta."""
        self._path = path
        with _named(path):
            _check_header(path)
            self._read(path)
            self._check_table()

    def _read(self, path: Path) -> None:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            self.original = metadata.get("format") == original.FORMAT
            if not self.original and metadata.get("format") != DELTA_FORMAT:
                raise CodecError(f"format {metadata.get('format')!r}, this reader knows {DELTA_FORMAT!r}")
            self.base, self.version = int(metadata["base"]), int(metadata["version"])
            self.tensors = original.table(file) if self.original else _table(metadata["tensors"])
            self.groups = () if self.original else _GROUPS.validate_json(metadata["groups"], strict=True)

    @property
    def changes(self) -> int:
        """Changed elements of the whole model."""
        return sum(tensor.changes for tensor in self.tensors)

    def patches(self, shapes: Shapes, old: Old) -> Iterator[Patch]:
        """The changes, tensor by tensor.

        `shapes` are those of the model, against which the table is checked before anything is unpacked; `old`
        gives the bits of a tensor at version `base` (uint16, C-contiguous), asked for only where needed.
        Raises `CodecError` naming the file; what was yielded before must then be thrown away.

        No file makes this allocate more than 64 bytes per byte of the file and 16 bytes per element of the
        model: 10 for each change that it yields, the others for as many groups at a time as there are
        threads, each at most `groups.GROUP_ELEMENTS` and the tensor that reaches them.
        """
        with _named(self._path):
            self._check(shapes)
            yield from original.read(self._path, self.tensors, old) if self.original else self._decode(old)

    def _decode(self, old: Old) -> Iterator[Patch]:
        with safe_open(self._path, framework="numpy") as file:
            for patches in in_order(_decoded, self._coded(file, old)):
                yield from patches

    def _coded(self, file: Any, old: Old) -> Iterator[_Coded]:
        members: list[list[Listed]] = [[] for _ in self.groups]
        for tensor in self.tensors:
            members[tensor.group].append(tensor)
        for number, (group, listed) in enumerate(zip(self.groups, members, strict=True)):
            streams = {name: _stream(file, f"{number}.{name}") for name in LAYOUTS[group.mode].streams}
            yield _Coded(group, listed, streams, groups.held([group.mode], listed, old))

    def _check(self, shapes: Shapes) -> None:
        for tensor in self.tensors:
            if tuple(shapes.get(tensor.name, ())) != tensor.shape or tensor.name not in shapes:
                raise CodecError(
                    f"it changes {tensor.name} {list(tensor.shape)}, which this model does not have"
                )

    def _check_table(self) -> None:
        """What holds whatever the model is."""
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise CodecError("a tensor is listed twice")
        for tensor in self.tensors:
            if not 0 < tensor.changes <= tensor.numel:
                raise CodecError(f"{tensor.name} lists {tensor.changes} changes of {tensor.numel} elements")
        if not self.original:
            self._check_groups()

    def _check_groups(self) -> None:
        """Each group has tensors, and ends where `encode` ends it: that bounds what a group unpacks to."""
        if {tensor.group for tensor in self.tensors} != set(range(len(self.groups))):
            raise CodecError(f"its {len(self.groups)} groups are not those that its tensors are in")
        elements = [0] * len(self.groups)
        for tensor in self.tensors:
            if elements[tensor.group] >= groups.GROUP_ELEMENTS:
                raise CodecError(f"group {tensor.group} goes on after {elements[tensor.group]} elements")
            elements[tensor.group] += tensor.numel


def header_size(path: Path) -> int:
    """Bytes of what a safetensors file says of itself, as it claims."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def _check_header(path: Path) -> None:
    if (size := header_size(path)) > MAX_HEADER:
        raise CodecError(f"its header claims {size} bytes, of at most {MAX_HEADER}")


class _Coded(NamedTuple):
    """All that the decoding of one group needs."""

    group: Group
    listed: list[Listed]
    streams: Streams
    old: Old


def _decoded(coded: _Coded) -> list[Patch]:
    return list(decode_group(*coded))


def _table(text: str) -> list[Listed]:
    return [Listed(*row) for row in _TABLE.validate_json(text, strict=True)]


def _stream(file: Any, key: str) -> NDArray[np.uint8]:
    stored = file.get_slice(key)
    if stored.get_dtype() != "U8" or len(stored.get_shape()) != 1:
        raise CodecError(f"stream {key} is not bytes")
    return cast(NDArray[np.uint8], file.get_tensor(key))


def encode(
    patches: Iterable[Patch], old: Old, *, base: int, version: int, encoding: Encoding = "fast"
) -> bytes:
    """The delta file as bytes. `old` gives the bits of a tensor at version `base`.

    Patches are taken as they are coded, so that those of a whole model need never be in memory at once.
    """
    changed = (patch for patch in patches if patch.index.size)
    versions = {"base": str(base), "version": str(version)}
    if encoding == "original":
        return _canonical(original.save(list(changed), old, versions))
    table: list[Listed] = []
    described: list[Group] = []
    streams: Streams = {}
    sparse: list[Mode] = ["bands", "gaps"] if encoding == "small" else ["gaps"]
    for members, group, coded in in_order(groups.encoded, groups.uncoded(changed, old, sparse)):
        table += [Listed(p.name, p.shape, p.index.size, len(described)) for p in members]
        streams |= {f"{len(described)}.{key}": stream for key, stream in coded.items()}
        described.append(group)
    rows = json.dumps([group.model_dump(exclude_defaults=True) for group in described])
    metadata = {"format": DELTA_FORMAT, **versions, "tensors": json.dumps(table), "groups": rows}
    return _canonical(save(streams, metadata))


def _canonical(data: bytes) -> bytes:
    """The same file with its header's keys in order: safetensors writes metadata in a random one."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return data[:8] + header.encode().ljust(end - 8) + data[end:]


def chain(deltas: Sequence[Delta], shapes: Shapes, old: Old) -> list[Patch]:
    """What the deltas do one after the other, as one patch per tensor; `old` is at the first one's base."""
    merged: dict[str, Patch] = {}

    def between(name: str) -> Bits:
        if name not in merged:
            return old(name)
        bits = old(name).copy()
        apply(merged[name], bits)
        return bits

    for delta in deltas:
        merged = {p.name: p for p in merge(list(merged.values()), list(delta.patches(shapes, between)))}
    return list(merged.values())


class _named:  # noqa: N801 - used as a context manager only
    """Turns whatever a damaged file provokes into a `CodecError` that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _UNREADABLE):
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise CodecError(f"{self._path.name} is not a readable delta: {_line(reason)}") from error


def _line(text: str) -> str:
    """`text` as a log can take it: no pages, no line breaks, no terminal codes from a file."""
    return "".join(letter for letter in " ".join(text.split())[:_LONGEST] if letter.isprintable())
