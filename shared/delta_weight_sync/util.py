"""Compiled functions, work on several cores, proxies, and quantities as people read them."""

import contextlib
import ipaddress
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

_log = logging.getLogger("delta_weight_sync")
Function = TypeVar("Function", bound=Callable[..., Any])
Job = TypeVar("Job")
Result = TypeVar("Result")


def kernel(function: Function, **options: Any) -> Function:
    """Compile `function` with numba (and its `options`) at its first call, and run it without the GIL.

    numba caches the code on disk. If it finds no folder that it may write, each process compiles again.
    """
    from numba import njit  # imported here, because not every command needs it

    try:
        return cast(Function, njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # "no locator available": neither this package's folder nor the home can be written
        return cast(Function, njit(nogil=True, **options)(function))


def threads(cores: int) -> int:
    """Number of threads to use on a machine with `cores` cores. The trainer or vLLM needs the other cores."""
    return min(16, max(1, cores // 2))


THREADS = threads(len(os.sched_getaffinity(0)))


class Guard:
    """Keeps code that only watches, such as a log or a user's callback, from stopping what works.

        with self._guard:
            on_version(manifest)

    An exception in the block is logged once, with its cause, and then ends there. In the main thread, Ctrl-C,
    `sys.exit` and a cancelled task still end the program. In any other thread they would end only the thread,
    so they end here, too.
    """

    _MOST: Final = 64  # different messages that are logged

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged: set[str] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            return False
        text = type(error).__name__
        with contextlib.suppress(Exception):  # an error of the user's own class may have no text
            text = f"{text}: {error}"
        if text not in self._logged and len(self._logged) < self._MOST:
            self._logged.add(text)
            with contextlib.suppress(Exception):  # nor may a filter of the user's logging end the run
                _log.warning("%s failed (%s); the run goes on without it", self._what, text)
                _log.debug("%s failed", self._what, exc_info=error)
        return True


def in_order(work: Callable[[Job], Result], jobs: Iterable[Job], threads: int = 0) -> Iterator[Result]:
    """Yield `work(job)` of each job in order, computed on `threads` threads (0: on `THREADS`).

    `jobs` is read in the caller's thread, at most `threads` jobs ahead of the result that is yielded next.
    Exceptions of `work` and `jobs` pass through; jobs that have not begun are then dropped.
    """
    threads = threads or THREADS
    if threads == 1:
        yield from map(work, jobs)
        return
    pool, running = ThreadPoolExecutor(threads), deque[Future[Result]]()
    try:
        for job in jobs:
            running.append(pool.submit(work, job))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def in_parts(work: Callable[[slice], Result], count: int, least: int) -> list[Result]:
    """Call `work` in threads, on up to `THREADS` slices of `range(count)`. Return the results in order.
    If there are several slices, each slice has at least `least` items."""
    parts = min(THREADS, max(1, count // least))
    cuts = [count * part // parts for part in range(parts + 1)]
    return [*in_order(work, map(slice, cuts, cuts[1:]), parts)]


def swap(outgoing: Sequence[Any], sizes: Sequence[int], group: Any) -> Any:
    """Send `outgoing[i]` (a numpy array) to process i of a torch group. Returns the received arrays, joined.

    `sizes[i]` is the length of the array that process i sends to this one. All arrays have the same dtype.
    """
    import numpy as np  # imported here, because not every command needs them
    import torch
    from torch.distributed import all_to_all_single

    sent, sent_bytes = np.concatenate(outgoing), [each.nbytes for each in outgoing]
    received, received_bytes = np.empty(sum(sizes), sent.dtype), [size * sent.itemsize for size in sizes]
    target, source = (torch.from_numpy(array.view(np.uint8)) for array in (received, sent))
    all_to_all_single(target, source, received_bytes, sent_bytes, group=group)
    return received


def is_near(url: str) -> bool:
    """Whether a URL names this machine or a private network, which the environment's proxy cannot reach."""
    host = ""
    try:
        host = urlsplit(url).hostname or ""
        address = ipaddress.ip_address(host)
    except ValueError:  # the host is a name, or this is no URL
        return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))
    return address.is_private or address.is_loopback or address.is_link_local


def proxy_for(url: str) -> str:
    """The environment's variable with a proxy for `url`, in lower case; "" if there is none."""
    variables = f"{urlsplit(url).scheme}_proxy", "all_proxy"
    return next((each for each in variables if os.environ.get(each) or os.environ.get(each.upper())), "")


def size_text(size: float) -> str:
    """A number of bytes, in powers of 1000: `8.9 GB`."""
    return _scaled(size, ("B", "KB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """A number of weights: `596 M`, `1 T`."""
    return _scaled(count, ("", "K", "M", "B", "T"))


def time_text(seconds: float) -> str:
    """A span of time: `12 ms`, `3.4 s`, `5.6 min`, `2.1 h`."""
    for limit, unit, name in ((0.9995, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 999.5 else f"{hours:.0f} h"


def _scaled(number: float, names: tuple[str, ...]) -> str:
    step = 0
    while number >= 999.5 and step < len(names) - 1:
        number, step = number / 1000, step + 1
    return f"{number:.3g} {names[step]}".rstrip()
