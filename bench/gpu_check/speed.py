"""Measures the parts of a sync on a GPU, and names the operations that take most of the device's time.

Rates are also shown as a share of the rate of a copy in the same run: of bytes that are read and written. A
part whose share is small would gain from a kernel of its own.
"""

import gc
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_check.model import Replica
from bench.gpu_check.report import Row, Rows, gb_s, ms
from bench.model import find, whole_parts
from bench.shapes import Shapes, qwen_shapes, shapes_8b, shapes_experts
from delta_weight_sync.publish.mirror import Mirror, Place

_REPEATS = 3
_COPIED = 1 << 30  # bytes
_BEGIN_S = 90.0  # no model is begun after this time
_ROOM = 4.5  # bytes of GPU memory per weight: weights, mirror, and what a hand-over needs
_HOST_ROOM = 6.0  # bytes of host memory per weight: mirrors, and what the first sync copies
_OPERATIONS = 4  # that are named for each part
_TINY: Mapping[str, Shapes] = {"tiny": {"a": (64, 128), "b": (5000,)}}


def rows(device: torch.device) -> Rows:
    """One row for each figure."""
    started = time.monotonic()
    on_host = device.type != "cuda"
    models = {"Qwen3-0.6B": qwen_shapes(), "Qwen3-8B": shapes_8b(), "Qwen3-30B-A3B": shapes_experts()}
    copied, up, down = _bandwidths(device, _COPIED >> 10 if on_host else _COPIED)
    yield Row("copy on the card, read and written", gb_s(copied))
    yield Row("pinned memory to the card, and back", f"{gb_s(up)}, {gb_s(down)}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, shapes in (_TINY if on_host else models).items():
        weights = sum(map(math.prod, shapes.values()))
        if not on_host and _ROOM * weights > torch.cuda.mem_get_info(device)[0]:
            yield Row(f"{name}: this GPU has too little memory for this model")
        elif time.monotonic() - started > _BEGIN_S:
            yield Row(f"{name}: no time was left for this model")
        else:
            yield from _model(name, Replica(shapes, device), copied, device, _HOST_ROOM * weights < memory)
        gc.collect()
        if not on_host:
            torch.cuda.empty_cache()


def _bandwidths(device: torch.device, size: int) -> tuple[float, float, float]:
    """Bytes per second: of a copy on the card (read and written), to the card, and back."""
    there, here = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copied = 2 * size / _seconds(device, lambda: here.copy_(there))
    up = size / _seconds(device, lambda: there.copy_(pinned, non_blocking=True))
    return copied, up, size / _seconds(device, lambda: pinned.copy_(there, non_blocking=True))


def _model(name: str, replica: Replica, copied: float, device: torch.device, host_mirror: bool) -> Rows:
    def part(what: str, work: Callable[[], object], moved: float = 0.0) -> Rows:
        seconds = _seconds(device, work)
        rate = f", {gb_s(moved / seconds)}, {100 * moved / seconds / copied:.0f} % of a copy" if moved else ""
        yield Row(f"{name}: {what}", ms(seconds) + rate)
        yield from _profiled(f"{name}: {what}", work)

    yield from part("digest of all weights, at a join", replica.memory.digest, 2 * replica.elements)
    yield from part("digest of one slice, each second", replica.memory.recheck)
    yield from _commits(replica, part)
    slowed = f"takes {_slowed(replica, device):.2f} times as long"
    yield Row(f"{name}: a matrix product next to digests", slowed)
    places: tuple[Place, ...] = ("device", "host") if host_mirror else ("device",)
    for place in places:
        mirror = Mirror(place)
        for key, tensor in replica.tensors.items():
            mirror.add(key, tensor)

        def hand_over(mirror: Mirror = mirror) -> None:
            replica.flat[7::100] += 1
            mirror.keep(find(mirror, whole_parts(replica.tensors.items())))

        yield from part(f"hand-over, mirror on the {place}", hand_over, 4 * replica.elements)


def _commits(replica: Replica, part: Callable[..., Rows]) -> Rows:
    """Rows about one in a hundred weights, which are staged, committed and undone."""
    changes = replica.changes()
    yield from part("stage, without decoding", lambda: replica.memory.prepare(changes))
    step, _ = replica.memory.prepare(changes)
    yield from part("commit: the pause that the device adds", step.do)
    yield from part("undo", step.undo)


def _slowed(replica: Replica, device: torch.device) -> float:
    """How many times as long matrix products take while slices are hashed without a pause."""
    size = 4096 if device.type == "cuda" else 64
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))

    def products() -> None:
        for _ in range(50):
            torch.mm(left, right)

    if device.type == "cuda":  # vLLM, too, replays graphs, which do not wait for Python
        graph = torch.cuda.CUDAGraph()
        plain = products
        products()
        with torch.cuda.graph(graph):
            plain()
        products = graph.replay
    alone = _seconds(device, products)
    stop = threading.Event()

    def hash_on() -> None:
        while not stop.is_set():
            replica.memory.recheck()

    thread = threading.Thread(target=hash_on)
    thread.start()
    try:
        return _seconds(device, products, all_streams=False) / alone
    finally:
        stop.set()
        thread.join()


def _profiled(part: str, work: Callable[[], object]) -> Rows:
    """A row with the operations that take most of the device's time."""
    on_gpu = torch.cuda.is_available()
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        work()
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))
    named = (f"{e.key[:60]} {getattr(e, key) / 1e3:.3g} ms ({e.count})" for e in events[:_OPERATIONS])
    yield Row(f"{part}, most of it", "; ".join(named))


def _seconds(device: torch.device, work: Callable[[], object], *, all_streams: bool = True) -> float:
    """Median seconds until the device has done all its work (or that of this stream), after a warm-up."""

    def wait() -> None:
        if device.type == "cuda" and all_streams:
            torch.cuda.synchronize(device)
        elif device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    measured = []
    for _ in range(_REPEATS + 1):
        wait()
        started = time.perf_counter()
        work()
        wait()
        measured.append(time.perf_counter() - started)
    return statistics.median(measured[1:])
