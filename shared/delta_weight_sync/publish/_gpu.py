"""Finds the changes of all parameters on one device, in plain PyTorch; the same on a GPU and on the host.

The parts of a comparison are cut into chunks of bounded size. For each chunk, one call casts its parameters
into a flat buffer, which is compared with the mirror, mostly without a copy: the mirror is one flat tensor.
All arithmetic is on the changes of a chunk, whatever tensors they are in. The host waits once for each chunk,
because the number of its changes decides sizes, and once at the end, for positions and bits of all changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from delta_weight_sync import gpu
from delta_weight_sync.codec import INFINITY, NAN, Bits, Index, Patch
from delta_weight_sync.digest import seed
from delta_weight_sync.publish.blocks import Part
from delta_weight_sync.util import in_order

CHUNK = 1 << 26  # elements that are compared together, in a buffer of 128 MiB
_SEED, _ORIGIN, _MEMORY, _START, _FIRST, _CAST, _CHECKED, _COLUMNS = range(8)
Mirrors = Mapping[str, torch.Tensor]  # int16, contiguous


class _Piece(NamedTuple):
    """A range of a part's elements."""

    part: int  # number of the part
    first: int  # its first element in the part
    new: torch.Tensor  # flat
    old: torch.Tensor  # flat int16 tensor that has the mirror's bits
    at: int  # where in `old`


@dataclass(frozen=True)
class _Kept:
    """What `keep` needs of a chunk: its changes, and where they are in the mirror's memory."""

    memory: torch.Tensor  # flat int16
    columns: torch.Tensor
    ends: torch.Tensor
    at: torch.Tensor  # int32 [n], positions in the chunk
    ulps: torch.Tensor  # int16 [n]


@dataclass(frozen=True)
class Changes:
    """The differences from the mirrors: a patch for each part that changed."""

    device: torch.device
    patches: list[Patch]
    infinite: int  # number of changes to NaN or infinity
    moved: int  # change of the digest
    kept: list[_Kept]


class DeviceDiff:
    """Compares parameters on one device with their mirrors; updates the mirrors on the trainer's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # `read` uses a stream that waits for the last write to mirrors, but not for training's later work.
        self._reads = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._written: torch.cuda.Event | None = None

    @torch.no_grad()
    def find(self, parts: Sequence[Part], mirrors: Mirrors, unchecked: Collection[str] = ()) -> Changes:
        """Find the changes of parts of any float dtype and layout. Leave the mirrors unchanged.

        `unchecked`: parts whose words say nothing about NaN and infinity.
        """
        with gpu.on(self._device):
            columns = _columns(parts, mirrors, unchecked)
            chunks = [*_chunks(parts, mirrors)]
            kept, sums = zip(
                *(self._compare(chunk, columns, mirrors, parts) for chunk in chunks), strict=True
            )
            pairs = [column for chunk in kept for column in (chunk.at, chunk.ulps)]
            *found, totals = gpu.read([*pairs, torch.stack(sums).sum(0)], self._device)
            moved, infinite = totals.tolist()
        at, ulps = ([tensor.numpy() for tensor in found[which::2]] for which in (0, 1))
        for number, amounts in enumerate(ulps):
            if not amounts.all():  # a NaN that was one before
                at[number] = at[number][amounts != 0]
                ulps[number] = amounts[amounts != 0]
        patches = _patches(parts, chunks, at, ulps)
        return Changes(self._device, patches, infinite, moved, [*kept])

    def _compare(
        self, chunk: list[_Piece], columns: Index, mirrors: Mirrors, parts: Sequence[Part]
    ) -> tuple[_Kept, torch.Tensor]:
        """Compare a chunk. Return its changes, and int64 [2]: change of the digest, number of infinities."""
        sizes = [piece.new.numel() for piece in chunk]
        new = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self._device)
        gpu.pack([piece.new for piece in chunk], torch.split(new, sizes))
        bits = new.view(torch.int16)
        old = self._old(chunk)
        changed = (bits != old).nonzero().view(-1)  # waits
        table = columns[[piece.part for piece in chunk]].T.copy()
        table[_FIRST] = [piece.first for piece in chunk]
        ends = np.cumsum(sizes)
        table[_START] = ends - sizes
        there, bounds = (gpu.upload(array, self._device) for array in (table, ends))
        at, ulps = (torch.empty_like(changed, dtype=kind) for kind in (torch.int32, torch.int16))
        totals = torch.zeros(2, dtype=torch.int64, device=self._device)
        for some in gpu.cuts(changed.numel(), gpu.CHANGES):
            where = changed[some]
            now = bits[where]
            was = old[where]
            of, position = _position(there, bounds, where)
            # Each device casts a NaN to other bits. Here they become those of the host, perhaps the old ones.
            odd = ((now & 0x7FFF) > INFINITY) & (there[_CAST][of] == 1)
            now = now.masked_fill(odd, NAN)
            moved = gpu.factors(there[_SEED][of], position).mul_(gpu.unsigned(now) - gpu.unsigned(was))
            infinite = ((now & INFINITY) == INFINITY) & (now != was) & (there[_CHECKED][of] == 1)
            totals += torch.stack([moved.sum(), infinite.sum()])
            at[some] = where
            ulps[some] = now - was
        memory = gpu.words_of(mirrors[parts[chunk[0].part].name])
        return _Kept(memory, there, bounds, at, ulps), totals

    def _old(self, chunk: list[_Piece]) -> torch.Tensor:
        """The mirror's bits of a chunk, on the device: a view if they lie together there."""
        runs: list[tuple[torch.Tensor, int, int]] = []
        for piece in chunk:
            source, start, end = runs[-1] if runs else (None, 0, 0)
            size = piece.new.numel()
            if source is piece.old and end == piece.at:
                runs[-1] = piece.old, start, end + size
            else:
                runs.append((piece.old, piece.at, piece.at + size))
        stretches = [source[start:end] for source, start, end in runs]
        if len(runs) == 1 and stretches[0].device == self._device:
            return stretches[0]
        sizes = [stretch.numel() for stretch in stretches]
        old = torch.empty(sum(sizes), dtype=torch.int16, device=self._device)
        gpu.pack(stretches, torch.split(old, sizes))
        return old

    @torch.no_grad()
    def keep(self, changes: Changes) -> None:
        """Write the changes into mirrors in device memory, without waiting for the device."""
        with gpu.on(self._device):
            for chunk in changes.kept:
                for some in gpu.cuts(chunk.at.numel(), gpu.CHANGES):
                    of, position = _position(chunk.columns, chunk.ends, chunk.at[some].to(torch.int64))
                    position += chunk.columns[_MEMORY][of]
                    chunk.memory[position] = chunk.memory[position] + chunk.ulps[some]
            if self._reads:
                self._written = torch.cuda.current_stream(self._device).record_event()

    def read(self, mirror: torch.Tensor) -> torch.Tensor:
        """Return a copy of a mirror on the host."""
        with gpu.on(self._device), torch.cuda.stream(self._reads):
            if self._reads and self._written:
                self._reads.wait_event(self._written)
            return gpu.read([mirror], self._device)[0]

    @torch.no_grad()
    def take(self, patches: Sequence[Patch], mirrors: Mirrors) -> int:
        """Apply other ranks' patches to mirrors on the device; return the change of the digest."""
        by_memory: dict[int, list[Patch]] = {}
        for patch in patches:
            by_memory.setdefault(mirrors[patch.name].untyped_storage().data_ptr(), []).append(patch)
        with gpu.on(self._device):
            moved = torch.zeros((), dtype=torch.int64, device=self._device)
            for some in by_memory.values():
                memory = gpu.words_of(mirrors[some[0].name])
                rows = [(seed(p.name).astype(np.int64), mirrors[p.name].storage_offset()) for p in some]
                counts = np.array([patch.index.size for patch in some])
                arrays = np.array(rows, np.int64).T.copy(), counts.cumsum()
                table, ends = (gpu.upload(array, self._device) for array in arrays)
                index = np.concatenate([patch.index for patch in some])
                amounts = np.concatenate([patch.ulps for patch in some]).view(np.int16)
                for part in gpu.cuts(index.size, gpu.CHANGES):
                    order = torch.arange(part.start, part.stop, device=self._device)
                    of = torch.searchsorted(ends, order, right=True)
                    position = gpu.upload(index[part], self._device)
                    at = position + table[1][of]
                    was = memory[at]
                    now = was + gpu.upload(amounts[part], self._device)
                    memory[at] = now
                    amount = gpu.unsigned(now) - gpu.unsigned(was)
                    moved += gpu.factors(table[0][of], position).mul_(amount).sum()
            return int(gpu.read([moved], self._device)[0])


def _columns(parts: Sequence[Part], mirrors: Mirrors, unchecked: Collection[str]) -> Index:
    """int64 [parts, columns]: what the arithmetic on the changes of each part needs, in a row.

    The last columns are sizes, then strides, of the part's box in the parameter, outer dimension first.
    """
    boxes = [part.block.strided() for part in parts]
    dims = max(len(sizes) for sizes, _ in boxes)
    rows = np.ones((len(parts), _COLUMNS + 2 * dims), np.int64)
    for row, part, (sizes, strides) in zip(rows, parts, boxes, strict=True):
        row[_SEED] = seed(part.name).astype(np.int64)
        row[_ORIGIN] = part.block.origin
        row[_MEMORY] = mirrors[part.name].storage_offset()
        row[_CAST] = part.tensor.dtype != torch.bfloat16
        row[_CHECKED] = part.name not in unchecked
        row[_COLUMNS + dims - len(sizes) : _COLUMNS + dims] = sizes
        row[_COLUMNS + 2 * dims - len(sizes) :] = strides
    return rows


def _chunks(parts: Sequence[Part], mirrors: Mirrors) -> Iterator[list[_Piece]]:
    """Cut parts into pieces, and yield lists of consecutive pieces: of at most `CHUNK` elements altogether,
    and with mirrors in the same memory."""
    chunk = list[_Piece]()
    size = 0
    storage = None
    for number, part in enumerate(parts):
        mirror = mirrors[part.name]
        new = part.tensor.detach()
        if not new.is_contiguous():
            new = new.to(torch.bfloat16).contiguous()
        new = new.view(-1)
        if (its := mirror.untyped_storage().data_ptr()) != storage:
            if chunk:
                yield chunk
                chunk = []
                size = 0
            storage = its
            memory = gpu.words_of(mirror)
        if part.block.whole_rows:
            old = memory
            at = int(mirror.storage_offset()) + part.block.origin
        else:  # several stretches of the mirror, which are cut out
            old = mirror[part.block.at].reshape(-1)
            at = 0
        for first in range(0, new.numel(), CHUNK) if new.numel() > CHUNK else (0,):
            some = new[first : first + CHUNK] if new.numel() > CHUNK else new
            if size + some.numel() > CHUNK:
                yield chunk
                chunk = []
                size = 0
            chunk.append(_Piece(number, first, some, old, at + first))
            size += some.numel()
    if chunk:
        yield chunk


def _position(
    columns: torch.Tensor, ends: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of positions in a chunk: the number of the piece, and the position in the whole parameter."""
    of = torch.searchsorted(ends, at, right=True)
    element = at - columns[_START][of]
    element += columns[_FIRST][of]
    sizes, strides = columns[_COLUMNS:].chunk(2)
    return of, gpu.places(sizes, strides, of, element).add_(columns[_ORIGIN][of])


def _patches(
    parts: Sequence[Part], chunks: Sequence[Sequence[_Piece]], at: Sequence[Index], ulps: Sequence[Bits]
) -> list[Patch]:
    """Make patches of changes, which are given by chunk as positions (int32) and ulps (int16)."""
    upto = np.cumsum([0, *(found.size for found in at)])
    index = np.empty(upto[-1], np.int64)
    amounts = np.empty(upto[-1], np.uint16)

    def fill(number: int) -> list[tuple[int, int]]:
        """Fill in the changes of a chunk. Return the part and the number of changes of each changed piece."""
        chunk = chunks[number]
        found = at[number]
        starts = np.cumsum([0, *(piece.new.numel() for piece in chunk)])
        cuts = np.searchsorted(found, starts)
        own = index[upto[number] : upto[number + 1]]
        amounts[upto[number] : upto[number + 1]] = ulps[number].view(np.uint16)
        counts = []
        for j in np.flatnonzero(np.diff(cuts)).tolist():
            its = slice(cuts[j], cuts[j + 1])
            np.add(found[its], chunk[j].first - int(starts[j]), out=own[its], dtype=np.int64)
            counts.append((chunk[j].part, int(cuts[j + 1] - cuts[j])))
        return counts

    counted = [each for counts in in_order(fill, range(len(chunks))) for each in counts]
    sizes = np.zeros(len(parts), np.int64)
    np.add.at(sizes, [part for part, _ in counted], [count for _, count in counted])
    ends = sizes.cumsum()
    patches = []
    for number in np.flatnonzero(sizes).tolist():
        part = parts[number]
        its = slice(ends[number] - sizes[number], ends[number])
        positions = part.block.positions(index[its])
        patches.append(Patch(part.name, part.block.shape, positions, amounts[its]))
    return patches
