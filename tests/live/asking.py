"""Greedy questions to a replica, and what its answers say about themselves."""

import json
import threading
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    cached: int  # tokens of the prompt that came from the prefix cache
    spans: list[tuple[str, int, int]]  # version, first token, token after the last
    headers: httpx.Headers


def ask(url: str, prompt: list[int], max_tokens: int) -> Answer:
    """Greedy tokens, as many as asked for."""
    answer = httpx.post(f"{url}/v1/completions", json=body(prompt, max_tokens), timeout=120.0)
    content = answer.raise_for_status().json()
    (choice,) = content["choices"]
    return Answer(
        tokens=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        cached=content["usage"]["prompt_tokens_details"]["cached_tokens"],
        spans=spans_of(answer.headers.get("x-policy-versions", "")),
        headers=answer.headers,
    )


def body(prompt: Any, max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
    return {"model": "policy", "prompt": prompt, "return_token_ids": True, **sampling}


def spans_of(text: str) -> list[tuple[str, int, int]]:
    parts = [part.replace("-", ":").split(":") for part in text.split(",") if part]
    return [(version, int(start), int(end)) for version, start, end in parts]


class Stream:
    """A greedy completion whose tokens can be watched as they come."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        self.tokens: list[int] = []
        self._url, self._request = url, {**body(prompt, max_tokens), "stream": True}
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._request, timeout=120.0) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._add(json.loads(line[6:])["choices"][0]["token_ids"])

    def _add(self, tokens: list[int]) -> None:
        with self._news:
            self.tokens += tokens
            self._news.notify_all()

    def first(self, count: int) -> list[int]:
        """The first `count` tokens, as soon as they are there."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.tokens) >= count, timeout=120.0)
            return self.tokens[:count]

    @property
    def running(self) -> bool:
        return len(self.tokens) < self._request["max_tokens"]

    def join(self) -> None:
        self._thread.join()
