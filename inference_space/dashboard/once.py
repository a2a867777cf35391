"""Answers that are worked out once, however many viewers ask, and kept while there is room."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from delta_weight_sync.codec import CodecError
from delta_weight_sync.refs import ProtocolError

FAILED_S = 300.0  # a damaged object may be mended: after so long it is read again

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")


class Once(Generic[Question, Answer]):
    """One question at a time, and the first answer to each; "it is damaged" is one, too."""

    def __init__(
        self,
        work: Callable[[Question], Answer],
        room: int,
        weigh: Callable[[Answer], int] = lambda _: 1,
        drop: Callable[[Answer], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keeps answers that `weigh` at most `room` together; `drop` is told of those that go."""
        self._work, self._room, self._weigh, self._drop, self._clock = work, room, weigh, drop, clock
        self._kept: OrderedDict[Question, tuple[Answer, int]] = OrderedDict()
        self._failed: OrderedDict[Question, tuple[Exception, float]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, question: Question) -> Answer:
        """Raises what `work` raised; `ProtocolError` and `CodecError` again and again, without the work."""
        with self._lock:
            if question not in self._kept:
                self._forget_failures()
                if failed := self._failed.get(question):
                    raise failed[0].with_traceback(None)
                self._kept[question] = self._answer(question)
            self._kept.move_to_end(question)
            answer = self._kept[question][0]
            self._make_room()
            return answer

    def _answer(self, question: Question) -> tuple[Answer, int]:
        try:
            answer = self._work(question)
        except (ProtocolError, CodecError) as error:
            self._failed[question] = error.with_traceback(None), self._clock()
            raise
        return answer, self._weigh(answer)

    def _make_room(self) -> None:
        """The newest answer stays, whatever it weighs."""
        while len(self._kept) > 1 and sum(weight for _, weight in self._kept.values()) > self._room:
            self._drop(self._kept.popitem(last=False)[1][0])

    def _forget_failures(self) -> None:
        since = self._clock() - FAILED_S
        while self._failed and (next(iter(self._failed.values()))[1] < since or len(self._failed) > 1024):
            self._failed.popitem(last=False)
