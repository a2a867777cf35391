"""Host time of a sync for a few large tensors and for many small ones, with equally many changes.

    python -m bench.stage_many

It is the processor time of one thread: the median of seven rounds. One weight in a hundred changes. All
weights lie in one array, as those of a mixture of experts do. "publish" is the processor time of a whole sync
of a trainer on a CPU, from hand-over to HEAD in a local bucket: the median of six.
"""

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bench.model import memory_of
from delta_weight_sync import Publisher, codec, util
from delta_weight_sync.vllm import memory

FEW, MANY = 300, 18_867  # tensors of a dense model, and of Qwen3-30B-A3B
CHANGES = (386_000, 1_000_000, 3_000_000)


def milliseconds(tensors: int, changes: int) -> dict[str, float]:
    """The median of each part of a sync."""
    rng, count = np.random.default_rng(0), changes // tensors
    names = [f"model.layers.{i % 48}.mlp.experts.{i}.up_proj.weight" for i in range(tensors)]
    weights, shape = torch.ones(tensors * count * 100, dtype=torch.bfloat16), (count * 100,)
    table, live = memory_of(dict(zip(names, weights.split(*shape), strict=True)))
    shapes, old, spread = dict.fromkeys(names, shape), np.zeros(shape, np.uint16), 100 * np.arange(count)
    patches = []
    for name in names:
        ulps = rng.choice(np.array([1, 65535], np.uint16), count)
        patches.append(codec.Patch(name, shape, spread + rng.integers(0, 100, count), ulps))
    times: dict[str, list[float]] = {}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        started = time.thread_time()
        result = work()
        times.setdefault(part, []).append(1e3 * (time.thread_time() - started))
        return result

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "delta")
        for _ in range(2):
            encoded = timed("encode", lambda: codec.encode(patches, lambda _: old, base=0, version=1))
        path.write_bytes(encoded)
        for _ in range(7):
            delta = timed("header", lambda: codec.Delta(path))
            decoded = timed("decode", lambda: [*delta.decode(shapes, lambda _: old)])  # noqa: B023
            found = timed("find", lambda: memory.find(decoded, [table])[0])  # noqa: B023
            step, _ = timed("prepare", lambda: live.prepare(found))  # noqa: B023
            timed("commit", step.do)
            step.undo()
    return {part: statistics.median(each) for part, each in times.items()} | {"encode": min(times["encode"])}


def published(tensors: int, changes: int) -> float:
    """The median seconds of processor time that publishing a version takes, with float32 weights."""
    rng, count = np.random.default_rng(0), changes // tensors
    weights = torch.ones(tensors, count * 100)
    names = [f"model.layers.{i % 48}.mlp.experts.{i}.up_proj.weight" for i in range(tensors)]
    parameters, times = list(zip(names, weights, strict=True)), []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        base = Path(folder, "base")
        base.mkdir()
        Path(base, "config.json").write_text("{}")
        save_file({name: tensor.bfloat16() for name, tensor in parameters}, base / "model.safetensors")
        url, ended = f"file://{folder}/bucket#run", list[float]()
        options = {"on_version": lambda _: ended.append(time.process_time())}
        publisher = stack.enter_context(Publisher(url, base=base, **options))
        publisher.publish(parameters, step=0)
        publisher.flush()
        for step in range(1, 8):
            changed = torch.from_numpy(100 * np.arange(count) + rng.integers(0, 100, (tensors, count)))
            weights.scatter_(1, changed, weights.gather(1, changed) * 1.01)
            started = time.process_time()
            publisher.publish(parameters, step)
            publisher.flush()
            times.append(ended[-1] - started)
            while (busy := time.process_time()) and not time.sleep(0.3) and time.process_time() - busy > 0.02:
                pass  # jumps are made in the background
    return statistics.median(times[1:])  # the first compiles and reserves memory


if __name__ == "__main__":
    util.THREADS = 1
    torch.set_num_threads(1)
    gc.freeze()  # as a trainer does after its start
    for changes in (600_000, 6_000_000):
        few, many = (published(tensors, changes) for tensors in (FEW, MANY))
        each = f"{FEW} tensors {few:.2f} s, {MANY} {many:.2f} s"
        print(f"publish, {changes} changes: {each}, {many / few:.2f} times", flush=True)
    for changes in CHANGES:
        sums = []
        for tensors in (FEW, MANY):
            times = milliseconds(tensors, changes)
            sums.append(sum(times.values()) - times["encode"])
            parts = ", ".join(f"{part} {each:.1f}" for part, each in times.items())
            print(f"{tensors} tensors, {changes} changes: replica {sums[-1]:.1f} ms; {parts}", flush=True)
        print(f"replica: {sums[1] / sums[0]:.2f} times", flush=True)
