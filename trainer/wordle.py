"""Wordle as a TRL environment: the tool, the reward and the prompt; the game itself runs in the env Space."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import uuid
from typing import Any

import httpx
from datasets import Dataset

from trainer import space_access

PROMPT = """You are playing Wordle. Find the secret five-letter word in at most six guesses.
Call the tool `guess` with one five-letter English word per turn. Each answer repeats your letters with their
position and a mark: + right letter in the right place, ? right letter in another place, - not in the word.
Example: `c1-r2?a3+n4-e5-`. A guess that is not a word costs a turn. Use what the marks tell you."""

_PATIENCE_S = 600.0


class GameLostError(ValueError):
    """The server does not know the game any more: it was restarted, or the game expired."""


class WordleEnv:
    """One game at a time over HTTP. Every member of a GRPO group gets the row's seed, so the same secret.

    Calls are idempotent on the server (chosen session id, numbered turns), so a lost answer is asked again.
    TRL awaits one `reset` after the other, so the session is opened with the first guess, in parallel.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._seed, self._session, self._turn = 0, "", 0
        self._reward: float | None = None
        self._done = True

    def reset(self, seed: int, **row: Any) -> None:
        """Start the game of `seed`; the prompt is the dataset's."""
        self._seed, self._session, self._turn = seed, uuid.uuid4().hex, 0
        self._reward, self._done = None, False

    def guess(self, word: str) -> str:
        """Guess the secret word.

        Args:
            word: A five-letter English word.

        Returns:
            The letters of the guess, each with its position and mark.
        """
        if self._done:
            raise ValueError("the game is over")
        if self._turn == 0:
            self._open()
        self._turn += 1
        try:
            answer = self._call(
                "POST", f"/sessions/{self._session}/guess", {"word": word, "turn": self._turn}
            )
        except GameLostError:
            self._done, self._reward = True, None
            raise
        self._done, self._reward = answer["done"], answer["reward"]
        return str(answer["observation"])

    def get_reward(self) -> float | None:
        """The game's reward; None (not scored by TRL) if the game was lost to a fault of the server."""
        if not self._done:  # the policy stopped calling the tool
            if self._turn == 0:
                self._open()
            self._reward, self._done = None, True
            with contextlib.suppress(GameLostError):
                self._reward = self._call("DELETE", f"/sessions/{self._session}", None)["reward"]
        return self._reward

    def _open(self) -> None:
        self._call("POST", "/sessions", {"seed": self._seed, "id": self._session})

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                response = _client(self._url).request(method, path, json=body)
                if response.status_code not in (429, 502, 503, 504) or time.monotonic() > deadline:
                    break
                time.sleep(float(response.headers.get("retry-after", 1)))
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the environment at {self._url} does not answer: {error}") from error
                time.sleep(1.0)
        if not response.is_success:
            raise _refusal(self._url, response)
        answer: dict[str, Any] = response.json()
        return answer


def _refusal(url: str, response: httpx.Response) -> ValueError:
    """What a refusal means; only the Wordle Space itself answers with a `detail`."""
    try:
        detail = str(response.json()["detail"])
    except (ValueError, LookupError, TypeError):
        return ValueError(
            f"{url} answered {response.status_code}, which is not the Wordle Space: check --env_url, and that"
            " HF_TOKEN may read the Space if it is private"
        )
    lost = response.status_code == httpx.codes.NOT_FOUND
    return GameLostError(detail) if lost else ValueError(f"{url} refused: {detail}")


@functools.cache
def _client(url: str) -> httpx.Client:
    """One connection pool per process; httpx clients may be shared by threads."""
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    client = httpx.Client(base_url=url, headers=space_access.headers(url), limits=limits, timeout=30.0)
    atexit.register(client.close)
    return client


def make_dataset(prompt: str, games: int, seed: int) -> Dataset:
    """`games` rows of one prompt, each with a seed of its own: TRL hands the row to `reset`."""
    message = [{"role": "user", "content": prompt}]
    return Dataset.from_dict({"prompt": [message] * games, "seed": [seed * games + i for i in range(games)]})
