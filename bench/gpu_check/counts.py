"""Counts the kernel launches and waits of a sync: they must be equal for 10 tensors and for thousands."""

import torch

from bench.gpu_check.model import Replica
from bench.gpu_check.report import Row, Rows
from bench.model import find
from delta_weight_sync.gpu import used
from delta_weight_sync.publish.mirror import Block, Mirror, Part

_ELEMENTS = 1 << 18
_MOST_LAUNCHES, _MOST_WAITS = 20, 3


def rows(device: torch.device) -> Rows:
    """One row for each part of a sync."""
    many = 20_000 if device.type == "cuda" else 300  # the interpreter takes milliseconds per tensor
    few, all_of_them = _counts(10, device), _counts(many, device)
    for part, counts in few.items():
        right = counts == all_of_them[part]
        launches, waits = counts
        right &= 0 < launches <= _MOST_LAUNCHES and 0 < waits <= _MOST_WAITS
        text = f"{launches} launches and {waits} waits"
        yield Row(f"{part}, for 10 tensors and for {many:,}", text, right)


def _counts(tensors: int, device: torch.device) -> dict[str, tuple[int, int]]:
    """Launches and waits of each part."""
    sizes = [_ELEMENTS // tensors] * tensors
    sizes[0] = _ELEMENTS // 10  # so that tiles of every kind occur with few and with many tensors
    replica = Replica({f"w{i}": (size,) for i, size in enumerate(sizes)}, device)
    mirror = Mirror("device")
    for name, tensor in replica.tensors.items():
        mirror.add(name, tensor)
    parts = [
        Part(name, tensor, Block.whole(tensor.shape), lasting=True)
        for name, tensor in replica.tensors.items()
    ]
    mirror.keep(find(mirror, parts))  # the first sync makes the table
    seen = {}

    def note(part: str) -> None:
        seen[part] = used["launches"], used["waits"]
        used.clear()

    used.clear()
    mirror.keep(find(mirror, parts))
    note("diff")
    replica.memory.digest()
    write, _ = replica.memory.prepare(replica.changes())
    note("stage")
    write.do()
    note("commit")
    return seen
