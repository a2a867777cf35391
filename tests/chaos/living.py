"""A replica with a real vLLM, asked over HTTP; its process is a Space's."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.replica import RUN, Claim
from tests.live.replica import Replica


class Living:
    """Looks like the other parts; what cannot happen to it is not asked of it."""

    def __init__(self, place: Any, folder: Path) -> None:
        self._replica = Replica(place.url, RUN, folder, environ=place.environ)
        self._replica.start()

    @property
    def alive(self) -> bool:
        return psutil.pid_exists(self._replica.pid)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def claim(self) -> Claim | None:
        """Its digest is that of its live weights: each commit reads them back."""
        try:
            status = self._replica.status(1 << 60)["status"]
        except (httpx.HTTPError, OSError):
            return None
        told = status["version"], "", 0, status["digest"] or ""
        return Claim(*told, status["digest"] or "", 1, status["state"], status["error"], ())

    def kill_vllm(self) -> None:
        """-9 to its engine; returns when it is known that it died."""
        engine = next(
            process
            for process in psutil.Process(self._replica.pid).children(recursive=True)
            if "EngineCore" in " ".join([process.name(), *process.cmdline()])
        )
        engine.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (claim := self.claim()) and claim.version is not None:
            assert time.monotonic() < deadline, "it does not notice that its vLLM is dead"
            time.sleep(0.05)

    def close(self) -> None:
        self._replica.stop()
