"""What the owner told a replica: written by the dashboard's controls, obeyed by the follower's thread."""

from __future__ import annotations

import threading

from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest
from inference_space.dashboard.controls import Following


class Orders:
    """The dashboard's `Controls`; each takes effect at the follower's next turn."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self.paused = False
        self.pinned: Manifest | None = None
        self.rejoining = threading.Event()

    def following(self) -> Following:
        """What the replica follows now."""
        pinned = self.pinned
        return Following(paused=self.paused, pinned=pinned.version if pinned else None)

    def pause(self) -> None:
        """Stay at the version that is served."""
        self.paused, self.pinned = True, None

    def resume(self) -> None:
        """Follow the newest version again."""
        self.paused, self.pinned = False, None

    def pin(self, version: int) -> None:
        """Go to `version` and stay there; raises `ProtocolError` if the run has no such version."""
        self.paused, self.pinned = False, self._reader.find(version)

    def rejoin(self) -> None:
        """Fetch everything anew and start vLLM again."""
        self.rejoining.set()
