"""What a replica was told to follow: any version that is published, or one of them."""

from __future__ import annotations

import threading

from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest


class Orders:
    """Written by any thread, obeyed by the follower's at its next turn."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self.paused = False
        self.pinned: Manifest | None = None
        self.healing = threading.Event()

    def pause(self) -> None:
        """Stay at the version that is served."""
        self.paused, self.pinned = True, None

    def resume(self) -> None:
        """Follow the newest version again, whatever was told before."""
        self.paused, self.pinned = False, None

    def pin(self, version: int) -> None:
        """Go to `version` and stay there; raises `ProtocolError` if the run has no such version."""
        self.paused, self.pinned = False, self._reader.find(version)

    def held(self, served: Manifest | None) -> Manifest | None:
        """The version to serve whatever the newest is, if there is one; `served` was served last."""
        return served if self.paused else self.pinned

    def heal(self) -> None:
        """Compare all weights with those that are published, and write what differs."""
        self.healing.set()
