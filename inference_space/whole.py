"""A request's body that has come whole and may be passed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Whole:
    """A body, and how many places its request takes."""

    body: bytes = b""
    places: int = 1


class Reader(Protocol):
    """Knows what may stand in the body of some routes."""

    @property
    def limit(self) -> int:
        """The largest body, in bytes."""

    def read(self, body: bytes) -> Whole:
        """What is passed on; raises `ValueError`, with a sentence, for what is not."""
