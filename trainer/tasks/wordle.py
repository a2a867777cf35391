"""Wordle as a TRL environment: tool, reward and prompt. The game itself runs in the Wordle Space."""

import asyncio
import contextlib
import functools
import json
import time
import uuid
from typing import Annotated, Any

import aiohttp
from datasets import Dataset
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from delta_weight_sync import ConfigError
from trainer import spaces
from trainer.settings import Settings
from trainer.tasks import Task

PROMPT = """You are playing Wordle. Find the secret five-letter word in at most six guesses.
Call the tool `guess` with one five-letter English word per turn. Each answer repeats your letters with their
position and a mark: + right letter in the right place, ? right letter in another place, - not in the word.
Example: `c1-r2?a3+n4-e5-`. A guess that is not a word costs a turn. Use what the marks tell you."""

_LETTERS = 5  # of a word, as `PROMPT` says
_RETRY_S = 600.0
_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
_RETRIED = (408, 425, 429)  # and all from 500 on: what the Hub may answer while a Space starts
_MAX_ANSWER = 64 << 10  # bytes


class Played(BaseModel):
    """An answer of the environment, checked because one infinite reward would ruin all weights."""

    model_config = ConfigDict(strict=True)

    reward: Annotated[float, Field(ge=-1000, le=1000)]
    done: bool = True
    solved: bool = False
    valid: bool = True
    observation: Annotated[str, Field(max_length=1000)] = ""


class GameLostError(ValueError):
    """The server no longer knows the game, or its answer is invalid; the game is not scored."""


class WordleEnv:
    """Plays one game at a time over HTTP. All members of a GRPO group have the same seed and secret.

    A request whose answer was lost is repeated. The repetition has no second effect, because the client
    chooses the session's id and numbers the turns. `reset` sends no request; the first request after it
    opens the session. If `letters` is not 0, games of words of another length end the training.
    """

    def __init__(self, url: str, letters: int = 0) -> None:
        self._entry = url  # or a file with the URL
        self._letters = letters

    def reset(self, seed: int, split: str = "train", **row: Any) -> None:
        """Prepare the game of `seed`, on the words of the split: `train` or `held_out`."""
        self._session = uuid.uuid4().hex
        self._turn = 0
        self._invalid = 0  # guesses
        self._opening = {"seed": seed, "split": split, "id": self._session}
        self._reward: float | None = None
        self.done = False
        self.solved = False

    async def guess(self, word: str) -> str:
        """Guess the secret word.

        Args:
            word: A five-letter English word.

        Returns:
            The letters of the guess, each with its position and mark.
        """
        if self.done:
            raise ValueError("the game is over")
        body = {"word": word, "turn": self._turn + 1}
        try:
            await self._open()
            played = _played(await self._call("POST", f"/sessions/{self._session}/guess", body))
        except GameLostError:
            self.done = True
            self._reward = None
            raise
        self._turn += 1  # only now: a refused guess takes no turn
        self._invalid += not played.valid
        self.done = played.done
        self.solved = played.solved
        self._reward = played.reward
        return played.observation

    async def get_reward(self) -> float | None:
        """The game's reward, or None after a `GameLostError`. TRL does not score a game without a reward."""
        if not self.done:  # the policy stopped calling the tool
            self._reward = None
            self.done = True
            with contextlib.suppress(GameLostError):
                await self._open()
                self._reward = _played(await self._call("DELETE", f"/sessions/{self._session}", None)).reward
        return self._reward

    @property
    def rates(self) -> dict[str, tuple[int, int]]:
        """Whether the game was solved, and how many guesses were invalid. Empty without a guess or reward."""
        if not self._turn or self._reward is None:
            return {}
        return {"games/solve_rate": (self.solved, 1), "games/invalid_rate": (self._invalid, self._turn)}

    async def _open(self) -> None:
        """Open the session, if no turn was played yet. A repetition has no second effect."""
        if self._turn:
            return
        opened = await self._call("POST", "/sessions", self._opening)
        length = opened.get("length") if isinstance(opened, dict) else None
        if self._letters and length and length != self._letters:
            raise ConfigError(
                f"the environment at {self._entry} has words of {length} letters, but the prompt says"
                f" {self._letters}: write one with --prompt, or start the environment without WORDLE_LENGTH"
            )

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        # A redirect would carry the key to another host.
        options: dict[str, Any] = {"json": body, "allow_redirects": False, "timeout": _TIMEOUT}
        deadline = time.monotonic() + _RETRY_S
        shared = spaces.connections.get(None)
        while True:
            url = spaces.env_address(self._entry).rstrip("/")
            try:
                headers = spaces.headers(url, "env")
                async with (
                    contextlib.nullcontext(shared) if shared else aiohttp.ClientSession() as session,
                    session.request(method, f"{url}{path}", headers=headers, **options) as response,
                ):
                    status, text = response.status, await _read(response)
                page = status < 300 and text.lstrip().startswith(b"<")  # also the Hub's, while a Space starts
                starting = page or status >= 500 or status in _RETRIED
                starting |= spaces.is_ended_job(url, status) and b'"detail"' not in text
                if not starting or time.monotonic() > deadline:
                    break
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the environment at {url} does not answer: {error}") from error
            await asyncio.sleep(1.0)
        answer: Any = None
        detail = ""
        with contextlib.suppress(ValueError, RecursionError):  # the latter if the answer is nested too deeply
            answer = json.loads(text)
            detail = str(answer["detail"]) if isinstance(answer, dict) and "detail" in answer else ""
        if 200 <= status < 300:
            return answer
        if not detail:  # the Wordle Space always sends a detail
            fix = "check --env_url; for a private Space, set SPACE_HF_TOKEN and add the URL to SPACES"
            raise ValueError(f"{url} answered {status} and is not the Wordle Space: {fix}")
        # 409 to an opening: the session was opened before and has ended, as after a long pause.
        if status == 404 or (status == 409 and path == "/sessions"):
            raise GameLostError(detail)
        raise ValueError(f"{url} refused: {detail}")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readexactly(_MAX_ANSWER)
    except asyncio.IncompleteReadError as all_of_it:
        return all_of_it.partial


def _played(answer: Any) -> Played:
    try:
        return Played.model_validate(answer)
    except ValidationError as error:
        raise GameLostError(f"the environment's answer is invalid: {error.errors()[0]['msg']}") from None


def make_dataset(prompt: str, games: int, seed: int) -> Dataset:
    """Make `games` rows with the same prompt, each with its own seed. TRL passes each row to `reset`."""
    message = [{"role": "user", "content": prompt}]
    return Dataset.from_dict({"prompt": [message] * games, "seed": [seed * games + i for i in range(games)]})


def make_task(settings: Settings, prompts: int, seed: int) -> Task:
    if not settings.env_url:
        raise SystemExit("--task wordle needs --env_url <URL of the Wordle Space>")
    dataset = make_dataset(settings.prompt or PROMPT, prompts, seed)
    letters = 0 if settings.prompt else _LETTERS
    return Task(dataset, [], functools.partial(WordleEnv, settings.env_url, letters))
