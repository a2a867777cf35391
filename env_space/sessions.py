"""The store of games. Games that ended stay for a while, so that a retried request is answered again."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any
from uuid import UUID

from env_space.game import MAX_STORED, Game, GameError, Move, quote

START_ANOTHER = "POST /sessions starts a new one"


@dataclass(frozen=True, slots=True)
class Origin:
    """What selected the secret of a game, and the protocol it is played over."""

    seed: int
    split: str = "train"
    via: str = "http"


@dataclass(slots=True)
class Session:
    """One game under its id; `used_at` is when it was opened, last played or ended."""

    id: UUID
    origin: Origin
    game: Game
    client: str
    opened_at: float
    used_at: float
    expired: bool = False

    @property
    def outcome(self) -> str:
        """How the game ended: solved, lost, expired, or gave_up if it was closed early."""
        if self.game.solved:
            return "solved"
        if self.expired:
            return "expired"
        return "gave_up" if self.game.gave_up else "lost"

    def play(self, turn: int, word: str) -> Move:
        """Play `word` as move number `turn`, or repeat its result if the same word was played as that move.
        Raises GameError for another word in a played turn, for a skipped turn, and after the end."""
        moves = self.game.moves
        if turn <= len(moves):
            move = moves[turn - 1]
            if move.word != word.lower()[:MAX_STORED]:
                raise GameError(409, f"Turn {turn} was already played with another word, {quote(move.word)}.")
            return move
        if turn > len(moves) + 1 and not self.game.over:
            raise GameError(409, f"Turn {turn} cannot be played yet; the next turn is {len(moves) + 1}.")
        return self.game.guess(word)

    def summary(self) -> dict[str, Any]:
        """The game in one line of the log."""
        game, parts = self.game, self.game.reward_parts()
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


class Sessions:
    """At most `capacity` games in play.

    A game expires `ttl_s` seconds after its last move; other requests do not keep it alive. Games that
    ended take no room. They answer retries for `ttl_s` seconds, or until `capacity` later games have ended.
    Nothing here awaits, so one event loop needs no locks.

    Args:
        on_end: Called once for every game, when it ends.
        advice: How to get more room, besides waiting.
        per_client: Games in play of one client, None for no limit.
    """

    def __init__(
        self,
        capacity: int,
        ttl_s: float,
        on_end: Callable[[Session], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        advice: str = ", or raise WORDLE_MAX_SESSIONS",
        per_client: int | None = None,
    ) -> None:
        self.capacity, self.ttl_s = capacity, ttl_s
        self._on_end, self._clock = on_end, clock
        self._advice, self._per_client = advice, per_client
        self._playing: dict[UUID, Session] = {}  # least recently played first
        self._ended: dict[UUID, Session] = {}  # first ended first

    def __len__(self) -> int:
        return len(self._playing)

    def open(self, id: UUID, origin: Origin, game: Game, client: str = "") -> Session:
        """Put `game` in play under `id`, or find the session that the same request opened before.

        Raises GameError: 409 if `id` belongs to another seed or to a game that ended, 503 if there is no
        room, 429 if there is none for this `client`.
        """
        self.reap()
        if id in self._ended:
            raise GameError(409, f"Session {id} has ended; choose a new id.")
        if session := self._playing.get(id):
            if (then := session.origin) != origin:
                opened = f"Session {id} was opened with seed {then.seed} of split {then.split}"
                raise GameError(409, f"{opened}, not {origin.seed} of {origin.split}; choose a new id.")
            return session
        if len(self._playing) >= self.capacity:
            raise GameError(503, f"{self.capacity} games are in play; try again in a moment{self._advice}.")
        limit = self._per_client
        if limit and sum(session.client == client for session in self._playing.values()) >= limit:
            raise GameError(429, f"{limit} games of your address are in play; end one of them, or wait.")
        now = self._clock()
        session = self._playing[id] = Session(id, origin, game, client, now, now)
        return session

    def play(self, id: UUID, turn: int, word: str) -> Move:
        """Play a move as `Session.play` does. An unknown or expired session is a GameError too."""
        session = self._find(id)
        if session.expired:
            expired = f"Session {id} expired after {self.ttl_s:g} s without a move"
            raise GameError(404, f"{expired}; {START_ANOTHER}.")
        turns = session.game.turns
        move = session.play(turn, word)
        if session.game.over:
            self._end(session)
        elif session.game.turns > turns:
            self._playing[id] = self._playing.pop(id)
            session.used_at = self._clock()
        return move

    def close(self, id: UUID) -> Game:
        """End the session; a game that is not over is given up. Raises GameError if it is unknown."""
        session = self._find(id)
        self._end(session)
        return session.game

    def leave(self, id: UUID) -> None:
        """End the session if it exists."""
        with suppress(GameError):
            self.close(id)

    def reap(self) -> None:
        """Expire games without moves, and forget those that ended long enough ago."""
        horizon = self._clock() - self.ttl_s
        for session in _unused_since(horizon, self._ended):
            del self._ended[session.id]
        for session in _unused_since(horizon, self._playing):
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
            session.used_at = self._clock()
            self._ended[session.id] = session
            self._on_end(session)
        if len(self._ended) > self.capacity:
            del self._ended[next(iter(self._ended))]


def _unused_since(horizon: float, sessions: dict[UUID, Session]) -> list[Session]:
    return list(takewhile(lambda session: session.used_at <= horizon, sessions.values()))
