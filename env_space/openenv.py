"""OpenEnv's protocol: a WebSocket at `/ws` with one game at a time, and the HTTP routes of OpenEnv's tools.

The protocol is implemented here, because the `openenv` package installs a hundred others. The texts are those
that clients of OpenEnv's public Wordle environment understand: a guess is in square brackets, the marks are
the letters G, Y and X below "Feedback:", and an invalid guess is answered "You attempted an invalid move".
"""

import asyncio
import json
import re
import secrets
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request, WebSocket
from prometheus_client import Histogram
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.websockets import WebSocketDisconnect, WebSocketDisconnected

from env_space.game import MAX_GUESSES, MAX_SEED, MOVE, GameError, Move, Rules, Split
from env_space.sessions import Origin, Session, Sessions

Answer = dict[str, Any]
MAX_IDLE = 64  # max connections without a game; if `max_sessions` is higher, it is the limit instead
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_EXAMPLES = {4: "lane", 5: "crane", 6: "planet", 7: "strange"}
_LETTERS = str.maketrans("+?-", "GYX")


class Reset(BaseModel):
    """The data of a `reset` message. Without a seed, the server draws one."""

    model_config = ConfigDict(extra="ignore")

    seed: int | None = Field(None, gt=-MAX_SEED, lt=MAX_SEED)
    episode_id: str | None = Field(None, max_length=255)
    split: Split = "train"


class Action(BaseModel):
    """The data of a `step` message: a text with the guess in square brackets, or only the word."""

    model_config = ConfigDict(extra="forbid")

    message: str
    metadata: dict[str, Any] = {}


class Message(BaseModel):
    sender_id: int
    content: str
    category: str


class Observation(BaseModel):
    """What a player sees after a reset or a step. `messages` has one message: the text of the game so far.
    `info` is the last move. `reward` is the reward of the game so far, None before the first step."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    messages: list[Message]
    current_player_id: int = 0
    legal_players: list[int] = [0]
    info: dict[str, Any]
    metadata: dict[str, Any] = {}
    reward: float | None
    done: bool


class State(BaseModel):
    """The state of the connection's game. `last_info` hides the secret until the game is over."""

    episode_id: str | None
    step_count: int
    env_id: str = "Wordle-v0"
    num_players: int = 1
    max_turns: int = MAX_GUESSES
    turn: int
    last_reward: float
    last_info: dict[str, Any]
    raw_state: dict[str, Any] = {}


class Table:
    """One connection, and the game in play on it."""

    def __init__(self, sessions: Sessions, rules: Rules) -> None:
        self._sessions = sessions
        self._rules = rules
        self._prompt = _rules_text(rules.settings.length, rules.settings.hard_mode)
        self._session: Session | None = None
        self._episode: str | None = None
        self._text = ""
        self._last: Answer = {}  # the last move

    def answer(self, raw: str) -> Answer | None:
        """Answer one message. Returns None if the message ends the connection."""
        if (message := _object(raw)) is None:
            example = '{"type": "reset", "data": {}}'
            return _error("INVALID_JSON", f"The message is not a JSON object: send one like {example}.")
        data = message.get("data", {})
        try:
            match message.get("type"):
                case "reset":
                    return self._reset(Reset.model_validate(data))
                case "step":
                    return self._step(Action.model_validate(data))
                case "state":
                    return self._state()
                case "close":
                    return None
            return _error("UNKNOWN_TYPE", "The message's type must be one of reset, step, state, close.")
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "data"
            sentence = f"The message's '{place}' cannot be used: {first['msg']}"
            return _error("VALIDATION_ERROR", f"{sentence}; GET /schema shows what to send.")
        except GameError as error:
            if error.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                return _error("EXECUTION_ERROR", error.detail)
            counts = {"active_sessions": len(self._sessions), "max_sessions": self._sessions.capacity}
            return _error("CAPACITY_REACHED", error.detail, **counts)

    @property
    def idle(self) -> bool:
        return self._session is None or self._session.game.over

    def leave(self) -> None:
        """End the game. If it is not over, it counts as given up."""
        if self._session is not None:
            self._sessions.end(self._session)
            self._session = None

    def _reset(self, reset: Reset) -> Answer:
        seed = secrets.randbelow(MAX_SEED) if reset.seed is None else reset.seed
        game = self._rules.deal(seed, reset.split)
        self.leave()
        self._session = self._sessions.open(uuid4(), Origin(seed, reset.split, "ws"), game)
        self._episode = reset.episode_id or str(self._session.id)
        self._text = f"[GAME] {self._prompt}"
        self._last = {}
        return self._observation()

    def _step(self, action: Action) -> Answer:
        if self._session is None:
            raise GameError(409, "No game is in play on this connection: send a reset first.")
        found = _BRACKETS.findall(action.message)
        word = str(found[-1] if found else action.message).strip()
        move = self._sessions.play(self._session.id, self._session.game.turns + 1, word)
        self._last = MOVE.dump_python(move)
        self._text += _story(action.message, move)
        return self._observation()

    def _state(self) -> Answer:
        turn = self._last.get("turn", 0)
        reward = self._last.get("reward", 0.0)
        state = State(
            episode_id=self._episode, step_count=turn, turn=turn, last_reward=reward, last_info=self._last
        )
        return {"type": "state", "data": state.model_dump()}

    def _observation(self) -> Answer:
        reward = self._last.get("reward")
        done = self._last.get("done", False)
        message = Message(sender_id=-1, content=self._text, category="MESSAGE")
        seen = Observation(prompt=self._prompt, messages=[message], info=self._last, reward=reward, done=done)
        data = {"observation": seen.model_dump(exclude={"reward", "done"}), "reward": reward, "done": done}
        return {"type": "observation", "data": data}


def _error(code: str, message: str, **more: Any) -> Answer:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def _object(raw: str | bytes) -> Answer | None:
    """Parse `raw`. Returns None if it is not a JSON object."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _rpc_id(given: Any) -> str | int | None:
    """The id of a JSON-RPC call, to return it: a text or an integer. None for anything else, such as a text
    with half a character, which no answer could hold."""
    if isinstance(given, str):
        return given if given.isprintable() else None
    return given if type(given) is int else None


def _rules_text(length: int, hard_mode: bool) -> str:
    """The text with which every game begins."""
    hints = "A guess must use every hint that you were given.\n" if hard_mode else ""
    return (
        f"You are playing Wordle. The secret is an English word of {length} letters; "
        f"you have {MAX_GUESSES} guesses.\n"
        f"Write each guess between square brackets, like [{_EXAMPLES[length]}].\n"
        "Every letter is then marked: G if it is in the right place, Y if it is in the word but elsewhere, "
        "X if it is not in the word.\n"
        f"{hints}A guess that is not a word costs a turn."
    )


def _story(message: str, move: Move) -> str:
    """The text that a move adds to the text of the game."""
    text = f"\n[Player 0] {message[:200]}\n[GAME] "
    if move.valid:
        text += f"Feedback:\n{' '.join(move.word.upper())}\n{' '.join(move.feedback.translate(_LETTERS))}\n"
    else:
        text += "You attempted an invalid move. "
    if move.message:
        text += f"{move.message} "
    if move.solved:
        return f"{text}You found the word."
    if move.done:
        return f"{text}The game is over; the word was {move.secret}."
    left = MAX_GUESSES - move.turn
    return f"{text}You have {left} {'guess' if left == 1 else 'guesses'} left."


def add_routes(app: FastAPI, sessions: Sessions, rules: Rules, seconds: Histogram) -> None:
    idle: dict[WebSocket, None] = {}  # connections without a game; the first has been quiet for longest

    @app.websocket("/ws")
    async def play(socket: WebSocket) -> None:
        await socket.accept()
        table = Table(sessions, rules)
        try:
            while True:
                idle.pop(socket, None)
                if table.idle:
                    idle[socket] = None
                if len(idle) > max(MAX_IDLE, sessions.capacity):
                    oldest = next(iter(idle))
                    del idle[oldest]
                    busy = "Too many connections wait without a game: connect again and send a reset."
                    with suppress(WebSocketDisconnect, WebSocketDisconnected):  # `oldest` may be closed
                        await oldest.close(1013, busy)
                async with asyncio.timeout(sessions.ttl_s):
                    message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                raw = message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace")
                with seconds.time():
                    answer = table.answer(raw)
                if answer is None:
                    await socket.close()
                    break
                await socket.send_text(json.dumps(answer))
        except (WebSocketDisconnect, WebSocketDisconnected):
            pass
        except TimeoutError:
            silent = f"Closed after {sessions.ttl_s:g} s without a message: connect again and send a reset."
            await socket.close(1001, silent)
        finally:
            idle.pop(socket, None)
            table.leave()

    @app.get("/schema")
    async def schema() -> Answer:
        """The JSON schemas of the messages on `/ws`."""
        kinds: tuple[type[BaseModel], ...] = (Reset, Action, Observation, State)
        return {kind.__name__.lower(): kind.model_json_schema() for kind in kinds}

    @app.get("/metadata")
    async def metadata() -> dict[str, str]:
        """Name and description of this environment."""
        about = "Seeded games of Wordle over HTTP and OpenEnv's WebSocket, with exact feedback."
        return {"name": "wordle", "description": about, "version": "0.1.0", "documentation_url": "/docs"}

    @app.post("/mcp", include_in_schema=False)
    async def mcp(request: Request) -> Answer:
        """Answer JSON-RPC, which OpenEnv requires of every environment. This environment has no MCP tools."""
        call = _object(await request.body()) or {}
        answer: Answer = {"jsonrpc": "2.0", "id": _rpc_id(call.get("id"))}
        if call.get("method") == "tools/list":
            return answer | {"result": {"tools": []}}
        error = {"code": -32601, "message": "This environment has no MCP tools: play over /ws."}
        return answer | {"error": error}
