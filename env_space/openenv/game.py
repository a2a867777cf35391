"""OpenEnv's messages as moves of a game: what comes over one connection, and what is answered."""

import json
import secrets
from typing import Any
from uuid import UUID, uuid4

from pydantic import ValidationError

from env_space.messages import MOVE, SEEDS
from env_space.openenv.models import Action, Reset
from env_space.openenv.text import guessed_word, prompt, story
from env_space.rules import Rules, SplitError
from env_space.sessions import FullError, Origin, SessionError, Sessions
from env_space.wordle import MAX_GUESSES, GameOverError, Move

Answer = dict[str, Any]
RESET_FIRST = "No game is in play on this connection; send a reset first."


class ProtocolError(Exception):
    """A message that cannot be served, under one of OpenEnv's error codes."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.answer: Answer = {"type": "error", "data": {"message": message, "code": code, **more}}


class Table:
    """One connection and the game that is played on it."""

    def __init__(self, sessions: Sessions, rules: Rules) -> None:
        self._sessions, self._rules = sessions, rules
        self._prompt = prompt(rules.length, rules.hard_mode)
        self._session: UUID | None = None
        self._episode: str | None = None
        self._text, self._moves = "", 0
        self._last: Move | None = None

    def answer(self, raw: str) -> Answer | None:
        """The answer to one message; None to one that ends the connection."""
        try:
            return self._dispatch(_parse(raw))
        except ProtocolError as error:
            return error.answer
        except ValidationError as error:
            return ProtocolError("VALIDATION_ERROR", _sentence(error)).answer
        except FullError as error:
            taken, places = len(self._sessions), self._sessions.capacity
            return ProtocolError(
                "CAPACITY_REACHED", str(error), active_sessions=taken, max_sessions=places
            ).answer
        except (SessionError, SplitError, GameOverError) as error:
            return ProtocolError("EXECUTION_ERROR", str(error)).answer

    def leave(self) -> None:
        """End the game, which is given up if it was not over."""
        if self._session is not None:
            self._sessions.leave(self._session)
            self._session = None

    def _dispatch(self, message: Answer) -> Answer | None:
        kind, data = message.get("type"), message.get("data", {})
        if kind == "reset":
            return self._reset(Reset.model_validate(data))
        if kind == "step":
            return self._step(Action.model_validate(data))
        if kind == "state":
            return {"type": "state", "data": self._state()}
        if kind == "close":
            return None
        raise ProtocolError("UNKNOWN_TYPE", "The type of a message is one of reset, step, state, close.")

    def _reset(self, reset: Reset) -> Answer:
        seed = secrets.randbelow(SEEDS) if reset.seed is None else reset.seed
        game = self._rules.deal(seed, reset.split)
        self.leave()
        session = self._sessions.open(uuid4(), Origin(seed, reset.split, "ws"), game)
        self._session = session.id
        self._episode = reset.episode_id or str(session.id)
        self._text, self._moves, self._last = f"[GAME] {self._prompt}", 0, None
        return self._observation()

    def _step(self, action: Action) -> Answer:
        if self._session is None:
            raise ProtocolError("EXECUTION_ERROR", RESET_FIRST)
        move = self._sessions.play(self._session, self._moves + 1, guessed_word(action.message))
        self._last, self._moves = move, self._moves + 1
        self._text += story(action.message, move)
        return self._observation()

    def _observation(self) -> Answer:
        observation = {
            "prompt": self._prompt,
            "messages": [{"sender_id": -1, "content": self._text, "category": "MESSAGE"}],
            "current_player_id": 0,
            "legal_players": [0],
            "info": self._info(),
            "metadata": {},
        }
        reward = self._last.reward if self._last else None
        done = self._last.done if self._last else False
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

    def _info(self) -> Answer:
        return MOVE.dump_python(self._last) if self._last else {}

    def _state(self) -> Answer:
        return {
            "episode_id": self._episode,
            "step_count": self._moves,
            "env_id": "Wordle-v0",
            "num_players": 1,
            "max_turns": MAX_GUESSES,
            "turn": self._moves,
            "last_reward": self._last.reward if self._last else 0.0,
            "last_info": self._info(),
            "raw_state": {},
        }


def _parse(raw: str) -> Answer:
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ProtocolError("INVALID_JSON", 'A message is a JSON object like {"type": "reset", "data": {}}.')
    return message


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "data"
    return f"The message's '{place}' cannot be used: {first['msg']}; GET /schema shows what to send."
