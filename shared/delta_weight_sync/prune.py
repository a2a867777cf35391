"""Deletes the oldest versions of a run, until the rest fits a budget of bytes or age.

This is safe while a writer and readers use the run. An object is *young* if it, or the manifest of its
version, is less than `GRACE_S` seconds old. Young objects stay. If a manifest is young, all files that it
names stay, because readers may still fetch them. HEADs, log, trainer states, and files of a version in
progress stay. A version with a valid tag stays as long as the tag. All ages count back from the newest
versions, so a finished run does not age.

A clock may be wrong while one version is published, ahead or behind. This must not delete anything that would
stay if the clock were right. So no age relies on the time of a single version:

- The present is the *earlier* time of the newest two versions. At least one of these times is right, so the
  present is never too late.
- The time of a version is the *later* one of its own time and its successor's. At least one of these times is
  right, so this time is never too early. It is also no later than the time of any newer version, because
  otherwise a version from the future would never be deleted.

Hence an age is never too large. If all times are right, an age is too small: by the time between the newest
two versions, and by the time to the version's successor. The newest three versions have the age 0.

There are two clocks. The store's clock dates objects, and alone decides what is young. An object without a
date is young. The trainer's clock dates manifests. A version is older than `Keep.age_s` only if it is so by
both clocks: in a folder, both are often the same clock, but a trainer's clock may be wrong for longer. Of a
version from the future, files other than the manifest stay, because they may have been written just now.
"""

import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from delta_weight_sync.errors import ConfigError, ObjectMissingError, ProtocolError
from delta_weight_sync.reader import RunReader, manifests_of
from delta_weight_sync.records import FileRef, Manifest, Writer, state_version, version_key
from delta_weight_sync.store import Bucket, ObjectInfo
from delta_weight_sync.tags import tags_of

GRACE_S: Final = 3600.0
_AT_ONCE: Final = 500  # objects in one call of `delete`, which some stores send as one request
_UNITS: Final = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "H": 3600.0, "D": 86400.0}


@dataclass(frozen=True)
class Keep:
    """Which versions to keep: the newest, within `size` bytes, and at most `age_s` older than the newest."""

    size: float = float("inf")
    age_s: float = float("inf")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `20GB`, `500MB`, `7d` or `12h`. Raises `ConfigError`."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]B|[HD])", str(text).upper())
        if not match or not (amount := float(match[1]) * _UNITS[match[2]]):
            raise ConfigError(f"{text!r} is neither a size nor an age: write it as 20GB, 7d or 12h")
        return cls(size=amount) if match[2].endswith("B") else cls(age_s=amount)


class Doomed(NamedTuple):
    """An object that may be deleted, and why."""

    info: ObjectInfo
    why: str


class Survey(NamedTuple):
    """The plan of `prune`."""

    delete: tuple[Doomed, ...]  # to be deleted in this order
    freed: int  # bytes to delete
    kept: int  # bytes of the run that stay
    oldest: int  # this and all newer versions can still be built afterwards
    newest: int  # the newest version
    tagged: tuple[str, ...] = ()  # the tags of older versions, which stay


class _Version(NamedTuple):
    """The parts of a manifest that a survey needs. They take a hundredth of the manifest's memory."""

    number: int
    created_at: float
    key: str
    parent: FileRef | None
    needs: tuple[str, ...]  # keys of the files that build the version
    names: tuple[str, ...]  # keys of all files that the manifest names


class _Clock:
    """Tells the ages of the versions by one clock, as the docstring of this module says."""

    def __init__(self) -> None:
        self._newest: list[float] = []  # the times of the newest two
        self._successor = math.inf
        self._time = math.inf

    @property
    def present(self) -> float:
        """The present, in the seconds of this clock. A single time says nothing about the present."""
        return min(self._newest) if len(self._newest) == 2 else -math.inf

    def age(self, time: float) -> float:
        """The age of the next version, which has this time, in seconds. Begin with the newest version."""
        if len(self._newest) < 2:
            self._newest.append(time)
        self._time = min(self._time, max(time, self._successor))
        self._successor = time
        return max(0.0, self.present - self._time)


class Pruner:
    """Finds what may be deleted from a run. You can ask repeatedly; each manifest is read only once.

    `grace_s`: seconds for which a new object, and all files that a new manifest names, are kept.
    """

    def __init__(self, reader: RunReader, keep: Keep, grace_s: float = GRACE_S) -> None:
        self._reader = reader
        self._keep = keep
        self._grace_s = grace_s
        self._read: dict[str, _Version] = {}  # by the manifest's key

    def survey(self, spare: Collection[str] = (), reserve: int = 0) -> Survey | None:
        """Find the objects that may be deleted now. Returns None for a run without versions.

        `spare`: keys to keep because the next manifest will name them. `reserve`: bytes of the
        budget `keep.size` that the next objects will need.
        """
        newest = self._reader.newest()  # read before the listing, so that later versions count as in progress
        if newest is None:
            return None
        infos = {info.key: info for info in self._reader.bucket.list(self._reader.keys.folder)}
        states = [found for key in infos if (found := state_version(key)) is not None]
        oldest_state = min([*states, newest.version])  # a trainer may resume from this version
        writer = Writer(newest.writer_term, newest.writer)
        store = _Clock()
        trainer = _Clock()
        listed = sorted(manifests_of([*infos.values()]).items(), reverse=True)
        ages = {  # of the versions, by the store's clock
            version: store.age(info.written)
            for version, info in listed
            if info.written is not None and version <= newest.version
        }
        dated = {info.key for version, info in listed if version in ages}

        def is_young(key: str) -> bool:
            """Whether an object is young. An unlisted object, or one without a date, counts as young."""
            info = infos.get(key)
            part = version_key(key)
            if info is None or info.written is None or part is None:
                return True
            age = ages.get(part.version, math.inf)
            if key not in dated:  # a jump or an anchor, for example, is written after its version
                age = min(age, max(0.0, store.present - info.written))
            return age < self._grace_s

        def lasts(key: str) -> bool:
            """Whether an object always stays: it is young, of no version, or of a version in progress."""
            part = version_key(key)
            coming = part is not None and part.written_by(writer) and part.version > newest.version
            return part is None or is_young(key) or coming

        def size_of(keys: Iterable[str]) -> int:
            return sum(infos[key].size for key in keys if key in infos)

        tagged = self._tagged(newest)
        keys = {key for version in tagged.values() for key in (version.key, *version.needs)}
        kept = {*spare, *filter(lasts, infos), *(keys & infos.keys())}
        # A tagged version is no reason to keep what lies between it and the newest versions.
        alone = {version.key for version in tagged.values()}
        chain = {key: info for key, info in infos.items() if key not in alone}
        size = size_of(kept)
        oldest = newest.version
        limit = self._keep.size - reserve
        for version in self._versions(newest, chain):
            whole = version.number == newest.version or is_young(version.key)  # keep all files that it names
            must = whole or version.number >= oldest_state  # keep it even beyond the budget
            more = {version.key, *(version.names if whole else version.needs)} - kept
            age = min(trainer.age(version.created_at), ages.get(version.number, 0.0))
            if not must and (size + size_of(more) > limit or age > self._keep.age_s):
                break
            kept |= more
            size += size_of(more)
            oldest = version.number
        self._read = {
            key: version for key, version in self._read.items() if version.number >= oldest or key in alone
        }
        doomed = [(part, infos[key]) for key in infos.keys() - kept if (part := version_key(key))]
        # Manifests are deleted first, so that an interruption leaves no manifest whose files are gone. Among
        # the manifests, and then among the other files, old ones are deleted first.
        doomed.sort(key=lambda one: (one[0].kind != "manifests", one[0].version, one[1].key))
        why = "no remaining version needs it", f"older than version {oldest}"
        delete = tuple(Doomed(info, why[part.version < oldest]) for part, info in doomed)
        freed = sum(doomed.info.size for doomed in delete)
        old = tuple(name for name, version in tagged.items() if version.number < oldest)
        return Survey(delete, freed, size, oldest, newest.version, old)

    def _tagged(self, newest: Manifest) -> dict[str, _Version]:
        """The versions that have valid tags, by tag."""
        found: dict[str, _Version] = {}
        for tag in tags_of(self._reader, newest):
            key = tag.manifest.key
            with suppress(ObjectMissingError, ProtocolError):  # then no reader can build the version, either
                found[tag.name] = self._read.get(key) or self._remember(
                    self._reader.read(Manifest, tag.manifest)
                )
        return found

    def _versions(self, newest: Manifest, infos: Mapping[str, ObjectInfo]) -> Iterator[_Version]:
        """Yield the versions, newest first. Each manifest is read only once. If one is missing, go on below
        the gap: what is there is not deleted just because of the gap. `infos`: the run's objects."""
        yield (version := self._remember(newest))
        while ref := version.parent:
            try:
                version = self._read.get(ref.key) or self._remember(self._reader.read(Manifest, ref))
            except ObjectMissingError:
                if (below := self._reader.below_gap(newest, version.number, infos)) is None:
                    return
                version = self._remember(below)
            yield version

    def _remember(self, manifest: Manifest) -> _Version:
        writer = Writer(manifest.writer_term, manifest.writer)
        key = self._reader.keys.manifest(manifest.version, writer)
        # Intern the keys, because many versions name the same files.
        needs = tuple(sys.intern(file.key) for file in manifest.recipe().files)
        names = tuple(sys.intern(file.key) for file in manifest.files)
        version = _Version(manifest.version, manifest.created_at, key, manifest.parent, needs, names)
        self._read[key] = version
        return version


def prune(bucket: Bucket, survey: Survey) -> None:
    """Delete the objects of a survey. After an interruption, the next survey finds the rest."""
    keys = [doomed.info.key for doomed in survey.delete]
    for start in range(0, len(keys), _AT_ONCE):
        bucket.delete(keys[start : start + _AT_ONCE])
