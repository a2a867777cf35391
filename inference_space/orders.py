"""What the owner told a replica: written by the dashboard's controls, obeyed by the follower's thread."""

from __future__ import annotations

import threading

from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest, ProtocolError, parse
from inference_space.dashboard.controls import Following
from inference_space.dashboard.library import manifests_of


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
        self.paused, self.pinned = False, self._manifest(version)

    def rejoin(self) -> None:
        """Fetch everything anew and start vLLM again."""
        self.rejoining.set()

    def _manifest(self, version: int) -> Manifest:
        """One listing finds it, however long the run is; HEAD's chain would be walked version by version.

        The replica proves by the digest of its live weights that it is the published version.
        """
        bucket, keys = self._reader.bucket, self._reader.keys
        head = self._reader.head()
        info = manifests_of(bucket.list(f"{keys.folder}manifests/")).get(version)
        if head is None or info is None or version > head.version:
            newest = f"its newest is version {head.version}" if head else "it has none yet"
            raise ProtocolError(f"run {keys.run!r} has no version {version}, {newest}")
        return parse(Manifest, bucket.get(info.key), info.key)
