"""How much a second thread helps to encode and decode the Qwen3-0.6B-shaped set, by the wall's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from bench import deltas
from bench.results import SCRATCH, Results
from shared import codec
from shared.codec import Level, parallel

_LEVELS: tuple[Level, ...] = ("fast", "small")
_ROUNDS, _COUNTS = 5, (1, 2)


def run(results: Results) -> dict[str, Any]:
    """Times as fast with two threads as with one: the median of the ratios within each round."""
    change, path = deltas.qwen(), SCRATCH / "threads.safetensors"
    faster = {}
    for level in _LEVELS:
        path.write_bytes(change.encode(level))
        works = {
            f"encode {level}": lambda level=level: change.encode(level),
            f"decode {level}": lambda: list(codec.Delta(path).patches(change.shapes, change.old.__getitem__)),
        }
        faster |= {name: _ratio(work) for name, work in works.items()}
    return {"times_as_fast_with_two": faster}


def _ratio(work: Callable[[], object]) -> float:
    ratios = []
    for _ in range(_ROUNDS + 1):
        alone, together = (_seconds(work, count) for count in _COUNTS)
        ratios.append(alone / together)
    return round(statistics.median(ratios[1:]), 2)


def _seconds(work: Callable[[], object], threads: int) -> float:
    before, parallel.THREADS = parallel.THREADS, threads
    started = time.perf_counter()
    try:
        result = work()
        return time.perf_counter() - started
    finally:
        parallel.THREADS = before
        del result
