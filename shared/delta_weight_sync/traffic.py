"""Sums what the programs of a run have sent, received and requested, from the events in its log."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from delta_weight_sync.runlog import TrafficEvent
from delta_weight_sync.store.ledger import KINDS
from delta_weight_sync.util import size_text

_PROGRAMS: Final = 1024  # max programs at a time; what further ones report is left out
_SILENT_S: Final = 3600.0  # a program that reported nothing for so long makes room for another
_COUNTED: Final = ("sent", "received", "requests")
_Counts = Counter[tuple[str, str]]  # by one of `_COUNTED`, and by kind of object


@dataclass(frozen=True)
class RunTraffic:
    """The traffic of a run after version 0, by kind of object (`store.ledger.KINDS`).

    Attributes:
        sent: Bytes that trainers sent.
        requests: Requests of trainers.
        received: Bytes that replicas received. These include each replica's first checkpoint.
        replica_requests: Requests of replicas.
    """

    sent: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)
    replica_requests: Mapping[str, int] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """All bytes that trainers sent."""
        return sum(self.sent.values())

    @property
    def sync_bytes(self) -> int:
        """The bytes without trainer states, which no replica reads."""
        return self.sent_bytes - self.sent.get("states", 0)

    @property
    def kinds(self) -> list[str]:
        """The kinds that have any traffic."""
        known = (self.sent, self.requests, self.received, self.replica_requests)
        return [kind for kind in KINDS if any(kind in counts for counts in known)]

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain dictionaries, for JSON."""
        return {name: dict(getattr(self, name)) for name in self.__dataclass_fields__}

    def table(self, versions: int) -> list[str]:
        """Lines of text: for each kind the bytes sent, also per version, the requests, and the same of
        replicas. `versions`: how many there are after version 0."""
        heads = f"{'sent':>10} {'per version':>12} {'requests':>9} {'replicas got':>13} {'requests':>9}"
        rows = [self._row(kind, [kind], versions) for kind in self.kinds]
        return [f"{'':12} {heads}", *rows, self._row("all", self.kinds, versions)]

    def _row(self, name: str, kinds: list[str], versions: int) -> str:
        sent, asked, got, replicas_asked = (
            sum(counts.get(kind, 0) for kind in kinds)
            for counts in (self.sent, self.requests, self.received, self.replica_requests)
        )
        each = size_text(sent / versions) if versions else "-"
        return (
            f"{name:12} {size_text(sent):>10} {each:>12} {asked:9,} {size_text(got):>13} {replicas_asked:9,}"
        )


class _Program:
    """What one program has counted so far, and what a trainer had counted when it last was at version 0."""

    def __init__(self) -> None:
        self.heard = 0.0  # time of its newest event
        self._newest = _Counts()
        self._first = _Counts()

    def add(self, event: TrafficEvent) -> _Counts:
        """Take an event of the program. Returns by how much its counts after version 0 have grown."""
        counts = {
            (name, kind): count
            for name in _COUNTED
            for kind, count in getattr(event, name).items()
            if kind in KINDS
        }
        before = self._newest - self._first
        self.heard = max(self.heard, event.t)
        # Counts never fall, so of two events that come out of order, the larger counts are the newer ones.
        self._newest = self._newest | _Counts(counts)
        if event.trainer and not event.version:
            self._first = self._newest
        return (self._newest - self._first) - before


class TrafficSum:
    """Sums traffic events. Each event counts from the start of its program, so only its newest event counts.

    Memory stays small, however long the run is.
    """

    def __init__(self) -> None:
        self._programs: dict[tuple[str, float, bool], _Program] = {}  # silent longest first
        self._sums = {True: _Counts(), False: _Counts()}  # of trainers, of replicas

    def add(self, event: TrafficEvent) -> None:
        """Add an event; it replaces earlier events of the same program."""
        key = event.source, event.since, event.trainer
        program = self._programs.pop(key, None)
        if program is None:
            if len(self._programs) >= _PROGRAMS and not self._forget_one(event.t):
                return
            program = _Program()
        self._programs[key] = program
        self._sums[event.trainer].update(program.add(event))

    def total(self) -> RunTraffic:
        """The sum over all programs so far."""
        return RunTraffic(
            sent=self._sum("sent", trainer=True),
            requests=self._sum("requests", trainer=True),
            received=self._sum("received", trainer=False),
            replica_requests=self._sum("requests", trainer=False),
        )

    def _forget_one(self, now: float) -> bool:
        """Forget the program that was silent longest, if it has ended. The sums keep what it counted."""
        key, program = next(iter(self._programs.items()))
        if program.heard > now - _SILENT_S:
            return False
        del self._programs[key]
        return True

    def _sum(self, wanted: str, *, trainer: bool) -> dict[str, int]:
        return {kind: count for (name, kind), count in self._sums[trainer].items() if name == wanted}
