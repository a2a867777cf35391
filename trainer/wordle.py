"""Wordle as a TRL environment: the tool, the reward and the prompt; the game itself runs in the env Space."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from typing import Any

import aiohttp
from datasets import Dataset

from trainer import space_access

PROMPT = """You are playing Wordle. Find the secret five-letter word in at most six guesses.
Call the tool `guess` with one five-letter English word per turn. Each answer repeats your letters with their
position and a mark: + right letter in the right place, ? right letter in another place, - not in the word.
Example: `c1-r2?a3+n4-e5-`. A guess that is not a word costs a turn. Use what the marks tell you."""

_PATIENCE_S = 600.0
_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
_NOT_NOW = (429, 502, 503, 504)


class GameLostError(ValueError):
    """The server does not know the game any more: it was restarted, or the game expired."""


class WordleEnv:
    """One game at a time over HTTP. Every member of a GRPO group gets the row's seed, so the same secret.

    Calls are idempotent on the server (chosen session id, numbered turns), so a lost answer is asked again.
    TRL awaits one `reset` after the other, so the session is opened with the first guess, in parallel. What
    asks the server is asynchronous: a rollout waits for its game without a thread.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._opening: dict[str, Any] = {}
        self._session, self._turn = "", 0
        self._reward: float | None = None
        self.done, self.solved = True, False

    def reset(self, seed: int, split: str = "train", **row: Any) -> None:
        """Start the game of `seed`, on the words of training or on the `held_out` ones."""
        self._session, self._turn = uuid.uuid4().hex, 0
        self._opening = {"seed": seed, "split": split, "id": self._session}
        self._reward, self.done, self.solved = None, False, False

    async def guess(self, word: str) -> str:
        """Guess the secret word.

        Args:
            word: A five-letter English word.

        Returns:
            The letters of the guess, each with its position and mark.
        """
        if self.done:
            raise ValueError("the game is over")
        if self._turn == 0:
            await self._open()
        self._turn += 1
        try:
            answer = await self._call(
                "POST", f"/sessions/{self._session}/guess", {"word": word, "turn": self._turn}
            )
        except GameLostError:
            self.done, self._reward = True, None
            raise
        self.done, self.solved, self._reward = answer["done"], answer["solved"], answer["reward"]
        return str(answer["observation"])

    async def get_reward(self) -> float | None:
        """The game's reward; None (not scored by TRL) if the game was lost to a fault of the server."""
        if not self.done:  # the policy stopped calling the tool
            if self._turn == 0:
                await self._open()
            self._reward, self.done = None, True
            with contextlib.suppress(GameLostError):
                self._reward = (await self._call("DELETE", f"/sessions/{self._session}", None))["reward"]
        return self._reward

    async def _open(self) -> None:
        await self._call("POST", "/sessions", self._opening)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                status, answer, wait_s = await self._ask(method, path, body)
                if status not in _NOT_NOW or time.monotonic() > deadline:
                    break
                await asyncio.sleep(wait_s)
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the environment at {self._url} does not answer: {error}") from error
                await asyncio.sleep(1.0)
        if not 200 <= status < 300:
            raise _refusal(self._url, status, answer)
        return dict(answer)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any, float]:
        """Status, JSON (None if it is none), and the seconds after which to ask again."""
        # A redirect would carry the key to wherever it leads.
        headers = space_access.env_headers(self._url)
        options = {"headers": headers, "allow_redirects": False, "timeout": _TIMEOUT}
        async with (
            space_access.connections() as session,
            session.request(method, f"{self._url}{path}", json=body, **options) as response,
        ):
            wait_s = float(response.headers.get("retry-after", 1))
            return response.status, _parsed(await response.read()), wait_s


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refusal(url: str, status: int, answer: Any) -> ValueError:
    """What a refusal means; only the Wordle Space itself answers with a `detail`."""
    if not isinstance(answer, dict) or "detail" not in answer:
        return ValueError(
            f"{url} answered {status}, which is not the Wordle Space: check --env_url, and if it is private"
            " that SPACE_HF_TOKEN may read it and SPACES names it"
        )
    detail = str(answer["detail"])
    return GameLostError(detail) if status == 404 else ValueError(f"{url} refused: {detail}")


def make_dataset(prompt: str, games: int, seed: int) -> Dataset:
    """`games` rows of one prompt, each with a seed of its own: TRL hands the row to `reset`."""
    message = [{"role": "user", "content": prompt}]
    return Dataset.from_dict({"prompt": [message] * games, "seed": [seed * games + i for i in range(games)]})
