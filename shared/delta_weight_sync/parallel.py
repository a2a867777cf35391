"""Work on several cores at once: the kernels run without the interpreter lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def threads(cores: int) -> int:
    """How many threads for a machine with so many cores: the trainer or vLLM needs the others."""
    return min(16, max(1, cores // 2))


THREADS = threads(len(os.sched_getaffinity(0)))


def in_order(work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """`work(job)` of each job, in the jobs' order, on `THREADS` threads.

    Jobs are made in the caller's thread, one at a time and at most `THREADS` ahead of what was taken. Raises
    what `work` or the making of a job raises; jobs that have not begun are then dropped.
    """
    if THREADS == 1:
        yield from map(work, jobs)
        return
    pool, running = ThreadPoolExecutor(THREADS), deque[Future[Result]]()
    try:
        for job in jobs:
            running.append(pool.submit(work, job))
            if len(running) > THREADS:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
