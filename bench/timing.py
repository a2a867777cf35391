"""Clocks: competitors take turns, so that whatever disturbs the machine disturbs all of them alike.

Seconds are those that the processor worked for this process (on one thread), not those on the wall: on a
machine that others use too, the wall's clock mostly counts waiting for them. Each section of results.json
says how far the two were apart.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Work = Callable[[], object]
Rounds = dict[str, list[float]]


def seconds(work: Work) -> float:
    """Processor seconds of `work`."""
    started = time.process_time()
    result = work()
    elapsed = time.process_time() - started
    del result  # freeing it is not part of the work
    return elapsed


def take_turns(
    competitors: Mapping[str, Work], repeats: int, before_round: Callable[[], object] = lambda: None
) -> Rounds:
    """Seconds of each competitor in each of `repeats` rounds, after a round that warms up."""
    rounds: Rounds = {name: [] for name in competitors}
    for _ in range(repeats + 1):
        before_round()
        for name, work in competitors.items():
            rounds[name].append(seconds(work))
    return {name: measured[1:] for name, measured in rounds.items()}


def added(rounds: Rounds, parts: Sequence[str]) -> list[float]:
    """Seconds of several parts together, round by round."""
    return [sum(together) for together in zip(*(rounds[part] for part in parts), strict=True)]


def summary(measured: Sequence[float], model_bytes: int) -> dict[str, float]:
    """Best and median seconds, and the gigabytes of bf16 model per second of both."""
    best = min(measured)
    median = statistics.median(measured)
    return {
        "best_s": round(best, 4),
        "median_s": round(median, 4),
        "best_gb_s": round(model_bytes / best / 1e9, 3),
        "median_gb_s": round(model_bytes / median / 1e9, 3),
    }


def ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, float]:
    """How many times as fast: of the best rounds, and the median of the ratios within each round."""
    each = [a / b for a, b in zip(slower, faster, strict=True)]
    return {"best": round(min(slower) / min(faster), 2), "median": round(statistics.median(each), 2)}
