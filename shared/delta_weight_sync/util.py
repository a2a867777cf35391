"""Work on several cores, guards for code that only watches, and quantities as people read them."""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from delta_weight_sync.errors import FolderError

Job = TypeVar("Job")
Result = TypeVar("Result")


def threads(cores: int) -> int:
    """Number of threads to use on a machine with `cores` cores. The trainer or vLLM needs the other cores."""
    return min(16, max(1, cores // 2))


THREADS = threads(len(os.sched_getaffinity(0)))


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that raises nothing, although a filter of the user's may: for code that must go on."""

    def __init__(self, name: str = "delta_weight_sync") -> None:
        super().__init__(logging.getLogger(name))

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """As in `LoggerAdapter`. The line names the caller's file, not this one."""
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, stacklevel=2, **options)


_log = SafeLogger()


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
    pool = ThreadPoolExecutor(threads)
    running = deque[Future[Result]]()
    try:
        for job in jobs:
            running.append(pool.submit(work, job))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists. Raises `FolderError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FolderError(f"{folder} is a file, or lies in one: name a folder") from None
    except PermissionError as error:
        raise FolderError(f"{folder} may not be made ({error}): name another folder") from None


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
        number = number / 1000
        step += 1
    return f"{number:.3g} {names[step]}".rstrip()
