"""What there is to ask of a GPU. Kernels of tests run on tensors of the host, where it has no answer."""

from __future__ import annotations

import sys

import torch


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody has taken."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else sys.maxsize


class Clock:
    """How long the device works, from here on its current stream until `stop`."""

    def __init__(self, device: torch.device) -> None:
        timed = device.type == "cuda"
        self._events = [torch.Event(device, enable_timing=True) for _ in range(2)] if timed else []
        self._record(0)

    def stop(self) -> None:
        """The work that is measured ends here."""
        self._record(1)

    def seconds(self) -> float:
        """To be asked when the work has ended."""
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else 0.0

    def _record(self, event: int) -> None:
        if self._events:
            self._events[event].record()
