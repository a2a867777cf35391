"""Looking out for a newer version of a run: by one small request a look, at once where somebody tells."""

from __future__ import annotations

import contextlib

from delta_weight_sync.heads import NoVersionError, Refused, older
from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import Writer, head_writer
from delta_weight_sync.protocol import POLL_S, Head, Manifest, Rank
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import ObjectMissing

_LIST_EVERY = 30  # looks; in between only the known HEAD is asked for, of which the Hub allows more


class Lookout:
    """One thread looks, any may `poke`. It never goes back: what is older than what was seen is refused."""

    def __init__(self, reader: RunReader, poll_s: float = POLL_S) -> None:
        """`poll_s`: usual seconds between two looks, where nobody tells of new versions. To be closed."""
        self._reader, self._poll_s = reader, poll_s
        self._notice = reader.bucket.notice(reader.keys.heads)
        self.wait, self.poke, self.close = self._notice.wait, self._notice.poke, self._notice.close
        self._refused: Refused = {}  # what the newest version was found in spite of
        self._passed: Refused = {}  # of that, HEADs
        self.forget()

    def again(self) -> None:
        """Look now: whatever is there is taken for new, but what is older than what was seen is refused."""
        self._notice.again()
        self._key, self._looks = "", 0
        self._found: dict[str, str] = {}  # key -> etag, of HEADs
        self._taken: dict[str, str] = {}

    def forget(self) -> None:
        """Begin anew: whatever is there is taken for new, and for the newest."""
        self.again()
        self._head_floor: Rank | None = None
        self._floor: Rank | None = None

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

    def complaint(self) -> ProtocolError | None:
        """What was passed over to find what was found last, in one sentence each; None where all is well."""
        return ProtocolError("; ".join(map(str, self._refused.values()))) if self._refused else None

    def look(self) -> Manifest | None:
        """The newest version, or None while that is the one that was `taken`.

        Raises `NoVersionError` before there is one, `ProtocolError` where all that is there is damaged, older
        than what was seen, or not signed, and `BucketError`. Beside a sound version that is no error: see
        `complaint`.
        """
        known = self._etags()
        if self._found and self._found == self._taken:
            return None
        head = (self._known() if known else None) or self._head()
        told: Refused = {}
        manifest = self._reader.named(head, told) if head else None
        if head is None or manifest is None:
            raise NoVersionError(
                f"run {self._reader.keys.run!r} in {self._reader.bucket.url} has published no version yet"
            )
        if self._floor and manifest.rank < self._floor:
            raise older(f"run {self._reader.keys.run!r}", manifest.version, self._floor)
        self._key = self._reader.keys.head(Writer(head.writer_term, head.writer))
        self._head_floor, self._floor = head.rank, manifest.rank
        self._refused = self._passed | told
        self._notice.found()
        return manifest

    def _etags(self) -> bool:
        """Look at the HEADs; True if that was only the one that is known."""
        bucket, self._looks = self._reader.bucket, self._looks + 1
        known = bucket.stat(self._key) if self._key and self._looks % _LIST_EVERY else None
        # Where there should be news and none is here, it may be another writer's.
        if known and not (self._notice.expected and known.etag == self._taken.get(self._key)):
            self._found = self._taken | {self._key: known.etag}
            return True
        self._found = {info.key: info.etag for info in bucket.list(self._reader.keys.heads)}
        return False

    def _known(self) -> Head | None:
        """The HEAD that was looked at, if it is sound."""
        with contextlib.suppress(ProtocolError, ObjectMissing):
            if writer := head_writer(self._key):
                head = self._reader.head_of(writer, self._head_floor)
                self._passed.pop(self._key, None)
                return head
        return None

    def _head(self) -> Head | None:
        """What HEAD says. Where none is there, the whole run is listed only at times: it may be a new one."""
        if not self._found and self._head_floor is None and self._looks % _LIST_EVERY != 1:
            return None
        self._passed = {}
        return self._reader.head(floor=self._head_floor, refused=self._passed)
