"""Simulated time: threads are tasks that take turns, and time passes only while all of them wait.

`Clock.threading` and `Clock.time` take the place of the modules with these names in a module of the library,
so its code runs as it is. A task runs until it calls a function of this module that waits.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet  # installed as a requirement of Playwright

Work = Callable[[], object]


class _Alarm:
    """Work to do at some moment; without `work` it is off."""

    __slots__ = ("work",)

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work


class Task(greenlet):
    """A simulated thread. `owner` is the machine on which it runs; `alarm` starts or resumes the task."""

    owner: object = None
    alarm: _Alarm | None = None


class Clock:
    """Seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._main = getcurrent()
        self._order = itertools.count()
        self._due: list[tuple[float, int, _Alarm]] = []
        self._tasks = set[Task]()
        named = {name: self._bound(kind) for name, kind in _KINDS.items()}
        self.threading, self.executor = SimpleNamespace(**named), self._bound(Executor)
        self.time = SimpleNamespace(
            time=self.seconds, monotonic=self.seconds, perf_counter=self.seconds, sleep=self.sleep
        )

    def _bound(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: kind(self, *args, **options)

    def seconds(self) -> float:
        """Now."""
        return self.now

    def run(self) -> None:
        """Let time pass until `end`, or until nothing is left to do."""
        while self._due:
            self.now, _, alarm = heapq.heappop(self._due)
            if work := alarm.work:
                alarm.work = None
                work()

    def end(self) -> None:
        """End all tasks."""
        for task in list(self._tasks):
            task.throw(GreenletExit)
        self._due.clear()

    def call(self, seconds: float, work: Work) -> _Alarm:
        """Call `work`, which must not wait, after `seconds`."""
        alarm = _Alarm(work)
        if seconds < math.inf:
            heapq.heappush(self._due, (self.now + seconds, next(self._order), alarm))
        return alarm

    def spawn(self, work: Work, owner: object = None) -> Task:
        """Start a task, by default on the machine of the current one."""

        def whole() -> None:
            try:
                work()
            finally:
                self._tasks.discard(task)

        task = Task(whole, self._main)
        task.owner = owner or getattr(getcurrent(), "owner", None)
        self._tasks.add(task)
        task.alarm = self.call(0.0, task.switch)
        return task

    def kill(self, owner: object) -> None:
        """End all tasks of a machine."""
        for task in [task for task in self._tasks if task.owner is owner]:
            if task.alarm:
                task.alarm.work = None
            self.call(0.0, lambda task=task: task.throw(GreenletExit))

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.park([], seconds)

    def park(self, waiting: list[_Alarm], seconds: float = math.inf) -> None:
        """Let the current task wait until a call of `wake(waiting)`, at most for `seconds`."""
        task = getcurrent()
        assert isinstance(task, Task), "only a task can wait"
        task.alarm = alarm = self.call(seconds, task.switch)
        waiting.append(alarm)
        self._main.switch()
        if alarm in waiting:
            waiting.remove(alarm)

    def wake(self, waiting: list[_Alarm]) -> None:
        """Resume all tasks that wait in this list."""
        for alarm in waiting:
            if work := alarm.work:
                alarm.work = None
                self._rearm(work)
        waiting.clear()

    def _rearm(self, work: Work) -> None:
        task = work.__self__  # type: ignore[attr-defined] # `work` is the method `switch` of a task
        task.alarm = self.call(0.0, work)


class Condition:
    """As `threading.Condition`: its holder may enter it again, and lets others in while it waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting = list[_Alarm]()
        self._entering = list[_Alarm]()
        self._holder: object = None
        self._depth = 0

    def __enter__(self) -> None:
        while self._depth and self._holder is not getcurrent():
            self._clock.park(self._entering)
        self._holder = getcurrent()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._clock.wake(self._entering)

    def wait_for(self, done: Callable[[], Any], timeout: float | None = None) -> Any:
        """As in `threading.Condition`."""
        end = math.inf if timeout is None else self._clock.now + timeout
        while not (result := done()) and (left := end - self._clock.now) > 0:
            # 0: an `Event` waits without being held
            depth = self._depth
            self._depth = 0
            self._clock.wake(self._entering)
            try:
                self._clock.park(self._waiting, left)
                while self._depth and depth:
                    self._clock.park(self._entering)
            finally:
                if depth:
                    self._holder = getcurrent()
                    self._depth = depth
        return result

    def notify_all(self) -> None:
        """As in `threading.Condition`."""
        self._clock.wake(self._waiting)


class Event(Condition):
    """As `threading.Event`."""

    _set = False

    def is_set(self) -> bool:
        """As in `threading.Event`."""
        return self._set

    def set(self) -> None:
        """As in `threading.Event`."""
        self._set = True
        self.notify_all()

    def clear(self) -> None:
        """As in `threading.Event`."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """As in `threading.Event`."""
        return bool(self.wait_for(self.is_set, timeout))


class Lock(Condition):
    """As `threading.Lock`."""

    _held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock. Returns False if it is held and `blocking` is False."""
        while self._held and blocking:
            self._clock.park(self._waiting)
        taken = not self._held
        self._held = True
        return taken

    def release(self) -> None:
        """Give the lock back."""
        self._held = False
        if self._waiting:
            self.notify_all()


class Thread(Event):
    """As `threading.Thread`. As an `Event`, the thread is set once its work has ended."""

    def __init__(self, clock: Clock, *, target: Work, name: str = "", daemon: bool = True) -> None:
        super().__init__(clock)
        self._target = target

    def start(self) -> None:
        """As in `threading.Thread`."""
        self._clock.spawn(self._run)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self.set()

    def is_alive(self) -> bool:
        """As in `threading.Thread`."""
        return not self.is_set()

    def join(self, timeout: float | None = None) -> None:
        """As in `threading.Thread`."""
        self.wait(timeout)


class Future(Event):
    """As `concurrent.futures.Future`."""

    value: Any = None
    error: Exception | None = None

    def run(self, work: Work) -> None:
        """Do the work, and keep its result or its error."""
        try:
            self.value = work()
        except Exception as error:  # noqa: BLE001 - raised again where the result is wanted
            self.error = error
        self.set()

    def result(self) -> Any:
        """As in `concurrent.futures.Future`."""
        self.wait()
        if self.error:
            raise self.error
        return self.value


class Executor:
    """As `ThreadPoolExecutor`."""

    def __init__(self, clock: Clock, threads: int, name: str = "") -> None:
        self._clock = clock
        self._free = threads
        self._queue = deque[tuple[Future, Work]]()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlike `ThreadPoolExecutor`, do not wait for work that is left."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future:
        """As in `ThreadPoolExecutor`."""
        future = Future(self._clock)
        self._queue.append((future, lambda: work(*args)))
        if self._free:
            self._free -= 1
            self._clock.spawn(self._serve)
        return future

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """As in `ThreadPoolExecutor`: after an error, nothing further begins."""
        futures = [self.submit(work, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        finally:
            self._queue.clear()

    def _serve(self) -> None:
        while self._queue:
            future, work = self._queue.popleft()
            future.run(work)
        self._free += 1


class Pipe:
    """A line whose transfers share `rate` bytes per second evenly. A transfer gets at most `each` of them."""

    def __init__(self, clock: Clock, rate: float, each: float = math.inf) -> None:
        self._clock = clock
        self._rate = rate
        self._each = each
        # `_done` is the number of bytes that an endless transfer would have got so far. A transfer ends when
        # `_done` has grown by its size. The first number in `_flows` is the value of `_done` at this end.
        self._flows: list[tuple[float, int, list[_Alarm]]] = []
        self._done = 0.0
        self._at = 0.0
        self._order = itertools.count()
        self._timer: _Alarm | None = None

    def send(self, size: float) -> None:
        """Wait until this many bytes are transferred."""
        self._move()
        waiting = list[_Alarm]()
        flow = (self._done + size, next(self._order), waiting)
        heapq.heappush(self._flows, flow)
        self._plan()
        try:
            self._clock.park(waiting)
        except GreenletExit:
            self._move()
            self._flows.remove(flow)
            heapq.heapify(self._flows)
            self._plan()
            raise

    def _speed(self) -> float:
        return min(self._each, self._rate / max(len(self._flows), 1))

    def _move(self) -> None:
        self._done += (self._clock.now - self._at) * self._speed()
        self._at = self._clock.now

    def _plan(self) -> None:
        if self._timer:
            self._timer.work = None
        if self._flows:
            left = max(self._flows[0][0] - self._done, 0.0) / self._speed()
            self._timer = self._clock.call(left, self._arrive)

    def _arrive(self) -> None:
        self._move()
        # The timer was set for the end of the first transfer, but a rounding error may keep `_done` below it.
        self._done = max(self._done, self._flows[0][0])
        while self._flows and self._flows[0][0] <= self._done:
            self._clock.wake(heapq.heappop(self._flows)[2])
        self._plan()


class Group:
    """The processes of a trainer that talk to each other. Messages take no time."""

    def __init__(self, clock: Clock, size: int) -> None:
        self.size = size
        self._clock = clock
        self._rounds: dict[int, tuple[Event, dict[int, Any]]] = {}  # by the number of the round

    def exchange(self, number: int, rank: int, message: Any) -> list[Any]:
        """The messages of all ranks in this round, once all have given one."""
        ready, said = self._rounds.setdefault(number, (Event(self._clock), {}))
        said[rank] = message
        if len(said) == self.size:
            del self._rounds[number]
            ready.set()
        ready.wait()
        return [said[rank] for rank in range(self.size)]


_KINDS = {"Condition": Condition, "Event": Event, "Lock": Lock, "Thread": Thread}
