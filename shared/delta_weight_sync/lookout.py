"""Looking out for a newer version of a run: by one small request a look, at once where somebody tells.

What fails is tried again ever more slowly: a store that does not answer, records that cannot be read, a
version that cannot be used. A new version ends such a pause, and whoever runs the program; a poke does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from delta_weight_sync.heads import NoVersionError, Refused, older
from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import Writer, head_writer
from delta_weight_sync.patience import Patience
from delta_weight_sync.protocol import POLL_S, Head, Manifest, Rank
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import ObjectMissing

_LIST_EVERY = 30  # looks; in between only the known HEAD is asked for, of which the Hub allows more
_STORE = "the store"


class Lookout:
    """One thread looks, any may `poke`. It never goes back: what is older than what was seen is refused."""

    def __init__(self, reader: RunReader, poll_s: float = POLL_S, seen: Manifest | None = None) -> None:
        """`poll_s`: usual seconds between two looks, where nobody tells of new versions. To be closed.

        `seen`: a version that is held from before; what is older is refused.
        """
        self._reader, self._poll_s = reader, poll_s
        self._notice = reader.bucket.notice(reader.keys.heads)
        self.wait, self.poke, self.close = self._notice.wait, self._notice.poke, self._notice.close
        self._refused: Refused = {}  # what the newest version was found in spite of
        self._passed: Refused = {}  # of that, HEADs
        # What failed: to get an answer, to find a version behind the HEADs that are there, to use a version.
        self._asking, self._finding, self._using = (Patience() for _ in range(3))
        self._answered = False
        self._head_floor: Rank | None
        self._floor: Rank | None
        self.forget()
        self._head_floor = self._floor = seen.rank if seen else None

    def again(self) -> None:
        """Look now: whatever is there is taken for new, but what is older than what was seen is refused."""
        self._notice.again()
        self._finding.forget()
        self._using.forget()
        self._key, self._looks, self._empty = "", 0, 0
        self._found: dict[str, str] = {}  # key -> etag, of HEADs
        self._taken: dict[str, str] | None = None  # as they were when their version was used

    def forget(self) -> None:
        """Begin anew: whatever is there is taken for new, and for the newest."""
        self.again()
        self._asking.forget()
        self._head_floor, self._floor = None, None

    def take(self, use: Callable[[Manifest], object]) -> bool:
        """Look, if it is time to, and `use` a version that is new; True where nothing is left to be used.

        Raises as `look` and `use` do.
        """
        if not self._due():
            return False
        self._answered = False
        try:
            if manifest := self.look():
                self._use(manifest, use)
        except NoVersionError:
            raise
        except Exception:
            self._failed()
            raise
        return self._found == self._taken

    def _use(self, manifest: Manifest, use: Callable[[Manifest], object]) -> None:
        """Where `use` fails, the same version is left alone for a while, however often HEAD is written."""
        if not self._using.allows(manifest.seal):
            self._finding.failed(self._found)
            return
        try:
            use(manifest)
        except Exception:
            self._using.failed(manifest.seal)
            raise
        self.taken()

    def _failed(self) -> None:
        if self._answered:
            self._finding.failed(self._found)
        else:
            self._asking.failed(_STORE)

    def _due(self) -> bool:
        """Whether it is time for a look; then it is to be made."""
        if not self._asking.allows(_STORE):
            return False
        if self._found != (self._taken or {}) and self._finding.allows(self._found):
            self._notice.doubt()
        return self._notice.due(self._poll_s)

    def taken(self) -> None:
        """What was found last needs not be found again."""
        self._taken = self._found

    def how(self) -> str:
        """In words, how it learns of new versions."""
        return self._notice.how(self._poll_s)

    def complaint(self) -> ProtocolError | None:
        """What was passed over to find what was found last, in one sentence each; None where all is well."""
        return ProtocolError("; ".join(map(str, self._refused.values()))) if self._refused else None

    def look(self) -> Manifest | None:
        """The newest version, or None while that was used, or not long ago could not be.

        Raises `NoVersionError` before there is one, `ProtocolError` where all that is there is damaged, older
        than what was seen, or not signed, and `BucketError`. Beside a sound version that is no error: see
        `complaint`.
        """
        known = self._etags()
        self._answered, self._empty = True, 0 if self._found else self._empty + 1
        self._asking.forget()
        if self._found == self._taken or not self._finding.allows(self._found):
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
        if known and not (self._notice.expected and known.etag == (self._taken or {}).get(self._key)):
            self._found = self._found | {self._key: known.etag}
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
        if self._empty > 1 and self._empty % _LIST_EVERY != 1:
            return None
        self._passed = {}
        return self._reader.head(floor=self._head_floor, refused=self._passed)
