"""What the trainer hands over at a sync, until it is a version."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Patch
from delta_weight_sync.digest import to_hex
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.publish.past import Past
from delta_weight_sync.publish.replay import Replay
from delta_weight_sync.runlog import SyncEvent


@dataclass(frozen=True)
class PendingUpdate:
    """What one version will hold: patches since the last published one, and the state they lead to."""

    patches: list[Patch]
    digest: int
    sync: int
    created_at: float  # unix seconds
    diff_s: float

    @functools.cached_property
    def by_name(self) -> dict[str, Patch]:
        """The patch of each tensor that changed; a tensor has one at most."""
        return {patch.name: patch for patch in self.patches}

    def then(self, later: PendingUpdate) -> PendingUpdate:
        """Both as one, as if the trainer had made both steps before it handed over."""
        return PendingUpdate(
            codec.merge(self.patches, later.patches),
            later.digest,
            later.sync,
            later.created_at,
            self.diff_s + later.diff_s,
        )

    def event(self, manifest: Manifest, anchor_bytes: int, encode_s: float) -> SyncEvent:
        """The line of the run's log that says what became of it."""
        return SyncEvent(
            t=time.time(),
            version=manifest.version,
            sync=manifest.sync,
            payload_bytes=manifest.deltas[-1].size if manifest.deltas else anchor_bytes,
            anchor_bytes=anchor_bytes,
            full_bytes=manifest.full_bytes,
            changed=manifest.changed,
            total=manifest.total,
            diff_s=self.diff_s,
            encode_s=encode_s,
            publish_s=time.time() - self.created_at,
        )


class Waiting:
    """The hand-overs that are not on their way yet, as one update, but for one that is pinned.

    While a trainer that rose repeats what is in the bucket already they are held back (see `Replay`).
    """

    def __init__(self) -> None:
        self.replay = Replay({})
        self.past: Past | None = None  # of whoever wants earlier bits back
        self.held = False
        self._updates: list[PendingUpdate] = []  # oldest first
        self._pinned: int | None = None

    def __bool__(self) -> bool:
        return bool(self._updates) and not self.held

    def newest_first(self) -> Iterator[PendingUpdate]:
        """All of them, those that are held back as well."""
        return reversed(self._updates)

    def add(self, new: PendingUpdate) -> None:
        """What was handed over just now."""
        if self.past:
            self.past.add(new.sync, new.patches)
        if self._updates and self._updates[-1].digest != self._pinned:
            new = self._updates.pop().then(new)
        self._updates.append(new)
        self.held = self.replay.holds_back(new.sync, to_hex(new.digest))
        if self.held and not any(patch.index.size for patch in new.patches):
            self._updates.clear()  # these are the newest published bits

    def pin(self, digest: int) -> None:
        """What leads to `digest` becomes a version, whatever is handed over after it."""
        self._pinned = digest

    def pop(self) -> PendingUpdate:
        """The oldest."""
        return self._updates.pop(0)

    def put_back(self, job: PendingUpdate) -> None:
        """What could not be published."""
        if self._updates and job.digest != self._pinned:
            job = job.then(self._updates.pop(0))
        self._updates.insert(0, job)


def published_bits(bits: Bits, name: str, pending: Iterable[PendingUpdate | None]) -> Bits:
    """A copy of the tensor's newest bits as they were before `pending`, newest hand-over first."""
    bits = bits.copy()
    for hand_over in filter(None, pending):
        if patch := hand_over.by_name.get(name):
            codec.apply(codec.inverse(patch), bits)
    return bits
