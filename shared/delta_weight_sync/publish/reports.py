"""Logs each published version, and what all ranks have sent and requested so far.

A failure here is logged once, and stops no version.
"""

import time
from collections.abc import Mapping, Sequence

from delta_weight_sync.publish.writer import PartWriter
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import Event, RunLogWriter, sync_event, traffic_event
from delta_weight_sync.store.ledger import Kind, Traffic, merged
from delta_weight_sync.util import Guard

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
