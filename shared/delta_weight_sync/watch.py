"""Watches a run for newer versions.

Each writer of a run has a HEAD, an object that names the writer's newest version. A look reads the etags of
the HEADs. If an etag has changed, the watcher reads HEAD and the manifest that HEAD names, and the caller
uses this version. `Notifications` plans the looks.

If something fails, it is retried with growing pauses. During a pause, looks go on (unless the store did not
answer), and the watcher uses a new version immediately.
"""

import contextlib
from collections.abc import Callable
from time import monotonic

from delta_weight_sync.errors import NoVersionError, ObjectMissingError, ProtocolError
from delta_weight_sync.reader import Problems, RunReader, went_back
from delta_weight_sync.records import (
    MAX_PARTS,
    POLL_S,
    FileRef,
    Head,
    Manifest,
    Rank,
    Writer,
    head_writer,
    part_suffix,
)
from delta_weight_sync.store import SMALL
from delta_weight_sync.store.notifications import SAFETY_S, Why

FIRST_S = 1.0  # pause after the first failure; each further failure doubles the pause
LONGEST_S = 600.0
_LIST_EVERY = 30  # at least one look in 30 lists all HEADs; the Hub allows fewer lists than reads
_AHEAD = 3  # together with a manifest, the next version's delta and at most 3 later deltas are fetched
# What a look may fail at. The third is the sha256 of a manifest, whose version cannot be used.
_STORE = "the store"
_SEARCH = "the search for a version"


class Backoff:
    """Delays retries of what failed last. Anything else may be tried immediately. Not thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all failures."""
        self._what: object = None
        self._failures = 0
        self._failed = 0.0
        self._next = 0.0

    def allows(self, what: object) -> bool:
        """Whether it is time to try `what`."""
        return what != self._what or not self.seconds()

    def seconds(self) -> float:
        """Seconds until what failed last may be tried again."""
        return max(self._next - monotonic(), 0.0)

    def failed(self, what: object) -> None:
        """Record that `what` failed. Earlier failures of `what` count, unless they are long ago."""
        now = monotonic()
        if what != self._what or now - self._failed > 2 * LONGEST_S:
            self._failures = 0
        self._what = what
        self._failed = now
        self._next = now + min(FIRST_S * 2.0 ** min(self._failures, 32), LONGEST_S)
        self._failures += 1


class Watcher:
    """Finds newer versions of a run. One thread looks; any thread may call `poke`. Call `close` at the end.

    A version older than `seen`, or than any version found before, is refused. `poll_s` is the usual number of
    seconds between two looks if the store sends no notifications.
    """

    def __init__(self, reader: RunReader, poll_s: float = POLL_S, seen: Manifest | None = None) -> None:
        self._reader = reader
        self._poll_s = poll_s
        self._notifications = notifications = reader.bucket.notifications(reader.keys.heads)
        self.wait = notifications.wait
        self.poke = notifications.poke
        self.close = notifications.close
        self._backoff = Backoff()
        self._trying = _STORE  # what the look under way may fail at
        self._searched = False  # whether the look under way searched for a version around damaged HEADs
        self.reset(seen)

    def refresh(self) -> None:
        """Make the next `check` look and use the newest version, even if it was used before."""
        self._used: FileRef | None = None  # the manifest of the version used last
        self._backoff.reset()
        self._notifications.look_now()

    def reset(self, seen: Manifest | None = None) -> None:
        """Forget the versions found so far: from now on, accept any version that is not older than `seen`."""
        self.refresh()
        self._looks = 0
        self._notice_was_news = True  # whether the last look after a notification found another HEAD
        # When HEAD was read, if that was before its etag was. HEAD may have changed in between, so it is read
        # once more if it stays the same for `SAFETY_S`.
        self._read_early: float | None = None
        self._etags: dict[str, str] = {}  # key -> etag of each HEAD, as the last look found them
        self._head: Head | None = None  # the HEAD that counts; None if it is damaged, or could not be read
        self._newest = seen  # the newest version found; older ones are refused
        self._key = ""  # key of the HEAD of the newest version (the known HEAD)
        # Records that were skipped to find the newest version: damaged HEADs, and damaged manifests.
        self._skipped_heads = Problems()
        self._skipped = Problems()

    def check(self, use: Callable[[Manifest], object]) -> bool:
        """If it is time, look, and call `use` with a new version. Raises the errors of `poll` and `use`.

        Returns True if this was a look, and the newest version is in use.
        """
        if not self._backoff.allows(_STORE):
            return False
        why = self._notifications.due(self._poll_s)
        if why is None:
            return False
        try:
            if manifest := self.poll(why):
                use(manifest)
                self.mark_used()
        except Exception as error:
            if self._searched or not isinstance(error, NoVersionError):
                self._backoff.failed(self._trying)
            raise
        else:
            if self._searched:  # a search takes many requests
                self._backoff.failed(_SEARCH)
            elif self._is_used() and not self._skipped_heads:
                self._backoff.reset()
        finally:
            if not self._is_used() and (seconds := self._backoff.seconds()):
                self._notifications.retry(seconds)
        return self._is_used()

    def mark_used(self) -> None:
        """Mark the version that `poll` returned last as used: `poll` does not return it again."""
        self._used = self._head.manifest if self._head else None

    def _is_used(self) -> bool:
        manifest = self._head.manifest if self._head else None
        return manifest is not None and manifest == self._used

    def describe(self) -> str:
        """How this watcher learns of new versions, in words."""
        return self._notifications.describe(self._poll_s)

    def problem(self) -> ProtocolError | None:
        """The records that were skipped to find the newest version, one sentence each, or None."""
        skipped = self._skipped_heads | self._skipped
        return ProtocolError("; ".join(map(str, skipped.values()))) if skipped else None

    def poll(self, why: Why = Why.INTERVAL) -> Manifest | None:
        """Look. Returns the newest version, or None if it is in use, or if it is too early to try it again.

        If a valid version is found, damaged records are not an error; `problem` names them. Otherwise raises
        `ProtocolError`, or `NoVersionError` if there is no version yet.
        """
        self._trying = _STORE
        self._searched = False
        before = self._etags
        early = why is Why.NOTIFIED and self._notice_was_news
        listed = self._look(why)
        self._trying = _SEARCH
        if self._etags != before:
            self._head = self._read_head(listed)
            self._read_early = monotonic() if early else None
        elif self._read_early is not None and monotonic() - self._read_early >= SAFETY_S:
            self._head = self._read_head(listed)
            self._read_early = None
        if self._head is None and not self._backoff.seconds():
            self._head = self._search()
        elif self._head is None and self._etags:
            return None
        if self._head is None or self._head.manifest is None:
            raise NoVersionError(f"{self._reader.place} has not published a first version")
        self._trying = self._head.manifest.sha256
        if self._is_used() or not self._backoff.allows(self._trying):
            return None
        return self._resolve(self._head)

    def _look(self, why: Why) -> bool:
        """Read the etags of the HEADs. If they have changed, also begin to read what is probably new. True if
        all HEADs were listed, False if only the known HEAD was requested."""
        before = self._etags
        following = self._newest.version + 1 if self._newest else 0
        if why is Why.NOTIFIED and self._notice_was_news:
            self._fetch_ahead(following, self._key)
        listed = self._read_etags(why)
        self._notifications.known = self._etags
        news = self._etags != before
        if why is Why.NOTIFIED:
            self._notice_was_news = news
        if news and why is Why.SAFETY:  # a notification got lost
            self._notifications.rely(False)
        if not news:
            self._reader.fetch_ahead(())  # a HEAD that was read ahead in vain must not pass for a later one
        elif not listed:
            self._fetch_ahead(following, self._key)
        return listed

    def _read_etags(self, why: Why) -> bool:
        bucket = self._reader.bucket
        self._looks += 1
        known = bucket.stat(self._key) if self._key and self._looks % _LIST_EVERY else None
        # If a change is expected and the known HEAD is the same, another writer's HEAD may have changed.
        if known and (why is Why.INTERVAL or known.etag != self._etags.get(self._key)):
            self._etags = self._etags | {self._key: known.etag}
            return False
        self._etags = {info.key: info.etag for info in bucket.list(self._reader.keys.heads)}
        return True

    def _read_head(self, listed: bool) -> Head | None:
        """The newest writer's HEAD if all were listed, otherwise the known HEAD. None if it is damaged.

        If this raises, `_head` is None, so that a search follows.
        """
        before = self._head
        self._head = None
        writers = map(head_writer, self._etags if listed else [self._key])
        writer = max((writer for writer in writers if writer), default=None)
        with contextlib.suppress(ProtocolError, ObjectMissingError):
            if writer:
                head = self._reader.head_of(writer, self._floor())
                if head == before:  # perhaps fetched ahead and outdated: read again
                    head = self._reader.head_of(writer, self._floor())
                if listed:
                    self._skipped_heads = {}
                self._skipped_heads.pop(self._reader.keys.head(writer), None)
                return head
        return None

    def _search(self) -> Head | None:
        """The HEAD of the newest complete version, found or made from all HEADs and manifests of the run."""
        self._searched = True
        self._skipped_heads = {}
        return self._reader.head(floor=self._floor(), problems=self._skipped_heads)

    def _resolve(self, head: Head) -> Manifest:
        """The version that `head` names, or the newest complete one if the manifest is damaged."""
        if self._newest and head.version and head.version > self._newest.version + 1:
            self._fetch_ahead(head.version)
        skipped: Problems = {}
        manifest = self._reader.resolve(head, skipped)
        assert manifest is not None, "`head` names a manifest"
        if (floor := self._floor()) and manifest.rank < floor:
            raise went_back(f"run {self._reader.keys.run!r}", manifest.version, floor)
        self._key = self._reader.keys.head(Writer(head.writer_term, head.writer))
        self._newest = manifest
        self._skipped = skipped
        return manifest

    def _floor(self) -> Rank | None:
        return self._newest.rank if self._newest else None

    def _fetch_ahead(self, version: int, *others: str) -> None:
        """Begin to read `others`, the manifest of `version`, and the deltas up to it, by predicted keys.

        One after the other, HEAD, manifest and delta would take six requests on the Hub; together they take
        two. After a notification, these two do not wait for HEAD's etag, either. So a delta is in memory
        after 2 requests in sequence instead of 7, and after 3 if the watcher polls. If each request takes
        0.1 s, a version is staged after 0.29 s instead of 0.79 s (`bench.hub`).

        Parts that were large in the newest version are left out. Nothing is fetched ahead from a folder,
        because reading a file is faster than starting a thread.
        """
        folder = self._reader.bucket.url.startswith("file:")
        if self._newest and not folder and (writer := head_writer(self._key)):
            keys = self._reader.keys
            first = self._newest.version + 1
            small = [part_suffix(part) for part in self._newest.delta if part.size <= SMALL]
            parts = small if self._newest.delta else [""]
            ends = min(version, first + _AHEAD) + 1
            deltas = [keys.delta(each, writer, part) for each in range(first, ends) for part in parts]
            # A trainer of many ranks has many parts; those of the next version come first.
            self._reader.fetch_ahead([*others, keys.manifest(version, writer), *deltas[:MAX_PARTS]])
