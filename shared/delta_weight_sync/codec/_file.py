"""A delta is a safetensors file whose metadata describes its content: see `docs/wire-format.md`.

The changed tensors of the model form groups; each group is coded as one sequence, with one set of parameters.
The tensors in the file are the groups' uint8 streams: group 0 has `0.gaps`, `0.signs` and so on.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from delta_weight_sync.codec import groups
from delta_weight_sync.codec._patch import Bits, Patch, apply, merge
from delta_weight_sync.codec.groups import Decoded, Group, Many, Mode, Old, Streams
from delta_weight_sync.errors import CodecError
from delta_weight_sync.util import in_order

DELTA_FORMAT = "delta-weight-sync-delta/2"
Shapes = Mapping[str, tuple[int, ...]]
Encoding = Literal["fast", "small"]
MAX_HEADER: Final = 16 << 20  # bytes of a header: some 200,000 tensors
# max elements and max dimensions of a tensor
_MOST = 1 << 48
_DIMS = 32
_Number = Annotated[int, Field(ge=0, le=_MOST)]  # a number of elements, or a group's index
_TABLE = TypeAdapter(Many[tuple[str, Annotated[Many[_Number], Field(max_length=_DIMS)], _Number, _Number]])
_GROUPS = TypeAdapter(Many[Group])

Share = tuple[int, int]
"""(k, n): group k of a delta, and every n-th group after it."""
WHOLE: Final[Share] = (0, 1)


class TensorRow(NamedTuple):
    """One tensor of a delta."""

    name: str
    shape: tuple[int, ...]
    numel: int
    changes: int
    group: int


class Delta:
    """A delta file whose header has been read; `decode` and `patches` read the changes."""

    def __init__(self, path: Path) -> None:
        """Read the header. If the file is not a delta, raises a `CodecError` that names the file."""
        self._path = path
        with _named(path):
            if (size := header_size(path)) > MAX_HEADER:
                raise CodecError(f"its header claims {size} bytes; at most {MAX_HEADER} are allowed")
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
            if metadata.get("format") != DELTA_FORMAT:
                raise CodecError(f"its format is {metadata.get('format')!r}, not {DELTA_FORMAT!r}")
            self.base = int(metadata["base"])
            self.version = int(metadata["version"])
            self.groups = _GROUPS.validate_json(metadata["groups"], strict=True)
            self._read_table(metadata["tensors"])

    @cached_property
    def tensors(self) -> list[TensorRow]:
        """The changed tensors, group by group."""
        return [*map(TensorRow, self._names, self._shapes, *self._rows.tolist())]

    @property
    def changes(self) -> int:
        """The number of changes."""
        return int(self._rows[1].sum())

    @property
    def reads_old(self) -> bool:
        """Whether decoding needs the bits of version `base`."""
        return any(groups.LAYOUTS[group.mode].reads_old for group in self.groups)

    def decode(self, shapes: Shapes, old: Old, share: Share = WHOLE) -> Iterator[Decoded]:
        """Yield the changes, one group of tensors at a time, without a Python step for each tensor.

        Even for a hostile file, this allocates at most 64 bytes per byte of the file and 16 bytes per element
        of the model. 10 of these 16 bytes are for an element's change: 8 for its position, 2 for its ULPs.

        Args:
            shapes: Shapes of the model's tensors. A file with other shapes is refused before decoding.
            old: Returns the bits of a tensor at version `base` (uint16, C-contiguous). Called only for groups
                whose mode needs these bits.
            share: Which groups to decode.

        Raises:
            CodecError: The file is damaged or does not fit the model. Discard what was yielded before.
        """
        with _named(self._path):
            if (*map(shapes.get, self._names),) != self._shapes:
                name, shape, *_ = next(row for row in self.tensors if shapes.get(row.name) != row.shape)
                raise CodecError(f"it changes {name} {list(shape)}, which this model does not have")
            with safe_open(self._path, framework="numpy") as file:
                jobs = self._decode_jobs(file, old, share)
                yield from in_order(lambda job: groups.decode_group(*job), jobs)

    def patches(self, shapes: Shapes, old: Old) -> Iterator[Patch]:
        """Yield the changes, one tensor at a time. Otherwise like `decode`."""
        for decoded in self.decode(shapes, old):
            yield from decoded.patches(shapes)

    def _decode_jobs(self, file: Any, old: Old, share: Share) -> Iterator[tuple[Any, ...]]:
        for number in range(share[0], len(self.groups), share[1]):
            group = self.groups[number]
            (a, b) = self._starts[number : number + 2]
            streams = {name: _stream(file, f"{number}.{name}") for name in groups.LAYOUTS[group.mode].streams}
            olds = groups.read_old(group.mode, self._names[a:b], old)
            yield group, self._names[a:b], self._rows[:2, a:b], streams, [*olds.values()]

    def _read_table(self, text: str) -> None:
        table = sorted(_TABLE.validate_json(text, strict=True), key=itemgetter(3))
        names, shapes, changes, group = zip(*table, strict=True) if table else ((), (), (), ())
        numels = [*map(math.prod, shapes)]
        for name, count, numel in zip(names, changes, numels, strict=True):
            if not 0 < count <= numel <= _MOST:
                raise CodecError(f"{name} lists {count} changes of {numel} elements")
        if len({*names}) != len(names):
            raise CodecError("a tensor is listed twice")
        starts = np.searchsorted(group, np.arange(len(self.groups) + 1))
        if starts[-1] != len(names) or (np.diff(starts) == 0).any():
            raise CodecError(f"its tensors must name each of its {len(self.groups)} groups, and no others")
        self._names, self._shapes, self._starts = names, shapes, starts.tolist()
        self._rows = np.array([numels, changes, group], np.int64)
        before = self._rows[0].cumsum() - self._rows[0]  # elements before each tensor, in all groups
        before -= before[starts[self._rows[2]]]  # elements before each tensor, in its group
        for row in np.flatnonzero(before >= groups.GROUP_ELEMENTS)[:1]:
            raise CodecError(f"group {group[row]} goes on after {before[row]} elements, but must end there")


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
    patches: Iterable[Patch],
    old: Old | None,
    *,
    base: int,
    version: int,
    encoding: Encoding = "fast",
    group_elements: int | None = None,
) -> bytes:
    """Encode a delta file.

    Args:
        patches: The changes. They are consumed one by one, so not all of them have to be in memory.
        old: Returns the bits of a tensor at version `base` (uint16, C-contiguous). It is asked only for
            tensors whose patches are still in use here. None: encode so that a reader needs no such bits.
            Then `encoding` must be `fast`.
        base: The version that the patches start from.
        version: The version that the patches lead to.
        encoding: `fast`, or `small`: about 30 % fewer bytes, but more computation.
        group_elements: A group, which readers decode whole, ends with the tensor that reaches this many
            elements. None, and at most: `GROUP_ELEMENTS`.

    Returns:
        The bytes of the file.
    """
    table: list[tuple[str, Sequence[int], int, int]] = []
    described: list[Group] = []
    streams: Streams = {}
    sparse: Mode = "bands" if encoding == "small" else "gaps"
    most = group_elements or groups.GROUP_ELEMENTS
    jobs = groups.encode_jobs((patch for patch in patches if patch.index.size), old, sparse, most)
    for members, (group, coded) in in_order(lambda job: (job[1], groups.encode_group(*job)), jobs):
        table += [(p.name, p.shape, p.index.size, len(described)) for p in members]
        streams |= {f"{len(described)}.{key}": stream for key, stream in coded.items()}
        described.append(group)
    metadata = {
        "format": DELTA_FORMAT,
        "base": str(base),
        "version": str(version),
        "tensors": json.dumps(table),
        "groups": json.dumps([group.model_dump(exclude_defaults=True) for group in described]),
    }
    data = save(streams, metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    # Sort the header: safetensors writes metadata in random order, but equal changes should give equal bytes.
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return data[:8] + header.encode().ljust(end - 8) + data[end:]


def merged(deltas: Sequence[Delta], shapes: Shapes, old: Old, share: Share = WHOLE) -> Iterable[Decoded]:
    """Decode consecutive deltas, or the parts of one delta (one file from each rank), as one delta.

    `old` returns a tensor's bits at the base of the first delta. `share` says which groups of the parts to
    decode. For consecutive deltas, `share` is ignored: all groups are decoded.
    """
    if len({delta.version for delta in deltas}) == 1:
        # The shares rotate from part to part. Otherwise share 0 would get all parts that have a single group.
        first, every = share
        parts = (delta.decode(shapes, old, ((first - at) % every, every)) for at, delta in enumerate(deltas))
        return chain.from_iterable(parts)
    found: dict[str, Patch] = {}

    def between(name: str) -> Bits:
        """Return a tensor's bits after the deltas that were merged so far."""
        if name not in found:
            return old(name)
        bits = old(name).astype(np.uint16)
        apply(found[name], bits)
        return bits

    for delta in deltas:
        found = {p.name: p for p in merge([*found.values()], [*delta.patches(shapes, between)])}
    return [Decoded.of([*found.values()])]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn the exceptions of a damaged file into a `CodecError` that names the file."""
    try:
        yield
    except (SafetensorError, zstandard.ZstdError, ValueError, LookupError, MemoryError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        line = " ".join(reason.split())[:300]  # a hostile file must not put long texts into a log
        raise CodecError(f"{path.name} is not a readable delta: {line}") from error
