"""Reading a GPU's memory beside what is queued there."""

from __future__ import annotations

import torch

from delta_weight_sync.device.launches import read


class Aside:
    """Reads on a stream of its own: behind the last write, not behind what training queued since."""

    def __init__(self, device: torch.device) -> None:
        """On a machine without a GPU there is no stream, and nothing to wait for."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._written: torch.cuda.Event | None = None

    def wrote(self) -> None:
        """Later reads wait for what was launched so far on the caller's stream."""
        if self._stream:
            self._written = torch.cuda.current_stream(self._stream.device).record_event()

    def read(self, memory: torch.Tensor) -> torch.Tensor:
        """A copy on the host."""
        with torch.cuda.stream(self._stream):
            if self._stream and self._written:
                self._stream.wait_event(self._written)
            return read(memory)
