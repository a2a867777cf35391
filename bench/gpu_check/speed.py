"""What a sync costs on the GPU, beside what a copy of the same bytes costs in the same run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from bench.gpu_check.model import Replica
from bench.shapes import Shapes, qwen_shapes, shapes_8b, shapes_experts
from delta_weight_sync.publish.mirror import Block, Mirror, Part

_REPEATS = 7
_SHARE = 0.6  # of a copy's bandwidth that digest and diff have to reach
_COPIED = 1 << 30  # bytes


def lines(device: torch.device) -> Iterator[str]:
    """A line for each figure."""
    if device.type != "cuda":
        yield "      speed: unmeasured, without a GPU"
        return
    bandwidth = _copy(device)
    yield f"      a copy reaches {bandwidth / 1e9:,.0f} GB/s, read and written"
    models: dict[str, tuple[Shapes, float]] = {
        "Qwen3-0.6B": (qwen_shapes(), 2.0),
        "Qwen3-8B": (shapes_8b(), float("inf")),
        "Qwen3-30B-A3B": (shapes_experts(), 20.0),
    }
    for name, (shapes, most_ms) in models.items():
        try:
            yield from _model(name, Replica(shapes, device), bandwidth, most_ms)
        except torch.cuda.OutOfMemoryError:
            yield f"      {name}: this GPU has too little memory for it"
        gc.collect()
        torch.cuda.empty_cache()


def _model(name: str, replica: Replica, bandwidth: float, most_ms: float) -> Iterator[str]:
    read = 2 * replica.elements / _seconds(replica.memory.digest)
    yield _verdict(read >= _SHARE * bandwidth, f"{name}: digest {read / 1e9:,.0f} GB/s")
    changes = replica.changes()
    yield f"      {name}: stage {1e3 * _seconds(lambda: replica.memory.prepare(changes)):.1f} ms, 1 % changed"
    write, _ = replica.memory.prepare(changes)
    commit_ms, undo_ms = 1e3 * _seconds(write.do), 1e3 * _seconds(write.undo)
    yield _verdict(commit_ms <= most_ms, f"{name}: commit {commit_ms:.2f} ms, undo {undo_ms:.2f} ms")
    places: tuple[Literal["host", "device"], ...] = ("device", "host")
    for place in places:
        yield _diff(name, replica, bandwidth, place)


def _diff(name: str, replica: Replica, bandwidth: float, place: Literal["host", "device"]) -> str:
    """Of bf16 parameters: both they and the mirror are read."""
    mirror = Mirror(place)
    for tensor_name, tensor in replica.tensors.items():
        mirror.add(tensor_name, tensor)
    parts = [
        Part(each, tensor, Block.whole(tensor.shape), lasting=True)
        for each, tensor in replica.tensors.items()
    ]

    def change() -> None:
        replica.flat[7::100] += 1

    mirror.keep(mirror.find(parts))
    seconds = _seconds(lambda: mirror.keep(mirror.find(parts)), before=change)
    text = (
        f"{name}: diff and pack {2 * replica.elements / seconds / 1e9:,.0f} GB/s of model, mirror on {place}"
    )
    if place == "host":
        return f"      {text}"
    return _verdict(4 * replica.elements / seconds >= _SHARE * bandwidth, text)


def _copy(device: torch.device) -> float:
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / _seconds(lambda: target.copy_(source))


def _seconds(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median of the wall's clock, with all of the device's work done; the first time warms up."""
    measured = []
    for _ in range(_REPEATS + 1):
        before()
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        measured.append(time.perf_counter() - started)
    return statistics.median(measured[1:])


def _verdict(right: bool, text: str) -> str:
    return f"{'PASS' if right else 'FAIL'}  {text}"
