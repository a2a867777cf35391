"""How much a second thread helps with a sync of the Qwen3-0.6B-shaped set, by the wall's clock."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import deltas
from bench.model import Model, Reader
from bench.results import SCRATCH, Results
from delta_weight_sync import codec, util
from delta_weight_sync.codec import Encoding

_LEVELS: tuple[Encoding, ...] = ("fast", "small")
_ROUNDS = 5


def run(results: Results) -> dict[str, Any]:
    """Times as fast with two threads as with one: the median of the ratios within each round."""
    change, path = deltas.qwen(), SCRATCH / "threads.safetensors"
    faster = {}
    for encoding in _LEVELS:
        path.write_bytes(change.encode(encoding))
        works = {
            f"encode {encoding}": lambda encoding=encoding: change.encode(encoding),
            f"decode {encoding}": lambda: list(
                codec.Delta(path).patches(change.shapes, change.old.__getitem__)
            ),
        }
        faster |= {name: _ratio(work) for name, work in works.items()}
    model = Model(change)
    reader = Reader(model)
    faster["diff bf16"] = _ratio(model.diff)
    model.to_fp32()
    faster["diff fp32"] = _ratio(model.diff)
    reader.patches = change.patches
    reader.stage()
    faster |= {"stage": _ratio(reader.stage), "commit": _ratio(reader.commit)}
    return {"times_as_fast_with_two": faster}


def _ratio(work: Callable[[], object]) -> float:
    ratios = [_seconds(work, 1) / _seconds(work, 2) for _ in range(_ROUNDS + 1)]
    return round(statistics.median(ratios[1:]), 2)


def _seconds(work: Callable[[], object], threads: int) -> float:
    util.THREADS = threads
    torch.set_num_threads(threads)
    started = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - started
    del result  # freeing it is not part of the work
    return elapsed
