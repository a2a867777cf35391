"""Codes tensors in groups: decides which tensors form a group, and which mode needs the fewest bytes.

`LAYOUTS` lists the modes. A tensor without changes is not listed in the file. The modes `gaps`, `bands` and
`mask` have separate streams for the sizes of the changes: one sign bit per change, which changes are large
(more than one ULP), and how large these are. To add a mode, extend `Mode` and `LAYOUTS`, add a branch to
`encode_group` and to `decode_group` or `_positions`, and say in `_other_modes` when to try the mode.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast

from delta_weight_sync.codec import bits, positions
from delta_weight_sync.codec._lanes import BANDS
from delta_weight_sync.codec._patch import Bits, Index, Patch, join
from delta_weight_sync.codec.bits import State, Words
from delta_weight_sync.codec.positions import Band
from delta_weight_sync.errors import CodecError
from delta_weight_sync.kernels import kernel

Mode = Literal["gaps", "bands", "mask", "dense", "raw"]
Old = Callable[[str], Bits]
Bytes = NDArray[np.uint8]
Streams = dict[str, Bytes]
Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], FailFast()]  # validation stops at the first of a million bad items

GROUP_ELEMENTS = 1 << 25  # a group ends with the tensor that reaches this many elements
_FEW = 64  # a tensor with fewer changes is coded in mode `gaps` or `bands`, see `encode_jobs`
_CLUSTERED = 4.0  # try a bitmask if adjacent changes are this many times as frequent as by chance
_UP = np.uint16(1)
_DOWN = np.uint16(0xFFFF)
_BY_BAND = positions.cut(range(1, BANDS))  # for weights from `_as_weights`: the exponent is the band
_ZSTD_LEVEL = 1


class Layout(NamedTuple):
    """The properties of a mode."""

    words: str  # the mode's description
    lengths: tuple[int, int, int, int]  # of `limits`, `gaps`, `large` and `sizes` in a `Group`
    streams: tuple[str, ...]
    reads_old: bool = False  # whether encoding and decoding need the old bits


_VALUES = ("signs", "large", "sizes")
_ONE_BAND = (0, 1, 1, 1)
_EIGHT_BANDS = (BANDS - 1, BANDS, BANDS, BANDS)
_BY_EXPONENT = "distances within eight bands of weights, separated at exponents {}"
LAYOUTS: dict[Mode, Layout] = {
    "gaps": Layout("distances between changes", _ONE_BAND, ("gaps", *_VALUES)),
    "bands": Layout(_BY_EXPONENT, _EIGHT_BANDS, ("gaps", *_VALUES), reads_old=True),
    "mask": Layout("one bit per element, compressed", (0, 0, 1, 1), ("mask", *_VALUES)),
    "dense": Layout("the difference of every element, compressed", (0, 0, 0, 0), ("low", "high")),
    "raw": Layout("the new bits of every element, compressed", (0, 0, 0, 0), ("low", "high"), reads_old=True),
}


class Group(BaseModel):
    """How the tensors of one group are coded: all that a reader needs in addition to the streams.

    `limits` separate the bands. For each band, `gaps` and `large` have the fields of a `bits.Section`, and
    `sizes` has (Exp-Golomb parameter, bits). These are plain tuples, because pydantic reports each surplus
    item of a NamedTuple, and a hostile file may have a million.
    """

    model_config = ConfigDict(frozen=True)
    mode: Mode
    limits: Many[int] = ()
    gaps: Many[tuple[int, int, bool, int]] = ()
    large: Many[tuple[int, int, bool, int]] = ()
    sizes: Many[tuple[int, int]] = ()

    def explain(self) -> str:
        """Describe the mode in words."""
        return f"{self.mode}: {LAYOUTS[self.mode].words.format(list(self.limits))}"


@dataclass(frozen=True, slots=True)
class Decoded:
    """Changes of several tensors, one tensor after the other; `index` and `ulps` as in a `Patch`."""

    names: Sequence[str]
    changes: Index  # number of changes of each tensor
    index: Index
    ulps: Bits

    @classmethod
    def of(cls, patches: Sequence[Patch]) -> "Decoded":
        """Join patches."""
        names = [p.name for p in patches]
        changes = np.array([p.index.size for p in patches], np.int64)
        index = join([p.index for p in patches], np.int64)
        ulps = join([p.ulps for p in patches], np.uint16)
        return cls(names, changes, index, ulps)

    def patches(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Patch]:
        """Yield the changes of each tensor."""
        for name, (a, b) in zip(self.names, pairwise([0, *self.changes.cumsum().tolist()]), strict=True):
            yield Patch(name, shapes[name], self.index[a:b], self.ulps[a:b])


def encode_group(mode: Mode, patches: Sequence[Patch], old: Old) -> tuple[Group, Streams]:
    """Code a group of tensors in `mode`. `old` returns a tensor's bits at the delta's base version."""
    if mode in ("dense", "raw"):
        return Group(mode=mode), _encode_all(mode, patches, old)
    ulps = join([p.ulps for p in patches], np.uint16)
    bands = 1
    band_of = np.zeros(ulps.size, np.uint8)
    fields: dict[str, Any] = {"mode": mode}  # of the `Group`
    streams: Streams = {}
    if mode == "bands":
        olds = [old(p.name).reshape(-1) for p in patches]
        bands = BANDS
        fields["limits"] = positions.choose_limits(olds, patches)
        indices = [p.index for p in patches]
        cut = positions.cut(fields["limits"])
        runs, elements, band_of = positions.band_runs(olds, indices, cut)
        fields["gaps"], streams["gaps"] = bits.encode_runs(runs, elements)
    elif mode == "gaps":
        runs = [_flat_runs(patches)]
        elements = [sum(p.numel for p in patches)]
        fields["gaps"], streams["gaps"] = bits.encode_runs(runs, elements)
    else:  # one bit per element, tensor after tensor, row-major, lowest bit first
        mask = np.zeros(sum(p.numel for p in patches), np.bool_)
        starts = accumulate((p.numel for p in patches), initial=0)
        for start, patch in zip(starts, patches, strict=False):
            mask[start + patch.index] = True
        streams["mask"] = _pack(np.packbits(mask, bitorder="little"))
    values, value_streams = _encode_values(ulps, band_of, bands)
    return Group.model_validate(fields | values), streams | value_streams


def decode_group(
    group: Group, names: Sequence[str], counts: Index, streams: Streams, olds: Sequence[Bits]
) -> Decoded:
    """Return the changes of a group.

    `counts`, int64 [2, n]: number of elements and number of changes of each tensor. `olds`: from `read_old`.
    """
    lengths = tuple(len(each) for each in (group.limits, group.gaps, group.large, group.sizes))
    if lengths != (expected := LAYOUTS[group.mode].lengths):  # the kernels rely on these lengths
        raise CodecError(f"the lists of a group of mode {group.mode} have {lengths} items, not {expected}")
    total, changes = counts.sum(1).tolist()
    if group.mode in ("dense", "raw"):
        content = _decode_all(group.mode, total, streams, olds)
        index = np.flatnonzero(content)
        ulps = content[index]
    else:
        index, band_of = _positions(group, total, changes, streams, olds)
        ulps = _decode_values(group, streams, band_of)
    if (wrong := _move(index, *counts)) >= 0:
        listed = f"{counts[1, wrong]} changes that its table of tensors lists"
        raise CodecError(f"{names[wrong]}: the streams of its group do not hold the {listed}")
    return Decoded(names, counts[1], index, ulps)


def _encode_all(mode: Mode, patches: Sequence[Patch], old: Old) -> Streams:
    """Code every element, as two streams: all low bytes, and all high bytes."""
    parts = []
    for patch in patches:
        part = old(patch.name).reshape(-1).copy() if mode == "raw" else np.zeros(patch.numel, np.uint16)
        part[patch.index] += patch.ulps
        parts.append(part)
    content = np.concatenate(parts)
    if mode == "dense":  # 0, -1, +1, -2 -> 0, 1, 2, 3: small changes of either sign have a zero high byte
        content = ((content << 1) ^ -(content >> 15)).astype(np.uint16)
    return {"low": _pack(content.astype(np.uint8)), "high": _pack((content >> 8).astype(np.uint8))}


def _decode_all(mode: Mode, total: int, streams: Streams, olds: Sequence[Bits]) -> Bits:
    """Return the ULPs of all elements of a group, in the modes that store every element."""
    low, high = (_unpack(streams[key], total).astype(np.uint16) for key in ("low", "high"))
    content = (low | (high << 8)).astype(np.uint16)
    if mode == "dense":
        return ((content >> 1) ^ -(content & 1)).astype(np.uint16)
    at = 0
    for old in olds:
        content[at : at + old.size] -= old.reshape(-1)
        at += old.size
    return content


def _positions(
    group: Group, total: int, changes: int, streams: Streams, olds: Sequence[Bits]
) -> tuple[Index, Band]:
    """Return the position of each change in the group, and the band of each change."""
    band_of = np.zeros(changes, np.uint8)
    if group.mode == "mask":
        mask = np.unpackbits(_unpack(streams["mask"], (total + 7) // 8), count=total, bitorder="little")
        return np.flatnonzero(mask), band_of
    if any(not 0 <= limit <= 255 for limit in group.limits) or list(group.limits) != sorted(group.limits):
        raise CodecError(f"limits {list(group.limits)} are not ascending exponents")
    words, state = bits.open_runs(group.gaps, streams["gaps"], "positions")
    index = np.empty(changes, np.int64)
    if group.mode == "bands":
        weights = np.concatenate([old.reshape(-1) for old in olds])
        found = positions.band_walk(words, state, weights, positions.cut(group.limits), index, band_of)
    else:
        found = bits.flat_walk(words, state, total, index)
    if found != changes or not bits.finished(state):
        listed = f"{changes} changes that its table of tensors lists"
        raise CodecError(f"the streams of a group of mode {group.mode} do not hold the {listed}")
    return index, band_of


@kernel
def _move(index: Index, numels: Index, changes: Index) -> int:
    """Turn positions in the group into positions in its tensors, in place.

    Returns -1, or the index of a tensor whose number of changes is not the one in `changes`.
    """
    at = 0
    first = np.int64(0)
    for tensor in range(numels.size):
        end = at + changes[tensor]
        if end > index.size or (end < index.size and index[end] < first + numels[tensor]):
            return tensor
        part = index[at:end]
        outside = False
        for j in range(part.size):
            part[j] -= first
            outside |= (part[j] < 0) | (part[j] >= numels[tensor])
        if outside:
            return tensor
        at = end
        first += numels[tensor]
    return -1 if at == index.size else numels.size - 1


def _encode_values(ulps: Bits, band_of: Band, bands: int) -> tuple[dict[str, Any], Streams]:
    """Code `ulps` [n], of changes in the bands `band_of` [n]. Return fields of `Group`, and the streams."""
    # Large changes are located like changes: a run counts the small changes before each large change.
    at = np.flatnonzero((ulps != _UP) & (ulps != _DOWN))
    if bands > 1:
        runs, changes, _ = positions.band_runs([_as_weights(band_of)], [at], _BY_BAND)
    else:
        runs = [np.diff(at, prepend=-1) - 1]
        changes = [band_of.size]
    large, where = bits.encode_runs(runs, changes)
    amounts = np.minimum(ulps[at], 0 - ulps[at]).astype(np.int64) - 2
    parts = positions.by_band(amounts, band_of[at], bands)
    sizes = [bits.golomb_k(part) for part in parts]
    words = np.zeros(sum(length for _, length in sizes) // 64 + 2, np.uint64)
    bit = 0
    for part, (k, _) in zip(parts, sizes, strict=True):
        bit = bits.put_golomb(part, k, words, bit)
    signs = np.packbits(ulps >= 0x8000, bitorder="little")
    streams = {"signs": signs, "large": where, "sizes": bits.to_bytes(words, bit)}
    return {"large": large, "sizes": sizes}, streams


def _decode_values(group: Group, streams: Streams, band_of: Band) -> Bits:
    if streams["signs"].size != (band_of.size + 7) // 8:
        raise CodecError(f"{streams['signs'].size} bytes of signs for {band_of.size} changes")
    # rows: next bit, end, k
    sizes = np.zeros((3, len(group.sizes)), np.int64)
    at = 0
    for band, (k, length) in enumerate(group.sizes):
        if not (0 <= k <= bits.MAX_GOLOMB and 0 <= length <= 8 * streams["sizes"].size - at):
            raise CodecError(f"a section of {length} bits does not fit its stream")
        sizes[:, band] = (at, at + length, k)
        at += length
    words, state = bits.open_runs(group.large, streams["large"], "large changes")
    ulps = np.unpackbits(streams["signs"], count=band_of.size, bitorder="little").astype(np.uint16)
    ulps *= np.uint16(65534)  # times -2, plus 1: the bits 0 and 1 become 1 and -1 ULP; see `_enlarge`
    ulps += np.uint16(1)
    large = np.empty(min(ulps.size, at), np.int64)  # each size takes at least one of the `at` bits
    bands = np.zeros(large.size, np.uint8)
    if len(group.large) > 1:
        found = positions.band_walk(words, state, _as_weights(band_of), _BY_BAND, large, bands)
    else:
        found = bits.flat_walk(words, state, band_of.size, large)
    size_words = bits.to_words(streams["sizes"])
    if found < 0 or not _enlarge(size_words, sizes, large[:found], bands, ulps):
        raise CodecError("the sizes of the large changes are damaged")
    if not bits.finished(state) or (sizes[0] != sizes[1]).any():
        raise CodecError("the streams of large changes or of their sizes are longer than the changes need")
    return ulps


def _as_weights(band_of: Band) -> Bits:
    """Make bf16 weights whose exponents are the bands, so that `positions` can sort by band."""
    return np.left_shift(band_of, 7, dtype=np.uint16)


@kernel
def _enlarge(words: Words, sizes: State, large: Index, bands: Band, ulps: Bits) -> bool:
    """Multiply the `ulps` (1 or -1) of the `large` changes by their sizes. False if a size is damaged."""
    good = True
    for i in range(large.size):
        band = bands[i]
        extra, sizes[0, band] = bits.take_golomb(words, sizes[0, band], sizes[1, band], sizes[2, band])
        ulps[large[i]] *= np.uint16(extra + 2)  # -1 is 65535 modulo 2^16
        good &= 0 <= extra <= 32766
    return good


def _flat_runs(patches: Sequence[Patch]) -> Index:
    """int64 [n]: for each change of a group, the number of unchanged elements since the previous change."""
    out = np.empty(sum(p.index.size for p in patches), np.int64)
    carried = 0
    first = 0
    for patch in patches:
        carried = positions.flat_runs(patch.index, patch.numel, carried, out[first:])
        first += patch.index.size
    return out


def _pack(content: Bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(content.tobytes()), np.uint8)


def _unpack(frame: Bytes, size: int) -> Bytes:
    """Unpack a zstd frame, after checking that it claims to hold `size` bytes."""
    if zstandard.frame_content_size(frame.tobytes()) != size:
        raise CodecError(f"a compressed stream does not hold {size} bytes")
    unpacked = zstandard.ZstdDecompressor().decompress(frame.tobytes(), allow_extra_data=False)
    return np.frombuffer(unpacked, np.uint8)


def encode_jobs(
    patches: Iterable[Patch], old: Old | None, sparse: Mode, most: int
) -> Iterator[tuple[Mode, list[Patch], Old]]:
    """Yield each group: its mode, its patches, and a function that returns a tensor's old bits.

    Consecutive tensors that take the fewest bytes in the same mode form a group. A tensor with few changes is
    always coded in the mode that the argument `sparse` names. A group ends with the tensor that reaches
    `most` elements. Without `old`, no mode reads old bits.
    """

    def words(name: str) -> Bits:
        """The old bits; of a mapped tensor whose elements have one byte, they come as uint8."""
        assert old is not None
        return old(name).astype(np.uint16, copy=False)

    members: list[Patch] = []
    mode = sparse
    elements = 0
    for patch in patches:
        others = [mode for mode in _other_modes(patch) if old or not LAYOUTS[mode].reads_old]
        best = _smallest([sparse, *others], patch, words) if others else sparse
        if members and (best != mode or elements >= most):
            yield mode, members, read_old(mode, [p.name for p in members], words).__getitem__
            members = []
            elements = 0
        mode = best
        members.append(patch)
        elements += patch.numel
    if members:
        yield mode, members, read_old(mode, [p.name for p in members], words).__getitem__


def _smallest(modes: Sequence[Mode], patch: Patch, old: Old) -> Mode:
    """Return the mode in which a tensor takes the fewest bytes; of several such modes, the last."""
    sizes = {m: sum(s.size for s in encode_group(m, [patch], old)[1].values()) for m in reversed(modes)}
    return min(sizes, key=sizes.__getitem__)


def _other_modes(patch: Patch) -> list[Mode]:
    """Return those of the modes `mask`, `dense` and `raw` that may need the fewest bytes for a tensor."""
    if patch.index.size < _FEW:
        return []  # another mode needs a group of its own, whose description takes more than the mode saves
    density = patch.index.size / patch.numel
    share = positions.neighbours(patch.index) / patch.index.size
    worth: dict[Mode, bool] = {
        "mask": density > 1 / 8 or share > _CLUSTERED * density + 0.05,
        "dense": density > 1 / 4,
        "raw": density > 1 / 2,
    }
    return [mode for mode in worth if worth[mode]]


def read_old(mode: Mode, names: Iterable[str], old: Old) -> dict[str, Bits]:
    """Return the old bits that `mode` needs, read in the order of `names`.

    Do not call this in the threads of `util.in_order`, which code groups in parallel. `old` may take a lock,
    or exchange bits with vLLM's other workers, and all workers must ask for tensors in the same order.
    """
    if not LAYOUTS[mode].reads_old:
        return {}
    return {name: old(name).astype(np.uint16, copy=False) for name in names}
