"""Watches a run for newer versions: polls HEAD, wakes up when notified, and backs off from failures.

Each writer of a run has a HEAD, an object that names the writer's newest version. Three kinds of failure are
retried with growing pauses: the store does not answer, records cannot be read, or a version cannot be used.
`Watcher.reset` ends all pauses. `Watcher.refresh` keeps pauses of the first kind.
"""

import contextlib
from collections.abc import Callable
from time import monotonic

from delta_weight_sync.errors import NoVersionError, ObjectMissingError, ProtocolError
from delta_weight_sync.reader import Problems, RunReader, went_back
from delta_weight_sync.records import POLL_S, Head, Manifest, Rank, Writer, head_writer, part_suffix
from delta_weight_sync.store import SMALL

FIRST_S = 1.0  # pause after the first failure; each further failure doubles the pause
LONGEST_S = 600.0
_LIST_EVERY = 30  # at least one poll in 30 lists all HEADs; the Hub allows fewer lists than reads
_AHEAD = 3  # together with a manifest, the next version's delta and at most 3 later deltas are fetched
_STORE = "the store"


class Backoff:
    """Delays retries of what failed last. Anything else may be tried immediately. Not thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all failures."""
        self._what: object = None
        self._failures, self._failed, self._next = 0, 0.0, 0.0

    def allows(self, what: object) -> bool:
        """Whether it is time to try `what`."""
        return what != self._what or monotonic() >= self._next

    def failed(self, what: object) -> None:
        """Record that `what` failed. Earlier failures of `what` count, unless they are long ago."""
        now = monotonic()
        if what != self._what or now - self._failed > 2 * LONGEST_S:
            self._failures = 0
        self._what, self._failed = what, now
        self._next = now + min(FIRST_S * 2.0 ** min(self._failures, 32), LONGEST_S)
        self._failures += 1


class Watcher:
    """Finds newer versions of a run. One thread polls; any thread may call `poke`. Call `close` at the end.

    A version older than `seen`, or than any version found before, is refused. `poll_s` is the usual number of
    seconds between two polls if the store sends no notifications.
    """

    def __init__(self, reader: RunReader, poll_s: float = POLL_S, seen: Manifest | None = None) -> None:
        self._reader, self._poll_s = reader, poll_s
        self._notifications = notifications = reader.bucket.notifications(reader.keys.heads)
        self.wait, self.poke, self.close = notifications.wait, notifications.poke, notifications.close
        self._skipped: Problems = {}  # records that were skipped to find the newest version
        self._skipped_heads: Problems = {}
        self._asking = Backoff()  # delays polls after the store did not answer
        self._finding = Backoff()  # after a failure, delays reading again while the HEADs are the same
        self._using = Backoff()  # delays the next try of a version that could not be used
        self._mending = Backoff()  # delays the next search for a version after damaged HEADs
        self._answered, self._fruitful = False, True  # store answered; last notification or poke had news
        self._newest = seen
        self.reset(seen.rank if seen else None)

    def refresh(self) -> None:
        """Make the next `check` poll and use the newest version, even if it was used before."""
        for each in (self._notifications, self._finding, self._using, self._mending):
            each.reset()
        # Key of the HEAD of the newest version (the known HEAD), polls so far, polls since one found a HEAD.
        self._key, self._polls, self._empty = "", 0, 0
        self._found: dict[str, str] = {}  # key -> etag of each HEAD
        self._used: dict[str, str] | None = None  # `_found` as it was for the version used last

    def reset(self, floor: Rank | None = None) -> None:
        """Forget the versions seen so far: from now on, accept any version that is not older than `floor`."""
        self.refresh()
        self._asking.reset()
        self._head_floor, self._floor = floor, floor

    def check(self, use: Callable[[Manifest], object]) -> bool:
        """If it is time, poll, and call `use` with a new version. Raises the errors of `poll` and `use`.

        Returns True if the run was polled and its newest version is in use.
        """
        if not self._asking.allows(_STORE):
            return False
        again = self._found != (self._used or {}) and self._finding.allows(self._found)
        if not self._notifications.due(self._poll_s, again):
            return False
        self._answered = False
        try:
            if manifest := self.poll():
                self._use(manifest, use)
        except NoVersionError:
            raise
        except Exception:
            if self._answered:
                self._finding.failed(self._found)
            else:
                self._asking.failed(_STORE)
            raise
        return self._found == self._used

    def _use(self, manifest: Manifest, use: Callable[[Manifest], object]) -> None:
        """Call `use`. If `use` fails, delay the next try of this version, even if HEAD is rewritten."""
        if not self._using.allows(manifest.seal):
            self._finding.failed(self._found)  # meanwhile, do not read the same HEADs and manifest again
            return
        try:
            use(manifest)
        except Exception:
            self._using.failed(manifest.seal)
            raise
        self.mark_used()

    def mark_used(self) -> None:
        """Mark the version that `poll` returned last as used: `poll` does not return it again."""
        self._used = self._found

    def describe(self) -> str:
        """How this watcher learns of new versions, in words."""
        return self._notifications.describe(self._poll_s)

    def problem(self) -> ProtocolError | None:
        """The records that were skipped to find the newest version, one sentence each, or None."""
        return ProtocolError("; ".join(map(str, self._skipped.values()))) if self._skipped else None

    def poll(self) -> Manifest | None:
        """The newest version, or None if it was used already or if it is too early to try again.

        If a valid version is found, damaged records are not an error; `problem` names them. Otherwise raises
        `ProtocolError`, or `NoVersionError` if there is no version yet.
        """
        prompted, following = self._notifications.prompted, self._newest.version + 1 if self._newest else 0
        if prompted and self._fruitful:  # read ahead, without waiting for HEAD's etag
            self._fetch_ahead(following, self._key)
        known = self._read_etags()
        self._answered, self._empty = True, 0 if self._found else self._empty + 1
        self._asking.reset()
        self._notifications.known = self._found
        self._fruitful = self._found != self._used if prompted else self._fruitful
        if self._found == self._used or not self._finding.allows(self._found):
            self._reader.fetch_ahead(())  # a HEAD that was read ahead in vain must not pass for a later one
            return None
        if known:
            self._fetch_ahead(following, self._key)
        head = self._known_head() if known else None
        if head is None:
            if not self._mending.allows(_STORE):  # too early after damaged HEADs, even if they have changed
                return None
            # Without a HEAD, the reader lists the whole run and rebuilds HEAD. So do this rarely.
            if self._empty < 2 or self._empty % _LIST_EVERY == 1:
                self._skipped_heads = {}
                head = self._reader.head(floor=self._head_floor, problems=self._skipped_heads)
        if head and head.version and head.version > following:
            self._fetch_ahead(head.version)
        skipped: Problems = {}
        manifest = self._reader.resolve(head, skipped) if head else None
        if head is None or manifest is None:
            raise NoVersionError(f"{self._reader.place} has not published a first version")
        if self._floor and manifest.rank < self._floor:
            raise went_back(f"run {self._reader.keys.run!r}", manifest.version, self._floor)
        self._key = self._reader.keys.head(Writer(head.writer_term, head.writer))
        self._head_floor, self._floor, self._newest = head.rank, manifest.rank, manifest
        self._skipped = self._skipped_heads | skipped
        self._mending.failed(_STORE) if self._skipped_heads else self._mending.reset()
        self._notifications.confirm()
        return manifest

    def _fetch_ahead(self, version: int, *others: str) -> None:
        """Begin to read `others`, the manifest of `version`, and the deltas up to it, by predicted keys.

        Parts that were large in the newest version are left out. Nothing is fetched ahead from a folder,
        because reading a file is faster than starting a thread.
        """
        folder = self._reader.bucket.url.startswith("file:")
        if self._newest and not folder and (writer := head_writer(self._key)):
            keys, first = self._reader.keys, self._newest.version + 1
            small = [part_suffix(part) for part in self._newest.delta if part.size <= SMALL]
            parts, ends = small if self._newest.delta else [""], min(version, first + _AHEAD) + 1
            deltas = [keys.delta(each, writer, part) for each in range(first, ends) for part in parts]
            self._reader.fetch_ahead([*others, keys.manifest(version, writer), *deltas])

    def _read_etags(self) -> bool:
        """Read the etags of the HEADs. True if only the known HEAD was requested."""
        bucket, self._polls = self._reader.bucket, self._polls + 1
        known = bucket.stat(self._key) if self._key and self._polls % _LIST_EVERY else None
        # If a change is expected and the known HEAD is the same, another writer's HEAD may have changed.
        expected = self._notifications.prompted or self._notifications.for_safety
        if known and not (expected and known.etag == (self._used or {}).get(self._key)):
            self._found = self._found | {self._key: known.etag}
            return True
        self._found = {info.key: info.etag for info in bucket.list(self._reader.keys.heads)}
        return False

    def _known_head(self) -> Head | None:
        """The HEAD that was polled, if it is valid."""
        with contextlib.suppress(ProtocolError, ObjectMissingError):
            if writer := head_writer(self._key):
                head = self._reader.head_of(writer, self._head_floor)
                if head.rank == self._head_floor:  # perhaps fetched ahead and outdated: read again
                    head = self._reader.head_of(writer, self._head_floor)
                self._skipped_heads.pop(self._key, None)
                return head
        return None
