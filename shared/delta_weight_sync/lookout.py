"""Looking out for a newer version of a run: by one small request a look, at once where somebody tells."""

from __future__ import annotations

import contextlib

from delta_weight_sync.heads import NoVersionError
from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import head_writer
from delta_weight_sync.protocol import POLL_S, Head, Manifest, ProtocolError, Rank
from delta_weight_sync.store import ObjectMissing

_LIST_EVERY = (
    30  # looks; in between only the HEAD that is known is asked for, which the Hub counts as cheaper
)


class Lookout:
    """One thread looks, any may `poke`. It never goes back: a HEAD older than one it has seen is refused."""

    def __init__(self, reader: RunReader, poll_s: float = POLL_S) -> None:
        """`poll_s`: usual seconds between two looks, where nobody tells of new versions. To be closed."""
        self._reader, self._poll_s = reader, poll_s
        self._notice = reader.bucket.notice(reader.keys.heads)
        self.wait, self.poke, self.close = self._notice.wait, self._notice.poke, self._notice.close
        self.again()

    def again(self) -> None:
        """Begin anew, now: whatever is there is taken for new, and for the newest."""
        self._notice.again()
        self._key, self._looks = "", 0
        self._found, self._taken = "", ""  # etags of HEAD
        self._rank: Rank | None = None

    def due(self) -> bool:
        """Whether it is time for a look; then it is to be made. What was not `taken` is looked for again."""
        if self._found != self._taken:
            self._notice.doubt()
        return self._notice.due(self._poll_s)

    def how(self) -> str:
        """In words, how it learns of new versions."""
        return self._notice.how(self._poll_s)

    def taken(self) -> None:
        """What was found last needs not be found again."""
        self._taken = self._found

    def look(self) -> Manifest | None:
        """The newest version, or None while that is the one that was `taken`.

        Raises `NoVersionError` before there is one, `ProtocolError` where what is there is damaged or older
        than what was seen, and `BucketError`.
        """
        self._found = self._etag()
        if self._found and self._found == self._taken:
            return None
        head = self._head()
        manifest = self._reader.named(head) if head else None
        if head is None or manifest is None:
            raise NoVersionError(
                f"run {self._reader.keys.run!r} in {self._reader.bucket.url} has published no version yet"
            )
        self._rank = head.rank
        self._notice.found()
        return manifest

    def _etag(self) -> str:
        """Of the owner's HEAD; "" where there is none."""
        bucket, self._looks = self._reader.bucket, self._looks + 1
        known = bucket.stat(self._key) if self._key and self._looks % _LIST_EVERY else None
        # Where there should be news and none is here, it may be another writer's.
        if known and not (self._notice.expected and known.etag == self._taken):
            return known.etag
        listed = bucket.list(self._reader.keys.heads)
        self._key = listed[-1].key if listed else ""
        return listed[-1].etag if listed else ""

    def _known(self) -> Head | None:
        """The HEAD that was looked at, if it is sound."""
        with contextlib.suppress(ProtocolError, ObjectMissing):
            if writer := head_writer(self._key):
                return self._reader.head_of(writer)
        return None

    def _head(self) -> Head | None:
        """What HEAD says. Where none is there, the whole run is listed only at times: it may be a new one."""
        if not self._key and self._rank is None and self._looks % _LIST_EVERY != 1:
            return None
        head = self._known() or self._reader.head()
        if head and self._rank and head.rank < self._rank:
            raise ProtocolError(
                f"HEAD of run {self._reader.keys.run!r} went back from version {self._rank[-1]} to"
                f" {head.version}: it was not followed; if the run was started over, heal this replica"
            )
        return head
