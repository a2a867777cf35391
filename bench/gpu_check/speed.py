"""Measures the cost of a sync on the GPU, separately for device and host.

Speeds of the device are shown as a share of the speed of a copy in the same run. A healthy card exceeds the
required share by far, so FAIL means that something is broken.
"""

import gc
import statistics
import threading
import time
from collections.abc import Callable
from typing import Literal

import torch

from bench.gpu_check import predict
from bench.gpu_check.model import Replica
from bench.gpu_check.report import Row, Rows, gb_s, ms
from bench.model import find
from delta_weight_sync import util
from delta_weight_sync.publish.mirror import Block, Mirror, Part
from delta_weight_sync.vllm.memory import Step

_REPEATS = 5
_COPIED = 1 << 30  # bytes
_SHARES = {
    "digest": 0.4,
    "commit": 0.25,
    "diff": 0.2,
}  # required share of a copy's bandwidth


def rows(device: torch.device) -> Rows:
    """One row for each figure."""
    if device.type != "cuda":
        yield Row("speed: unmeasured, because there is no GPU")
        return
    copied, up, down = _bandwidths(device)
    yield Row("copy on the card, read and written", gb_s(copied))
    yield Row("pinned memory to the card, and back", f"{gb_s(up)}, {gb_s(down)}")
    for name, shapes in predict.models().items():
        try:
            yield from _model(name, Replica(shapes, device), copied, min(up, down), device)
        except torch.cuda.OutOfMemoryError:
            yield Row(f"{name}: this GPU has too little memory for this model")
        gc.collect()
        torch.cuda.empty_cache()


def _bandwidths(device: torch.device) -> tuple[float, float, float]:
    """Bytes per second: of a copy on the card (read and written), to the card, and back."""
    there, here = (torch.empty(_COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    copied = 2 * _COPIED / _device_s(device, lambda: here.copy_(there))
    up = _COPIED / _device_s(device, lambda: there.copy_(pinned, non_blocking=True))
    return copied, up, _COPIED / _device_s(device, lambda: pinned.copy_(there, non_blocking=True))


def _model(name: str, replica: Replica, copied: float, bus: float, device: torch.device) -> Rows:
    processors, weights = torch.cuda.get_device_properties(device).multi_processor_count, replica.elements
    expected = predict.seconds(weights, copied, bus, processors, util.THREADS)

    def row(part: str, seconds: float, kind: str = "", moved: float = 0.0) -> Row:
        rate, right = moved / seconds, None
        if kind:
            right = rate >= _SHARES[kind] * copied
        share = f", {gb_s(rate)}, {100 * rate / copied:.0f} % of a copy" if moved else ""
        return Row(
            f"{name}: {part}", ms(seconds) + share, right, ms(expected[part]) if part in expected else ""
        )

    memory, quarter = replica.memory, replica.memory.programs
    digest = "stage, digest on a quarter of the GPU"
    yield row(digest, _device_s(device, memory.digest, memory), moved=2.01 * weights)
    yield Row(
        f"{name}: a matrix product at the same time", f"takes {_slowed(replica, device):.2f} times as long"
    )
    memory.programs = 8 * processors
    yield row("digest on all of the GPU", _device_s(device, memory.digest, memory), "digest", 2.01 * weights)
    yield Row(
        f"{name}: a matrix product at the same time", f"takes {_slowed(replica, device):.2f} times as long"
    )
    memory.programs = quarter
    changes = replica.changes()
    yield row("stage, of placed changes", _wall_s(lambda: memory.prepare(changes)))
    step, _ = memory.prepare(changes)
    moved = 110 * changes.ulps.size
    yield row("commit, write and read back", _device_s(device, step.do), "commit", moved)
    yield row("commit, as the engine waits for it", _wall_s(step.do))
    yield row("undo", _wall_s(step.undo))
    del step
    places: tuple[Literal["host", "device"], ...] = ("device", "host")
    for place in places:
        whole_s, device_s = _diff(replica, place, device)
        mirror = "GPU" if place == "device" else "host"
        kind = "diff" if place == "device" else ""
        yield row(f"diff, device: mirror on the {mirror}", device_s, kind, 4 * weights)
        yield row("diff, host: changes over the bus, unpacked", whole_s - device_s)


def _diff(replica: Replica, place: Literal["host", "device"], device: torch.device) -> tuple[float, float]:
    """Seconds of a hand-over of bf16 parameters, and of the comparison in it."""
    mirror = Mirror(place)
    for name, tensor in replica.tensors.items():
        mirror.add(name, tensor)
    parts = [Part(name, t, Block.whole(t.shape), lasting=True) for name, t in replica.tensors.items()]

    def change() -> None:
        replica.flat[7::100] += 1

    mirror.keep(find(mirror, parts))
    whole = _wall_s(lambda: mirror.keep(find(mirror, parts)), before=change)
    change()
    diff = mirror._on(device)
    (tiles,) = diff._tables.values()
    return whole, _device_s(device, lambda: diff._compare(tiles))


def _slowed(replica: Replica, device: torch.device) -> float:
    """How many times as long matrix products take while the model is hashed again and again."""
    left = torch.randn(256, 4096, device=device, dtype=torch.bfloat16)
    right = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(200):
            torch.mm(left, right)

    alone, stop = _device_s(device, products), threading.Event()

    def hash_on() -> None:
        while not stop.is_set():
            replica.memory.digest()

    thread = threading.Thread(target=hash_on)
    thread.start()
    try:
        return _device_s(device, products) / alone
    finally:
        stop.set()
        thread.join()


def _device_s(device: torch.device, work: Callable[[], object], staging: object = None) -> float:
    """Median seconds by the device's clock, on the stream of `staging` or else on the current stream."""
    measured = []
    for _ in range(_REPEATS + 1):
        torch.cuda.synchronize()
        stream = getattr(staging, "_stream", None)
        with torch.cuda.stream(stream):
            begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        measured.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(measured[1:])


def _wall_s(work: Callable[[], Step | object], before: Callable[[], object] = lambda: None) -> float:
    """Median seconds by the wall clock until the device has done all its work, after a warm-up."""
    measured = []
    for _ in range(_REPEATS + 1):
        before()
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        measured.append(time.perf_counter() - started)
    return statistics.median(measured[1:])
