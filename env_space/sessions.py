"""The store of games. A session is one game. Games that ended stay for a while, to answer retries."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any
from uuid import UUID

from env_space.game import MAX_STORED, Game, GameError, Move, quote

START_ANOTHER = "start a new one"
_SOON = {"Retry-After": "1"}  # a game takes seconds, and its end makes room


@dataclass(frozen=True, slots=True)
class Origin:
    """What selected the secret of a game, and the route of its moves: `http`, `page`, `ws` or `watch`."""

    seed: int
    split: str = "train"
    via: str = "http"


@dataclass(slots=True)
class Session:
    """One game and its id. `used_at` is the time when the game was opened, last played or ended."""

    id: UUID
    origin: Origin
    game: Game
    opened_at: float
    used_at: float
    expired: bool = False

    @property
    def outcome(self) -> str:
        """How a game that is over ended: solved, lost, expired, or gave_up if it was closed early."""
        if self.game.solved:
            return "solved"
        if self.expired:
            return "expired"
        return "gave_up" if self.game.gave_up else "lost"

    def summary(self) -> dict[str, Any]:
        """The game, as a line of the log."""
        game = self.game
        parts = self.game.reward_parts()
        return {
            "session": str(self.id),
            "outcome": self.outcome,
            **asdict(self.origin),
            "turns": game.turns,
            "invalid": game.invalid,
            "repeated": game.repeated,
            "reward": round(parts.total, 6),
            "reward_parts": {name: round(value, 6) for name, value in asdict(parts).items()},
            "seconds": round(self.used_at - self.opened_at, 3),
        }


@dataclass(eq=False)
class Sessions:
    """Holds at most `capacity` games in play. Nothing here awaits, so one event loop needs no locks.

    A game expires `ttl_s` seconds after its start or its last move; other requests do not keep it alive.
    An ended game stays for `ttl_s` seconds, or until `capacity` more games end. While the game stays, retries
    get the same answers as before. But if the game expired, retries of its moves are refused.
    """

    capacity: int
    ttl_s: float
    on_end: Callable[[Session], None] = lambda _: None  # called once for every game, when it ends
    clock: Callable[[], float] = time.monotonic
    fix: str = "try again in a moment"  # what a client can do if the store is full
    _playing: dict[UUID, Session] = field(default_factory=dict)  # least recently played first
    _ended: dict[UUID, Session] = field(default_factory=dict)  # first ended first

    def __len__(self) -> int:
        self.reap()
        return len(self._playing)

    def open(self, id: UUID, origin: Origin, game: Game) -> Session:
        """Put `game` in play under `id`. If the same request was sent before, return its session.

        Raises GameError: 409 if `id` belongs to another origin or to a game that ended, 503 if the store is
        full.
        """
        self.reap()
        if id in self._ended:
            raise GameError(409, f"Session {id} has ended: choose a new id.")
        if session := self._playing.get(id):
            if (then := session.origin) != origin:
                opened = f"Session {id} was opened with seed {then.seed} of split {then.split}"
                raise GameError(409, f"{opened}, not {origin.seed} of {origin.split}: choose a new id.")
            return session
        if len(self._playing) >= self.capacity:
            raise GameError(503, f"{self.capacity} games are in play: {self.fix}.", _SOON)
        now = self.clock()
        session = self._playing[id] = Session(id, origin, game, now, now)
        return session

    def play(self, id: UUID, turn: int, word: str) -> Move:
        """Play `word` in turn number `turn`. If the same move was played before, return the same result.

        Raises GameError if the turn was played with another word, if an earlier turn is missing, if the game
        is over, or for an unknown or expired session.
        """
        session = self._find(id)
        if session.expired:
            expired = f"Session {id} expired after {self.ttl_s:g} s without a move"
            raise GameError(404, f"{expired}; {START_ANOTHER}.")
        moves = session.game.moves
        if turn <= len(moves):
            move = moves[turn - 1]
            if move.word != word.lower()[:MAX_STORED]:
                raise GameError(409, f"Turn {turn} was already played with another word, {quote(move.word)}.")
            return move
        if turn > len(moves) + 1 and not session.game.over:
            raise GameError(409, f"Turn {turn} cannot be played yet; the next turn is {len(moves) + 1}.")
        move = session.game.guess(word)
        if session.game.over:
            self._end(session)
        else:
            self._playing[id] = self._playing.pop(id)
            session.used_at = self.clock()
        return move

    def close(self, id: UUID) -> Game:
        """End the session. A game that is not over counts as given up. Raises GameError for an unknown id."""
        session = self._find(id)
        self._end(session)
        return session.game

    def end(self, session: Session) -> None:
        """End this session. If it has ended already, nothing changes."""
        self.reap()
        self._end(session)

    def reap(self) -> None:
        """Let idle games expire, and forget games that ended long enough ago."""
        horizon = self.clock() - self.ttl_s
        for store in (self._ended, self._playing):
            for session in list(takewhile(lambda session: session.used_at <= horizon, store.values())):
                if not self._ended.pop(session.id, None):  # the game is still in play
                    session.expired = True
                    self._end(session)

    def _find(self, id: UUID) -> Session:
        self.reap()
        session = self._playing.get(id) or self._ended.get(id)
        if session is None:
            raise GameError(404, f"Session {id} is unknown, or ended long ago; {START_ANOTHER}.")
        return session

    def _end(self, session: Session) -> None:
        session.game.give_up()
        if self._playing.pop(session.id, None):
            session.used_at = self.clock()
            self._ended[session.id] = session
            self.on_end(session)
        if len(self._ended) > self.capacity:
            del self._ended[next(iter(self._ended))]
