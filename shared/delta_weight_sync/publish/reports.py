"""Logs each published version, and what all ranks have sent and requested so far; tells the user's function.

A failure here is logged once, and stops no version.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Final

from delta_weight_sync.publish.writer import PartWriter
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import Event, RunLogWriter, sync_event, traffic_event
from delta_weight_sync.store.ledger import Kind, Traffic, merged
from delta_weight_sync.util import Guard, SafeLogger

_CLOSING_S: Final = 5.0
_log = SafeLogger()
Counts = Mapping[Kind, Traffic]  # what a rank has sent and requested, by kind


class Reports:
    """What the outbox of a rank reports. Only rank 0 has a `log`; the other ranks only count."""

    def __init__(self, writer: PartWriter, log: RunLogWriter | None) -> None:
        self._writer = writer
        self._log = log
        self._since = time.time()
        self._anchor = writer.newest.anchor.version if writer.newest else -1  # version of the newest anchor
        self._others: Sequence[Counts] = ()  # what other ranks had sent and requested at the newest version
        self._guard = Guard("the log of a published version")

    def counts(self) -> Counts:
        """What this rank has sent and requested so far."""
        with self._guard:
            return self._writer.bucket.ledger.counts()
        return {}

    def version(
        self,
        manifest: Manifest,
        others: Sequence[Counts],
        *,
        handed_over: float,
        diff_s: float,
        encode_s: float,
    ) -> None:
        """Log a version that is in the bucket.

        Args:
            manifest: Its manifest.
            others: What the other ranks have sent and requested.
            handed_over: When the trainer handed over its weights, in unix seconds.
            diff_s: How long the trainer waited until the changes were found.
            encode_s: How long encoding took.
        """
        with self._guard:
            self._append(
                sync_event(
                    manifest,
                    new_anchor=manifest.anchor.version != self._anchor,
                    diff_s=diff_s,
                    encode_s=encode_s,
                    publish_s=time.time() - handed_over,
                )
            )
            self._others = others
            self._traffic(manifest.version)
        self._anchor = manifest.anchor.version

    def close(self) -> None:
        """Log the traffic up to the end."""
        with self._guard:
            self._traffic(self._writer.newest.version if self._writer.newest else None)

    def _traffic(self, version: int | None) -> None:
        counts = merged(self.counts(), *self._others)
        source = str(self._writer.writer)
        self._append(traffic_event(counts, source, self._since, trainer=True, version=version))

    def _append(self, event: Event) -> None:
        if self._log:
            self._log.append(event)


class Listener:
    """Calls the user's `on_version` on a thread of its own, so that publishing never waits for it."""

    def __init__(self, on_version: Callable[[Manifest], object]) -> None:
        self._on_version = on_version
        self._versions = SimpleQueue[Manifest | None]()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="on_version", daemon=True)
        self._thread.start()

    def tell(self, manifest: Manifest) -> None:
        """Call the function with a manifest, after the calls for earlier versions."""
        self._versions.put(manifest)

    def close(self) -> None:
        """Wait a few seconds for the calls that are left, then leave out those that have not begun."""
        self._versions.put(None)
        self._thread.join(_CLOSING_S)
        self._closed = True
        if self._thread.is_alive():
            _log.warning(
                "the function `on_version` runs %.0f s after the end of publishing, so it is not called"
                " for later versions: let it return sooner",
                _CLOSING_S,
            )

    def _run(self) -> None:
        guard = Guard("the function `on_version`")
        while (manifest := self._versions.get()) and not self._closed:
            with guard:
                self._on_version(manifest)
