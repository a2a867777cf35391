"""Which versions a program has evaluated, and the scores that it gave them, in the run's log.

The program writes a log of its own: its `Writer` has the term 0, which no trainer has. The log is not signed,
so scores are for people: anyone who may write to the bucket can forge them.
"""

import json
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final
from uuid import uuid4

from delta_weight_sync.errors import CommandError, ObjectMissingError, ProtocolError
from delta_weight_sync.reader import RunReader, manifests_of
from delta_weight_sync.records import Manifest, Writer
from delta_weight_sync.runlog import METRICS, RunLogReader, RunLogWriter, ScoreEvent, finite
from delta_weight_sync.store import ObjectInfo

_ONE: Final = "score"  # the name of a score that is printed as a number alone


def scores_of(reader: RunReader) -> Iterator[ScoreEvent]:
    """The scores in a run's log."""
    for event in RunLogReader(reader.bucket, reader.keys.run).poll():
        if isinstance(event, ScoreEvent):
            yield event


def parsed_scores(printed: str) -> dict[str, float]:
    """The scores in the last line that a command printed: a number, or a JSON object of numbers.

    Raises `CommandError` for anything else.
    """
    lines = [line for line in printed.splitlines() if line.strip()]
    fix = 'print a number such as 0.61, or {"accuracy": 0.61}, in its last line'
    if not lines:
        raise CommandError(f"the command printed no score: {fix}")
    try:
        value = json.loads(lines[-1])
    except ValueError:
        value = None
    named = value if isinstance(value, dict) else {_ONE: value}
    scores = {name: number for name, each in named.items() if (number := finite(each)) is not None}
    if not scores or len(scores) < len(named) or len(scores) > METRICS:
        raise CommandError(f"the last line of the command is no score, but {lines[-1][:200]!r}: {fix}")
    return scores


class Evaluations:
    """The evaluations of a run under one name: finds the versions that are due, and writes their scores."""

    def __init__(self, reader: RunReader, name: str, every: int) -> None:
        self._reader = reader
        self._name = name
        self._every = every
        self._done = {(e.version, e.digest) for e in scores_of(reader) if e.name == name}
        self._listed: dict[int, ObjectInfo] = {}  # version -> its manifest in the last listing
        self._scored = set[ObjectInfo]()  # manifests of versions that have scores: they are not read again
        self._log = RunLogWriter(reader.bucket, reader.keys.run, Writer(0, uuid4().hex))

    def due(self, failed: Collection[int]) -> list[int]:
        """The versions to look at, oldest first: each `every`-th one that is not known to have scores. Lists
        the manifests, and reads none, so a look that finds nothing new is cheap on the Hub."""
        self._listed = manifests_of(self._reader.bucket.list(self._reader.keys.manifests))
        every_nth = (version for version in self._listed if version % self._every == 0)
        return sorted(n for n in every_nth if n not in failed and self._listed[n] not in self._scored)

    def manifest(self, version: int) -> Manifest | None:
        """The manifest of a version in `due`; None if it has scores. Raises as `RunReader.manifest`."""
        info = self._listed[version]
        manifest: Manifest | None = None
        with suppress(ProtocolError, ObjectMissingError):  # another writer's manifest may count: see below
            manifest = self._reader.read_listed(info.key)
        if manifest is None or (version, manifest.digest) not in self._done:
            manifest = self._reader.manifest(version)  # takes several requests
        if (version, manifest.digest) not in self._done:
            return manifest
        self._scored.add(info)
        return None

    def add(self, manifest: Manifest, scores: dict[str, float], seconds: float) -> None:
        """Write the scores of a version. Raises `BucketError`; the scores are then written later."""
        known = manifest.version, manifest.digest
        self._done.add(known)
        event = ScoreEvent(
            t=time.time(),
            version=manifest.version,
            digest=manifest.digest,
            name=self._name,
            scores=scores,
            seconds=seconds,
        )
        self._log.append(event)
        self._log.flush()

    def close(self) -> None:
        """Write what is left."""
        self._log.close()
