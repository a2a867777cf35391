"""How the trainer ends when it is asked to: by SIGTERM, as a preempted machine is, or by Ctrl-C.

A step that has begun is finished first, since the weights in the middle of one are nobody's; after that there
is time to publish what is pending and to save the state. A step that takes too long is given up.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from transformers import TrainerCallback

GRACE_S = 10.0  # for the step that has begun
BOUND_S = 30.0  # from the request to the end
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Ending(TrainerCallback):
    """Hears the request; as the last of TRL's callbacks it ends training after a step, on all ranks alike.

    Outside of a step the request is a `KeyboardInterrupt` at once, in a trainer of one process. A second
    request changes nothing.
    """

    def __init__(self, *, alone: bool) -> None:
        self.signal = 0  # which was heard
        self._alone, self._in_step, self._deadline = alone, False, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        handlers: dict[int, Callable[..., None]] = dict.fromkeys(_SIGNALS, self._hear)
        for sign, handler in (handlers | {signal.SIGALRM: self._give_up}).items():
            self._before[sign] = signal.signal(sign, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for sign, handler in self._before.items():
            signal.signal(sign, handler)

    @property
    def name(self) -> str:
        """Of the signal that was heard."""
        return signal.Signals(self.signal).name

    @property
    def left_s(self) -> float:
        """Seconds until the trainer must have ended; at least one."""
        return max(1.0, self._deadline - time.monotonic())

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Ends the block quietly where the request interrupts it; after that only the bound does."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.signal:
                raise
        self._in_step = True
        signal.setitimer(signal.ITIMER_REAL, self.left_s if self.signal else 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """From here to the end of the step the weights change."""
        self._in_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if any rank was asked to."""
        self._in_step = False
        if self._any_asked(args.device):
            control.should_training_stop = True

    def _any_asked(self, device: torch.device) -> bool:
        if self._alone:
            return bool(self.signal)
        asked = torch.tensor(self.signal, device=device)
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        if asked and not self.signal:  # by a signal to another rank
            self._note(int(asked))
        return bool(self.signal)

    def _note(self, sign: int) -> None:
        self.signal, self._deadline = sign, time.monotonic() + BOUND_S

    def _hear(self, sign: int, _: object) -> None:
        if self.signal:
            return
        self._note(sign)
        if self._alone and not self._in_step:
            raise KeyboardInterrupt(sign)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _give_up(self, *_: object) -> None:
        raise KeyboardInterrupt(self.signal)
