"""Stops training cleanly: when its time is up, on SIGTERM, or on Ctrl-C.

The step in progress is finished first, because weights in the middle of a step belong to no version. Then
`train` publishes what is pending and saves the state. A step that takes too long is abandoned. The
process ends even if a store does not answer.
"""

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from typing import Any, Self

import torch
from transformers import TrainerCallback

from delta_weight_sync.ending import end_in

GRACE_S = 10.0  # time to finish the step in progress
LIMIT_S = 24.0  # time to finish everything, counted from the signal
END_S = 28.0  # after this time from the signal, the process ends, even if its threads still work


class Stop(TrainerCallback):
    """Handles signals and the time limit (`minutes`; 0: none). Must be the trainer's last callback.

    If the trainer has only one process (`alone`), a signal between two steps raises `KeyboardInterrupt`
    immediately. In all other cases, all ranks finish the same step first. A second signal has no effect.
    """

    def __init__(self, minutes: float, *, alone: bool) -> None:
        self.signal = 0  # the signal that was received
        self.out_of_time = False
        self._until = time.monotonic() + 60 * minutes if minutes else math.inf
        self._alone = alone
        self._in_step = False
        self._deadline = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        handlers = {signal.SIGTERM: self._receive, signal.SIGINT: self._receive}
        for number, handler in (handlers | {signal.SIGALRM: self._interrupt}).items():
            self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def left_s(self) -> float:
        """Seconds left to finish everything after a signal, at least 1."""
        return max(1.0, self._deadline - time.monotonic())

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal ends the `with` block without an exception. After the block, a signal does not interrupt
        immediately, but starts a timer. The timer interrupts if the work after the block takes too long."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.signal:
                raise
        self._in_step = True
        signal.setitimer(signal.ITIMER_REAL, self.left_s if self.signal else 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._in_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._in_step = False
        found = [self.signal, int(time.monotonic() >= self._until)]
        if not self._alone:  # if a rank must stop, all stop
            shared = torch.tensor(found, device=args.device)
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
            found = shared.tolist()
        self.out_of_time = bool(found[1])
        if found[0]:
            if not self.signal:  # another rank received the signal
                self._note(found[0])
            signal.setitimer(signal.ITIMER_REAL, self.left_s)
        if any(found):
            control.should_training_stop = True
        # At the end of training, `SaveState` still makes the last sync. A signal must not interrupt this sync
        # immediately, so it counts as part of the step.
        self._in_step = control.should_training_stop

    def _note(self, number: int) -> None:
        self.signal = number
        self._deadline = time.monotonic() + LIMIT_S
        end_in(END_S, 128 + number)

    def _receive(self, number: int, _: object) -> None:
        if not self.signal:
            self._note(number)
            if self._alone and not self._in_step:
                raise KeyboardInterrupt(number)
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _interrupt(self, *_: object) -> None:
        raise KeyboardInterrupt(self.signal)
