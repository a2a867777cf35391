"""Games in play, and for a while those that ended, so that a retried request gets its answer again."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from uuid import UUID

from env_space.wordle import Game, Move, kept, quote

START_ANOTHER = "POST /sessions starts a new one"


class SessionError(Exception):
    """A request about a session that cannot be served; the message is a sentence for the client."""


class UnknownSessionError(SessionError):
    """No such session, or not any more."""


class ConflictError(SessionError):
    """The request contradicts what was already played."""


class FullError(SessionError):
    """No room for another game."""


class ShareError(SessionError):
    """No room for another game of this client."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a game comes from: what named its secret, and by which way it is played."""

    seed: int
    split: str = "train"
    via: str = "http"


@dataclass(slots=True)
class Session:
    """One game under its id; `used_at` is the clock's reading when it was opened, last played or ended."""

    id: UUID
    origin: Origin
    game: Game
    client: str
    opened_at: float
    used_at: float
    expired: bool = False

    def play(self, turn: int, word: str) -> Move:
        """Play `word` as move number `turn`, or answer as before if that is what was played there.

        Raises ConflictError for another word in a played turn and for a skipped turn, GameOverError after
        the end.
        """
        moves = self.game.moves
        if turn <= len(moves):
            return _replay(moves[turn - 1], word)
        if turn > len(moves) + 1 and not self.game.over:
            raise ConflictError(f"Turn {turn} cannot be played yet; the next turn is {len(moves) + 1}.")
        return self.game.guess(word)


class Sessions:
    """At most `capacity` games in play, and of one client at most `each` (None: as many).

    A game expires `ttl_s` seconds after its last move; asking for it otherwise must not keep a place.
    Games that ended take no room among those in play. They answer retries for `ttl_s` seconds, or until
    `capacity` later games have ended. `on_end` is told of every game once, as it ends. Nothing here awaits,
    so one event loop needs no locks.
    """

    def __init__(
        self,
        capacity: int,
        ttl_s: float,
        on_end: Callable[[Session], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        more: str = ", or raise WORDLE_MAX_SESSIONS",
        each: int | None = None,
    ) -> None:
        self.capacity = capacity
        self._each = each
        self._more = more  # what helps, besides waiting, when all places are taken
        self.ttl_s = ttl_s
        self._on_end = on_end
        self._clock = clock
        self._playing: dict[UUID, Session] = {}  # least recently played first
        self._ended: dict[UUID, Session] = {}  # first ended first

    def __len__(self) -> int:
        """How many games are in play."""
        return len(self._playing)

    def open(self, id: UUID, origin: Origin, game: Game, client: str = "") -> Session:
        """Put `game` in play under `id`, or find the session that the same request opened before.

        Raises ConflictError if `id` belongs to another seed or to a game that ended, FullError if there is
        no room, ShareError if there is none for this `client`.
        """
        self.reap()
        if id in self._playing or id in self._ended:
            return self._reopen(id, origin)
        self._check_room(client)
        now = self._clock()
        session = self._playing[id] = Session(id, origin, game, client, now, now)
        return session

    def play(self, id: UUID, turn: int, word: str) -> Move:
        """Play a move as `Session.play` does. Raises UnknownSessionError too, also after expiry."""
        session = self._find(id)
        if session.expired:
            raise UnknownSessionError(
                f"Session {id} expired after {self.ttl_s:g} s without a move; {START_ANOTHER}."
            )
        turns = session.game.turns
        move = session.play(turn, word)
        if session.game.over:
            self._end(session)
        elif session.game.turns > turns:
            self._playing[id] = self._playing.pop(id)
            session.used_at = self._clock()
        return move

    def close(self, id: UUID) -> Game:
        """End the session; a game that was not over is given up. Raises UnknownSessionError."""
        session = self._find(id)
        self._end(session)
        return session.game

    def leave(self, id: UUID) -> None:
        """As `close`, where nobody asks how it ended."""
        with suppress(UnknownSessionError):
            self.close(id)

    def reap(self) -> None:
        """Expire the games nobody plays, and forget those that ended long enough ago."""
        horizon = self._clock() - self.ttl_s
        for session in _unused_since(horizon, self._ended):
            del self._ended[session.id]
        for session in _unused_since(horizon, self._playing):
            session.expired = True
            self._end(session)

    def _reopen(self, id: UUID, origin: Origin) -> Session:
        session = self._playing.get(id)
        if session is None:
            raise ConflictError(f"Session {id} has ended; choose a new id.")
        if session.origin != origin:
            then, now = session.origin, origin
            raise ConflictError(
                f"Session {id} was opened with seed {then.seed} of split {then.split}, "
                f"not {now.seed} of {now.split}; choose a new id."
            )
        return session

    def _check_room(self, client: str) -> None:
        if len(self._playing) >= self.capacity:
            raise FullError(f"All {self.capacity} places are taken; try again in a moment{self._more}.")
        if self._each and sum(session.client == client for session in self._playing.values()) >= self._each:
            raise ShareError(f"{self._each} games of your address are in play; end one of them, or wait.")

    def _find(self, id: UUID) -> Session:
        self.reap()
        session = self._playing.get(id) or self._ended.get(id)
        if session is None:
            raise UnknownSessionError(f"Session {id} is unknown, or ended long ago; {START_ANOTHER}.")
        return session

    def _end(self, session: Session) -> None:
        session.game.give_up()
        if self._playing.pop(session.id, None):
            session.used_at = self._clock()
            self._ended[session.id] = session
            self._on_end(session)
        if len(self._ended) > self.capacity:
            del self._ended[next(iter(self._ended))]


def _replay(move: Move, word: str) -> Move:
    if move.word != kept(word):
        raise ConflictError(f"Turn {move.turn} was already played with another word, {quote(move.word)}.")
    return move


def _unused_since(horizon: float, sessions: dict[UUID, Session]) -> list[Session]:
    return list(takewhile(lambda session: session.used_at <= horizon, sessions.values()))
