"""Shortcuts that wait for a manifest to name them."""

from __future__ import annotations

import threading
from typing import NamedTuple

from delta_weight_sync.refs import AnchorRef, DeltaRef


class Offer(NamedTuple):
    """What is there at one time."""

    jumps: tuple[DeltaRef, ...] = ()
    anchor: AnchorRef | None = None


class Offers:
    """Jumps and an anchor that are in the bucket, until a version that names them is real.

    They come from a thread beside the one that publishes. What that version had no use for is gone, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jumps: tuple[DeltaRef, ...] = ()
        self._anchor: AnchorRef | None = None

    def now(self) -> Offer:
        """What is there."""
        with self._lock:
            return Offer(self._jumps, self._anchor)

    def add_jump(self, jump: DeltaRef) -> None:
        """One more."""
        with self._lock:
            self._jumps += (jump,)

    def add_anchor(self, anchor: AnchorRef) -> None:
        """In place of one that was offered before."""
        with self._lock:
            self._anchor = anchor

    def take(self, offer: Offer) -> None:
        """The version is real that was decided when this was there."""
        with self._lock:
            self._jumps = tuple(jump for jump in self._jumps if jump not in offer.jumps)
            self._anchor = None if self._anchor == offer.anchor else self._anchor
