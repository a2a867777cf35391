"""Ever longer pauses between tries of the same thing: a store and a machine have other work to do."""

from __future__ import annotations

from time import monotonic

FIRST_S = 1.0  # between the first failure and the next try; doubled by each that follows
LONGEST_S = 600.0


class Patience:
    """Counts failures of one thing at a time; another one is tried at once. For one thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing has failed."""
        self._what: object = None
        self._failures, self._failed, self._next = 0, 0.0, 0.0

    def allows(self, what: object) -> bool:
        """Whether it is time to try `what`."""
        return what != self._what or monotonic() >= self._next

    def failed(self, what: object) -> None:
        """`what` was tried in vain; so were the tries before, unless the last one is long ago."""
        now = monotonic()
        if what != self._what or now - self._failed > 2 * LONGEST_S:
            self._failures = 0
        self._what, self._failed = what, now
        self._next = now + min(FIRST_S * 2.0 ** min(self._failures, 32), LONGEST_S)
        self._failures += 1
