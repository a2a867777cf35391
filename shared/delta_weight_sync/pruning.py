"""What of a run may be deleted: objects that no version within a budget needs, oldest first.

Safe beside a writer and beside readers. What stays in any case:

- all that the newest manifest names, and that of every version published within `GRACE_S` before it: whoever
  reads one of these finds what it says;
- what the trainer's states go on from: their versions, and all after these;
- every object younger than that, because a publish on its way is not named yet;
- HEADs, the run's description and its log.

Time is that of the run: how long before its newest object something was written, by the store's clock. So a
run that has ended does not age away, and no other clock matters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import Writer, state_version, version_key
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import FileRef
from delta_weight_sync.store import Bucket, ObjectInfo, ObjectMissing
from delta_weight_sync.units import size_text, time_text

GRACE_S: Final = 3600.0
_AT_ONCE: Final = 500  # objects per request, where the store takes several
_UNITS: Final = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "h": 3600.0, "d": 86400.0}


class KeepError(DeltaWeightSyncError, ValueError):
    """What is to be kept is neither a size nor an age."""


@dataclass(frozen=True)
class Keep:
    """The newest versions: as many as fit into `size` bytes, or those of the last `age_s` seconds."""

    size: float = float("inf")
    age_s: float = float("inf")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`20GB`, `500MB`, `7d` or `12h`; raises `KeepError`."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]B|[hd])", text)
        if not match or not (amount := float(match[1]) * _UNITS[match[2]]):
            raise KeepError(f"{text!r} is neither a size nor an age to keep: write it as 20GB, 7d or 12h")
        return cls(size=amount) if match[2].endswith("B") else cls(age_s=amount)

    def __str__(self) -> str:
        return f"the last {time_text(self.age_s)}" if self.size == float("inf") else size_text(self.size)


class Doomed(NamedTuple):
    """An object that may be deleted, and why."""

    info: ObjectInfo
    why: str


@dataclass(frozen=True)
class Survey:
    """What `prune` is to do."""

    delete: tuple[Doomed, ...]  # in this order
    kept: int  # bytes of the run that stay
    oldest: int  # the oldest version that can still be built afterwards, all newer ones with it
    newest: int

    @property
    def freed(self) -> int:
        """Bytes that go."""
        return sum(doomed.info.size for doomed in self.delete)


class _Version(NamedTuple):
    """What is remembered of a manifest, which itself takes a hundred times the memory."""

    number: int
    created_at: float
    key: str
    parent: FileRef | None
    needs: tuple[str, ...]  # keys of what builds it
    names: tuple[str, ...]  # of all that it names


class Pruner:
    """Looks a run over, again and again if it is to stay within a budget; reads each manifest once."""

    def __init__(self, reader: RunReader, keep: Keep, grace_s: float = GRACE_S) -> None:
        """`grace_s`: how long something that nothing names may still be on its way, or being read."""
        self._reader, self._keep, self._grace_s = reader, keep, grace_s
        self._read: dict[str, _Version] = {}  # by the manifest's key
        self._keys: dict[str, str] = {}  # each once, as many versions name the same ones

    def survey(self, spare: Collection[str] = (), reserve: int = 0) -> Survey | None:
        """What may go now; None for a run without versions. Raises `BucketError` and `ProtocolError`.

        `spare`: keys that are about to be named. `reserve`: bytes of the budget to leave free.
        """
        newest = self._reader.newest()  # before the listing: what a writer adds meanwhile is newer than this
        if newest is None:
            return None
        objects = _Objects(self._reader, newest, self._grace_s)
        kept = objects.lasting(spare)
        size, oldest = objects.size(kept), newest.version
        limit, since = self._keep.size - reserve, newest.created_at - self._keep.age_s
        for version in self._versions(newest):
            whole = version.number == newest.version or objects.is_young(version.key)
            must = whole or version.number >= objects.oldest_state
            more = {version.key, *(version.names if whole else version.needs)} - kept
            if not must and (size + objects.size(more) > limit or version.created_at < since):
                break
            kept |= more
            size, oldest = size + objects.size(more), version.number
        self._forget(oldest)
        return Survey(tuple(objects.doomed(kept, oldest)), size, oldest, newest.version)

    def _versions(self, newest: Manifest) -> Iterator[_Version]:
        """As `RunReader.history`, without reading what was read before."""
        version: _Version | None = self._remember(newest)
        while version:
            yield version
            version = self._before(version.parent)

    def _before(self, parent: FileRef | None) -> _Version | None:
        if parent is None:
            return None
        if known := self._read.get(parent.key):
            return known
        try:
            return self._remember(self._reader.manifest(parent))
        except ObjectMissing:
            return None

    def _remember(self, manifest: Manifest) -> _Version:
        writer = Writer(manifest.writer_term, manifest.writer)
        key = self._reader.keys.manifest(manifest.version, writer)
        needs, names = (self._once(files) for files in (manifest.way().files, manifest.named()))
        version = _Version(manifest.version, manifest.created_at, key, manifest.parent, needs, names)
        self._read[key] = version
        return version

    def _once(self, files: Iterable[FileRef]) -> tuple[str, ...]:
        return tuple(self._keys.setdefault(file.key, file.key) for file in files)

    def _forget(self, oldest: int) -> None:
        self._read = {key: version for key, version in self._read.items() if version.number >= oldest}
        self._keys = {key: key for version in self._read.values() for key in version.names}


def prune(bucket: Bucket, survey: Survey) -> None:
    """Delete it; what is interrupted is finished by the next survey's. Raises `BucketError`."""
    keys = [doomed.info.key for doomed in survey.delete]
    for start in range(0, len(keys), _AT_ONCE):
        bucket.delete(keys[start : start + _AT_ONCE])


class _Objects:
    """What is in a run's folder."""

    def __init__(self, reader: RunReader, newest: Manifest, grace_s: float) -> None:
        self._newest = newest
        self._infos = {info.key: info for info in reader.bucket.list(reader.keys.folder)}
        states = [version for key in self._infos if (version := state_version(key)) is not None]
        self.oldest_state = min([*states, newest.version])  # of a version that a trainer may go on from
        self._young = max((info.written or 0.0 for info in self._infos.values()), default=0.0) - grace_s

    def is_young(self, key: str) -> bool:
        """Written within the grace; also what the store does not tell of, or does not list yet."""
        info = self._infos.get(key)
        return info is None or info.written is None or info.written > self._young

    def lasting(self, spare: Collection[str]) -> set[str]:
        """What stays whatever it is: no part of a version, or perhaps on its way."""
        return set(spare) | {key for key in self._infos if self._lasts(key)}

    def _lasts(self, key: str) -> bool:
        part, newest = version_key(key), self._newest
        if part is None or self.is_young(key):
            return True
        return part.writer == str(Writer(newest.writer_term, newest.writer)) and part.version > newest.version

    def size(self, keys: Collection[str]) -> int:
        """Bytes of those that are there."""
        return sum(self._infos[key].size for key in keys if key in self._infos)

    def doomed(self, kept: Collection[str], oldest: int) -> Iterator[Doomed]:
        """The others, oldest first; manifests before the rest: a version without one is gone as a whole."""
        rest = [(part, key) for key in self._infos.keys() - kept if (part := version_key(key))]
        for part, key in sorted(rest, key=lambda one: (one[0].kind != "manifests", *one)):
            old = part.version < oldest
            why = f"older than version {oldest}" if old else "no version that stays needs it"
            yield Doomed(self._infos[key], why)
