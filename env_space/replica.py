"""One turn of the policy, asked of a replica's OpenAI-compatible chat endpoint, as in training."""

import re
from dataclasses import dataclass
from functools import cache
from ssl import SSLContext
from typing import Any

import httpx

from env_space.keys import replica_headers

PATIENCE_S = 60.0
_CALLED_WORD = re.compile(r'"word"\s*:\s*"([^"]*)"')
_ASLEEP = "If it is a Space that sleeps, open its page to wake it, and try again in a few minutes."
# The same tool as in training, so that the policy reads the prompt it was trained on.
_TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the secret word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A five-letter English word."}},
            "required": ["word"],
        },
    },
}


class ReplicaError(Exception):
    """The replica did not answer with a turn; the message is a sentence for who watches."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy wrote, the word it called the tool with (None: no call), and the weights' version."""

    text: str
    word: str | None
    version: str


class Replica:
    """A conversation with the policy that one replica serves."""

    def __init__(self, http: httpx.AsyncClient, prompt: str) -> None:
        self._http = http
        self._messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
        self._model = ""

    async def turn(self) -> Turn:
        """The policy's next turn. Raises ReplicaError."""
        try:
            if not self._model:
                self._model = (await self._ask("GET", "/v1/models")).json()["data"][0]["id"]
            answer = await self._ask("POST", "/v1/chat/completions", self._request())
            text = answer.json()["choices"][0]["message"]["content"] or ""
        except (ValueError, LookupError, TypeError):
            raise ReplicaError(f"The replica did not answer as vLLM does. {_ASLEEP}") from None
        self._messages.append({"role": "assistant", "content": text})
        called = _CALLED_WORD.findall(text)
        return Turn(text, called[-1] if called else None, answer.headers.get("x-policy-version", ""))

    def tell(self, observation: str) -> None:
        """Let the policy see what came of its guess."""
        self._messages.append({"role": "tool", "content": observation, "tool_call_id": "guess"})

    def _request(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": self._messages,
            "tools": [_TOOL],
            "tool_choice": "none",  # the call stays in the text, so no parser needs to be set up in vLLM
            "temperature": 1.0,
            "include_stop_str_in_output": True,  # the end of a call may be what stops the policy
            "chat_template_kwargs": {"enable_thinking": False},
        }

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.TimeoutException:
            raise ReplicaError(f"The replica did not answer within {PATIENCE_S:.0f} s. {_ASLEEP}") from None
        except httpx.HTTPError:
            raise ReplicaError(f"The replica cannot be reached. {_ASLEEP}") from None
        if answer.status_code != httpx.codes.OK:
            raise ReplicaError(f"The replica cannot play now: {_reason(answer)}. {_ASLEEP}")
        return answer


def connect(url: str, key: str) -> httpx.AsyncClient:
    """A client for the replica at `url`, with what opens it."""
    headers = replica_headers(url, key)
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=_tls()
    )


@cache
def _tls() -> SSLContext:
    """Reading the certificates takes tens of milliseconds, in which no player is answered."""
    return httpx.create_ssl_context(trust_env=False)


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return f"it answers {answer.status_code}"
