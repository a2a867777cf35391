"""Counts what a program sends to a store, receives from it and asks it, by kind of object.

Every `Bucket` has one `Ledger`. The store layer enters all bytes and requests there, so every figure that a
page, a command or the log shows has the same source.
"""

import re
import threading
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

Kind = Literal[
    "anchors", "deltas", "jumps", "manifests", "heads", "states", "log", "polls", "deletions", "other"
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_FOLDER: Final = re.compile(r"runs/[^/]+/(anchors|deltas|jumps|manifests|heads|state|log)/")


def kind_of(key: str) -> Kind:
    """The kind of an object, from the folder of its run that it lies in."""
    match = _FOLDER.match(key)
    folder = match[1] if match else "other"
    return "states" if folder == "state" else folder  # type: ignore[return-value]


class Traffic(NamedTuple):
    """What was sent and received, in bytes of objects, and how many requests that took.

    On the Hub, `requests` counts the requests to the Hub, which has quotas for them. Those to its storage,
    for which there is no quota, are not counted.
    """

    sent: int = 0
    received: int = 0
    requests: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        """The sum of two counts."""
        return Traffic(self.sent + other.sent, self.received + other.received, self.requests + other.requests)


class Ledger:
    """Sums traffic by kind. Thread-safe; no count ever goes down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Kind, Traffic] = {}

    def add(self, kind: Kind, *, sent: int = 0, received: int = 0, requests: int = 0) -> None:
        """Enter some traffic of one kind. An upload counts when it begins, even if it fails later."""
        with self._lock:
            known = self._counts.get(kind, Traffic())
            self._counts[kind] = known.plus(Traffic(sent, received, requests))

    def counts(self) -> dict[Kind, Traffic]:
        """What was entered so far, by kind."""
        with self._lock:
            return dict(self._counts)

    @property
    def sent(self) -> int:
        """Bytes of all uploads so far."""
        return total(self.counts()).sent


def total(counts: Mapping[Kind, Traffic]) -> Traffic:
    """The sum over all kinds."""
    whole = Traffic()
    for each in counts.values():
        whole = whole.plus(each)
    return whole


def merged(*counts: Mapping[Kind, Traffic]) -> dict[Kind, Traffic]:
    """The sum over several programs, such as the ranks of a trainer, by kind."""
    found: dict[Kind, Traffic] = {}
    for each in counts:
        for kind, traffic in each.items():
            found[kind] = found.get(kind, Traffic()).plus(traffic)
    return found
