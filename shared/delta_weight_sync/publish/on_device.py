"""The diff of all parameters on one device: a few launches and at most three waits, however many they are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from delta_weight_sync.codec import Bits, Index, Patch
from delta_weight_sync.device.aside import Aside
from delta_weight_sync.device.compare import TOTALS, add, find, keep
from delta_weight_sync.device.factors import inner
from delta_weight_sync.device.launches import launch, read
from delta_weight_sync.device.tiles import KINDS, Stretches, Tiles
from delta_weight_sync.device.unpack import COUNTS, unpack
from delta_weight_sync.digest import BLOCK, change_digest
from delta_weight_sync.publish.sharded import Part

Mirrors = Mapping[str, torch.Tensor]  # int16, in memory that the device can read
_ROOM = 64  # changes per tile that fit at least: 1.6 %


@dataclass(frozen=True)
class Changes:
    """What differs from the mirrors, one patch per part, and how far that moves the digest.

    `book` and `found` are the kernels' (see `device.compare`), for as long as the mirrors lack the changes.
    """

    patches: list[Patch]
    moved: int
    tiles: Tiles
    book: torch.Tensor
    found: torch.Tensor


class Table:
    """What the kernels go by for some parts; `key`: what it depends on, `room`: for how many changes."""

    def __init__(self, key: Sequence[tuple[object, ...]], tiles: Tiles) -> None:
        self.key, self.tiles = key, tiles
        self.make_room(0)

    def make_room(self, changes: int) -> None:
        """For the next comparison, which likely finds about as much as the last one."""
        self.room = max(self.tiles.count * _ROOM, int(changes) * 5 // 4)


class DeviceDiff:
    """Compares parameters on one device with their mirrors and writes these, on the trainer's stream."""

    def __init__(self, device: torch.device) -> None:
        self.aside = Aside(device)
        self._device = device
        self._tables: dict[str, Table] = {}  # by the name of the first part

    def find(self, parts: Sequence[Part], mirrors: Mirrors) -> Changes:
        """What changed in the parts, of any float dtype and layout; writes nothing."""
        readable = [part if _is_readable(part.tensor) else _readable(part) for part in parts]
        with torch.accelerator.device_index(self._device.index):
            table = self._table(readable, mirrors)
            tiles = table.tiles
            book, found, notes = self._compare(table)
            if notes[0] > found.numel():
                table.make_room(notes[0])
                book, found, notes = self._compare(table)
            table.make_room(notes[0])
            packed = read(found[: notes[0]]).numpy()
        index, ulps = np.empty(notes[0], np.int64), np.empty(notes[0], np.uint16)
        unpack(notes[TOTALS.value :], packed, tiles.blocks, index, ulps)
        return Changes(_split(parts, tiles, notes, index, ulps), int(notes[1]), tiles, book, found)

    def keep(self, changes: Changes) -> None:
        """Let the mirrors, which are on the device, have the new bits; does not wait."""
        tiles = changes.tiles
        with torch.accelerator.device_index(self._device.index):
            launch(keep, tiles.count, tiles.entries, tiles.owners, changes.book, changes.found)
        self.aside.wrote()

    def take(self, patches: Sequence[Patch], mirrors: Mirrors) -> int:
        """Add what was found elsewhere to mirrors on the device; how far that moves the digest."""
        index = np.concatenate([mirrors[p.name].data_ptr() + 2 * p.index for p in patches])
        ulps = np.concatenate([p.ulps for p in patches])
        with torch.accelerator.device_index(self._device.index):
            there = torch.from_numpy(ulps.view(np.int16)).to(self._device)
            old = torch.empty_like(there)
            addresses = torch.from_numpy(index).to(self._device)
            launch(add, -(-index.size // BLOCK), addresses, there, old, index.size)
            was = read(old).numpy().view(np.uint16)
        parts = np.split(was, np.cumsum([p.index.size for p in patches])[:-1])
        return sum(
            change_digest(p.name, p.index, bits, bits + p.ulps)
            for p, bits in zip(patches, parts, strict=True)
        )

    def _table(self, parts: Sequence[Part], mirrors: Mirrors) -> Table:
        """That of the last time where nothing has moved since."""
        key = [
            (p.name, p.block, p.tensor.dtype, p.tensor.data_ptr(), mirrors[p.name].data_ptr()) for p in parts
        ]
        table = self._tables.get(parts[0].name)
        if table is None or table.key != key:
            lie = [Stretches(p.name, p.tensor, mirrors[p.name], *p.block.stretches()) for p in parts]
            table = self._tables[parts[0].name] = Table(key, Tiles(lie, self._device))
        return table

    def _compare(self, table: Table) -> tuple[torch.Tensor, torch.Tensor, Index]:
        tiles, room = table.tiles, table.room
        book = torch.zeros(TOTALS.value + tiles.count, dtype=torch.int64, device=self._device)
        found = torch.empty(room, dtype=torch.int32, device=self._device)
        for dtype, whole, which in tiles.launches:
            given = tiles.entries, tiles.owners, which, inner(self._device), _nan(dtype, self._device)
            constants = {"kind": KINDS[dtype], "whole": whole}
            launch(find, which.numel(), *given, book, found, room, **constants)
        return book, found, read(book).numpy()


def _is_readable(tensor: torch.Tensor) -> bool:
    return tensor.dtype in KINDS and tensor.is_contiguous()


def _readable(part: Part) -> Part:
    """A copy in bf16, for as long as it is compared."""
    return part._replace(tensor=part.tensor.to(torch.bfloat16).contiguous())


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """int16 [1]: the bits that torch's cast makes of a NaN, which differ by device and dtype."""
    return torch.full((1,), torch.nan, dtype=dtype, device=device).to(torch.bfloat16).view(torch.int16)


def _split(parts: Sequence[Part], tiles: Tiles, notes: Index, index: Index, ulps: Bits) -> list[Patch]:
    upto = np.concatenate([[0], np.cumsum(notes[TOTALS.value :] % COUNTS)])
    ends = upto[np.concatenate([[0], tiles.ends])].tolist()
    return [
        Patch(part.name, part.block.shape, index[a:b], ulps[a:b])
        for part, (a, b) in zip(parts, itertools.pairwise(ends), strict=True)
    ]
