"""Ends training when its time is over, however few steps it has made; at least one."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback


class TimeLimit(TrainerCallback):
    """Counts from its making; all ranks stop when the first one's time is over."""

    def __init__(self, minutes: float, *, alone: bool) -> None:
        """`minutes`: 0 for no limit."""
        self._until = time.monotonic() + 60 * minutes if minutes else None
        self._alone = alone
        self.over = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after this step if the time is over."""
        if self._until is None:
            return
        over = torch.tensor(int(time.monotonic() >= self._until), device=args.device)
        if not self._alone:
            torch.distributed.all_reduce(over, torch.distributed.ReduceOp.MAX)
        if over:
            self.over = control.should_training_stop = True
