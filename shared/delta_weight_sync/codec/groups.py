"""Which tensors are coded together, and in which mode: what takes the fewest bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from delta_weight_sync.codec import positions, rice
from delta_weight_sync.codec.modes import LAYOUTS, Group, Listed, Mode, Old, encode_group, flat_runs
from delta_weight_sync.codec.patch import Patch
from delta_weight_sync.codec.values import Streams

GROUP_ELEMENTS = 1 << 25  # a group ends with the tensor that reaches this many elements
_CLUSTERED = 4.0  # times as many neighbours as independent changes would have: worth a bitmask


def _grouped(
    patches: Iterable[Patch], old: Old, sparse: Sequence[Mode]
) -> Iterator[tuple[Mode, list[Patch]]]:
    """Runs of tensors whose cheapest mode is the same; "gaps" stands for all modes in `sparse`."""
    members: list[Patch] = []
    current: Mode = "gaps"
    elements = 0
    for patch in patches:
        others = _candidates(patch)
        mode = _cheapest([*sparse, *others], [patch], old)[0].mode if others else "gaps"
        mode = "gaps" if mode in sparse else mode
        if members and (mode != current or elements >= GROUP_ELEMENTS):
            yield current, members
            members, elements = [], 0
        current = mode
        members.append(patch)
        elements += patch.numel
    if members:
        yield current, members


class Uncoded(NamedTuple):
    """All that the coding of one group needs."""

    modes: Sequence[Mode]
    members: list[Patch]
    old: Old


def uncoded(patches: Iterable[Patch], old: Old, sparse: Sequence[Mode]) -> Iterator[Uncoded]:
    """The groups of changed tensors; where changes are few, the modes in `sparse` compete."""
    for mode, members in _grouped(patches, old, sparse):
        modes = sparse if mode == "gaps" else [mode]
        yield Uncoded(modes, members, held(modes, members, old))


def encoded(uncoded: Uncoded) -> tuple[list[Patch], Group, Streams]:
    """The members of a group, how they are coded, and the streams."""
    return uncoded.members, *_cheapest(*uncoded)


def _cheapest(modes: Sequence[Mode], patches: Sequence[Patch], old: Old) -> tuple[Group, Streams]:
    """A group in the mode that takes the fewest bytes; of equals the last one."""
    best = encode_group(modes[0], patches, old)
    for mode in modes[1:]:
        if _least_bytes(mode, patches) <= _bytes(best):
            best = min(encode_group(mode, patches, old), best, key=_bytes)
    return best


def _bytes(coded: tuple[Group, Streams]) -> int:
    return sum(stream.size for stream in coded[1].values())


def _least_bytes(mode: Mode, patches: Sequence[Patch]) -> int:
    """What a group takes in `mode` at least, where that is quickly told; else 0."""
    changes, elements = sum(p.index.size for p in patches), sum(p.numel for p in patches)
    if mode != "gaps" or 2 * changes > elements:
        return 0
    _, bits = rice.rice_k(flat_runs(patches))
    return bits // 8 + changes // 8


def _candidates(patch: Patch) -> list[Mode]:
    """The modes beside the sparse ones that can be the cheapest for a tensor."""
    density = patch.index.size / patch.numel
    neighbours = positions.neighbours(patch.index) / patch.index.size
    modes: list[Mode] = []
    if density > 1 / 8 or neighbours > _CLUSTERED * density + 0.05:
        modes.append("mask")
    if density > 1 / 4:
        modes.append("dense")
    if density > 1 / 2:
        modes.append("raw")
    return modes


def held(modes: Sequence[Mode], tensors: Iterable[Listed | Patch], old: Old) -> Old:
    """`old` for another thread: asked in this one, for it may take a lock, or ask other workers in turn."""
    needed = any(LAYOUTS[mode].reads_old for mode in modes)
    return {tensor.name: old(tensor.name) for tensor in tensors if needed}.__getitem__
