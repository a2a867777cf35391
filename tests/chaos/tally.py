"""What struck, what was survived, how fast: counted, and printed."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict


class Tally:
    """`wrong` and `leaked` are sentences, one for each."""

    def __init__(self, seed: int, deadline: float) -> None:
        self.seed, self.struck, self.survived = seed, 0, 0
        self.wrong: list[str] = []
        self.leaked: list[str] = []
        self._deadline = deadline
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._vllm: list[float] = []
        self._starts: list[float] = []

    def goes_on(self, goal: int) -> bool:
        return self.struck < goal and time.monotonic() < self._deadline

    def vllm_started(self, seconds: float) -> None:
        self._starts.append(seconds)

    def fault(self, kind: str, what: str, seconds: float, notes: list[str], *, vllm: bool) -> None:
        """One was survived: all were at the newest version `seconds` after it had happened."""
        self.struck, self.survived = self.struck + 1, self.survived + 1
        self._seconds[kind].append(seconds)
        if vllm:
            self._vllm.append(seconds)
        told = "; ".join(notes)[:300]
        print(f"{self.struck:4d} {kind}: {what}; {seconds:.2f} s {told}".rstrip(), flush=True)

    def lost(self, kind: str, error: Exception, notes: list[str]) -> None:
        self.struck += 1
        print(f"{self.struck:4d} {kind}: NOT SURVIVED: {error}\n     {'; '.join(notes)[:2000]}")
        print(f"     again: python -m tests.chaos --seed {self.seed}, fault {self.struck}", flush=True)

    def end(self, faults: int) -> bool:
        for kind, seconds in sorted(self._seconds.items()):
            print(f"{kind:32s} {len(seconds):4d} times, median {statistics.median(seconds):6.2f} s")
        if self._vllm:
            print(
                f"a replica with a real vLLM: {len(self._vllm)} times, median {_median(self._vllm)};", end=" "
            )
            print(f"a start of vLLM, {len(self._starts)} times, median {_median(self._starts)}")
        for line in [*self.wrong, *self.leaked]:
            print(line)
        counts = f"wrong {len(self.wrong)} leaked {len(self.leaked)}"
        print(f"faults {self.struck} survived {self.survived} {counts}", flush=True)
        return self.struck == self.survived >= faults and not self.wrong and not self.leaked


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s"
