"""The mirror: a copy of the words of the newest sync's weights, and the diff of live parameters against it.

A word is 16 bits of a tensor (see `checkpoint`): for a tensor that versions hold in bf16, one element. Only
such tensors are rounded here, from any float dtype; of all others, the words come as tensors that look like
bf16.

A `Search` finds changes and writes none, so other threads may read the mirror meanwhile. `Mirror.keep` then
writes the changes into the mirror. For parameters on a GPU, the mirror is on the GPU ("device", faster) or in
pinned host memory ("host"), which is copied to the GPU piece by piece. Only changed elements leave the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

import numpy as np
import torch

from delta_weight_sync import codec, digest, util
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.codec import Bits, Patch
from delta_weight_sync.errors import CodecError
from delta_weight_sync.publish._gpu import Changes, DeviceDiff
from delta_weight_sync.publish.blocks import Part

Place = Literal["host", "device"]
_TAKEN = 1 << 18  # one job of a thread applies about this many changes
_READ = torch.float32, torch.bfloat16  # what `codec.compare` reads
_HELD = 1 << 30  # bytes of copies, such as gathered tensors, that may wait to be compared


@dataclass(frozen=True)
class Found:
    """The differences from the mirror, found on the host and on devices."""

    host: list[Patch]
    devices: list[Changes]

    @property
    def patches(self) -> list[Patch]:
        """The patches of all parts that changed, and perhaps empty patches of unchanged parts."""
        return self.host + [patch for changes in self.devices for patch in changes.patches]


class Mirror:
    """The bf16 bits of the newest sync, by parameter name."""

    def __init__(self, place: Place = "host", *, finite: bool = False) -> None:
        """`finite`: refuse changes to NaN or infinity."""
        self._place = place
        self._finite = finite
        self._bits: dict[str, torch.Tensor] = {}  # int16, the parameter's shape, contiguous
        self._devices: dict[torch.device, DeviceDiff] = {}
        self._joined: set[str] = set()  # parameters whose mirrors lie together for a device
        self._not_bf16: set[str] = set()  # tensors whose words say nothing about NaN and infinity
        self.digest = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter."""
        return {name: tuple(bits.shape) for name, bits in self._bits.items()}

    def add(self, name: str, tensor: torch.Tensor, dtype: str = "BF16") -> None:
        """Start to mirror a tensor: of any float dtype, to be held in bf16; or the words of another dtype."""
        if dtype != "BF16":
            self._not_bf16.add(name)
        bits = to_bits(tensor)  # of a tensor on a GPU, too: the first comparison moves all mirrors together
        self._bits[name] = torch.from_numpy(bits.view(np.int16))
        self.digest += digest.tensor_digest(name, bits)

    def bits(self, name: str) -> Bits:
        """The bits of one parameter, on the host: a view if the mirror is on the host, else a copy."""
        bits = self._bits[name]
        if bits.is_cuda:
            bits = self._on(bits.device).read(bits)
        return bits.numpy().view(np.uint16)

    def search(self) -> Search:
        """Begin to find what changed since the last sync. Writes nothing."""
        return Search(self)

    def copied(self, part: Part) -> int:
        """How many bytes the comparison of a part copies at most."""
        tensor = part.tensor
        there = on_device(part.tensor)
        converted = 0 if tensor.is_contiguous() and (there or tensor.dtype in _READ) else 2 if there else 4
        cut_out = not part.block.whole_rows or (self._bits[part.name].is_cuda and not there)
        return (converted + 2 * cut_out) * tensor.numel()

    def find_on_host(self, parts: Sequence[Part]) -> list[Patch]:
        """Find the changes of parts on the host, with one call of `codec.compare`."""
        rows = []
        kept = []
        for part in parts:
            old = self._bits[part.name]
            new = part.tensor
            old = old if part.block.extent == part.block.shape else old[part.block.at]
            old = old.cpu().contiguous()
            if new.dtype not in _READ:
                new = new.float()
            new = new.contiguous()
            kept.append((old, new))  # these may be copies, of which `compare` gets only the addresses
            rows.append((old.data_ptr(), new.data_ptr(), new.element_size(), new.numel()))
        (counts, bad), index, ulps = codec.compare(np.array(rows, np.int64), _threads())
        for number in np.flatnonzero(bad) if self._finite else ():
            self.require_finite(parts[number].name, to_bits(parts[number].tensor))
        ends = counts.cumsum()
        patches = []
        for number in np.flatnonzero(counts):
            part = parts[number]
            a = ends[number] - counts[number]
            b = ends[number]
            patches.append(Patch(part.name, part.block.shape, part.block.positions(index[a:b]), ulps[a:b]))
        return patches

    def require_finite(self, name: str, bits: Bits) -> None:
        """Raise `CodecError` if `bits` hold NaN or infinity and this mirror allows only finite weights."""
        suspicious = self._finite and name not in self._not_bf16
        if suspicious and ((bits & codec.INFINITY) == codec.INFINITY).any():
            raise not_finite(name)

    def keep(self, found: Found) -> None:
        """Write the changes into the mirror. The mirror then equals the parameters."""
        self.take(found.host)
        for changes in found.devices:
            self.digest += changes.moved
            if self._place == "device":
                self._on(changes.device).keep(changes)
                continue
            for patch in changes.patches:
                if patch.index.size:
                    codec.apply(patch, self.bits(patch.name))

    def take(self, patches: Iterable[Patch]) -> None:
        """Apply patches that `find_on_host` or other ranks found."""
        on_host = list[Patch]()
        there = dict[torch.device, list[Patch]]()
        for patch in filter(lambda patch: patch.index.size, patches):
            bits = self._bits[patch.name]
            (there.setdefault(bits.device, []) if bits.is_cuda else on_host).append(patch)
        batch_of = np.cumsum([patch.index.size for patch in on_host]) // _TAKEN
        batches = groupby(zip(batch_of.tolist(), on_host, strict=True), key=itemgetter(0))
        parts = ([patch for _, patch in batch] for _, batch in batches)
        self.digest += sum(util.in_order(self._take, parts, _threads()))
        for device, some in there.items():
            self.digest += self._on(device).take(some, self._bits)

    def _take(self, patches: list[Patch]) -> int:
        """Apply patches to tensors on the host. Return the change of the digest."""
        tensors = ((p.name, self._bits[p.name].data_ptr(), p.index.size) for p in patches)
        index = codec.join([patch.index for patch in patches], np.int64)
        return digest.add_all(tensors, index, codec.join([patch.ulps for patch in patches], np.uint16))

    def find_on_devices(self, parts: list[Part]) -> list[Changes]:
        """Find the changes of parts on devices."""
        by_device: dict[torch.device, list[Part]] = {}
        found = []
        for part in parts:
            by_device.setdefault(part.tensor.device, []).append(part)
        for device, some in by_device.items():
            # Several parts may be of one tensor.
            if far := [*dict.fromkeys(part.name for part in some if part.name not in self._joined)]:
                self._join(far, device)
            found.append(self._on(device).find(some, self._bits, self._not_bf16))
            for part in some if found[-1].infinite and self._finite else ():
                self.require_finite(part.name, to_bits(part.tensor))
        return found

    def _join(self, names: Sequence[str], device: torch.device) -> None:
        """Move mirrors into one flat tensor: on the device, or in host memory that it copies from quickly."""
        from delta_weight_sync import gpu

        size = sum(self._bits[name].numel() for name in names)
        memory = torch.empty(size, dtype=torch.int16, device=device if self._place == "device" else "cpu")
        if self._place == "host" and device.type == "cuda" and size:
            gpu.pin(self, memory)
        gpu.join(self._bits, names, memory)
        self._joined.update(names)

    def _on(self, device: torch.device) -> DeviceDiff:
        if device not in self._devices:
            self._devices[device] = DeviceDiff(device)
        return self._devices[device]


class Search:
    """Collects parts, of any float dtype, and finds their changes.

    `found` compares all waiting parts together. `add` calls `found` if the copies among them exceed 1 GB.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._found = Found([], [])
        self._waiting = list[Part]()
        self._held = 0

    def add(self, part: Part) -> None:
        """Add a part, and keep its tensor until the part is compared."""
        self._waiting.append(part)
        self._held += self._mirror.copied(part) + (0 if part.lasting else part.tensor.nbytes)
        if self._held > _HELD:
            self.found()

    def found(self) -> Found:
        """Compare the parts that wait. Return the differences of all parts that were added so far."""
        waiting = self._waiting
        self._waiting = []
        self._held = 0
        there = [part for part in waiting if on_device(part.tensor)]
        self._found.devices.extend(self._mirror.find_on_devices(there))
        if on_host := [part for part in waiting if not on_device(part.tensor)]:
            self._found.host.extend(self._mirror.find_on_host(on_host))
        return self._found


def not_finite(name: str) -> CodecError:
    """The error for NaN or infinity in a tensor."""
    return CodecError(
        f"{name} has weights that are NaN or infinite, so nothing was published: lower the learning rate or"
        " clip gradients, and resume; to publish such weights, set allow_nonfinite=True"
    )


def _threads() -> int:
    """Number of threads to use while the trainer waits: torch's number, but at least `util.THREADS`."""
    return max(util.THREADS, torch.get_num_threads())


def on_device(tensor: torch.Tensor) -> bool:
    """Whether this tensor is compared on its device, a GPU; otherwise the host does it."""
    return tensor.is_cuda
