"""What a trainer that rose does again: it is in the bucket already, so it is not published twice."""

from __future__ import annotations

from collections.abc import Mapping


class Replay:
    """Compares hand-overs with what was published by the trainer before, until one differs."""

    def __init__(self, published: Mapping[int, str]) -> None:
        """`published`: digest by sync, of the versions that this trainer comes by if it does the same."""
        self._published = published
        self.agreed = min(published, default=0)  # the newest sync up to which both have done the same

    def holds_back(self, sync: int, digest: str) -> bool:
        """True for a hand-over that is published already, or on the way to one that may be."""
        if sync > max(self._published, default=-1) or self._published.get(sync, digest) != digest:
            self._published = {}
            return False
        if sync in self._published:
            self.agreed = sync
        return True
