"""Sums what the programs of a run have sent, received and requested, from the events in its log."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from delta_weight_sync.runlog import TrafficEvent
from delta_weight_sync.store.ledger import KINDS
from delta_weight_sync.util import size_text

_PROGRAMS: Final = 256  # programs whose traffic is kept separately; of more, the oldest are kept as a sum
_COUNTED: Final = ("sent", "received", "requests")


@dataclass(frozen=True)
class Traffic:
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


class TrafficSum:
    """Sums traffic events. Each event counts from the start of its program, so only its newest event counts.

    Memory stays small, however long the run is.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[str, float, bool], TrafficEvent] = {}  # by program
        self._past: dict[bool, TrafficEvent] = {}  # the sum of earlier trainers, and of earlier replicas
        self._first = TrafficEvent(t=0, source="", since=0)  # of the trainer up to version 0

    def add(self, event: TrafficEvent) -> None:
        """Add an event; it replaces earlier events of the same program."""
        if event.trainer and event.version == 0:
            self._first = event
        self._newest[event.source, event.since, event.trainer] = event
        if len(self._newest) > _PROGRAMS:
            gone = self._newest.pop(next(iter(self._newest)))
            past = self._past.get(gone.trainer, TrafficEvent(t=0, source="", since=0))
            totals = {name: _sum([getattr(gone, name), getattr(past, name)]) for name in _COUNTED}
            self._past[gone.trainer] = gone.model_copy(update=totals)

    def total(self) -> Traffic:
        """The sum over all programs so far."""
        events = [*self._past.values(), *self._newest.values()]
        trainers = [event for event in events if event.trainer]
        replicas = [event for event in events if not event.trainer]
        return Traffic(
            sent=_without(_sum(event.sent for event in trainers), self._first.sent),
            requests=_without(_sum(event.requests for event in trainers), self._first.requests),
            received=_sum(event.received for event in replicas),
            replica_requests=_sum(event.requests for event in replicas),
        )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    totals = Counter[str]()
    for each in counts:
        totals.update(each)
    return dict(totals)


def _without(counts: Mapping[str, int], first: Mapping[str, int]) -> dict[str, int]:
    left = {kind: count - first.get(kind, 0) for kind, count in counts.items()}
    return {kind: count for kind, count in left.items() if count > 0}
