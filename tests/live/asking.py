"""Greedy questions to a replica, and what its answers say about themselves."""

from dataclasses import dataclass
from typing import Any

import httpx

from tests.live.replica import PATIENCE_S

KEY = "planted-key-of-this-replica"
HEADERS = {"X-Space-Key": KEY}  # a vLLM without a gateway does not mind it


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    cached: int  # tokens of the prompt that came from the prefix cache
    spans: list[tuple[str, int, int]]  # version, first token, token after the last
    headers: httpx.Headers


def ask(url: str, prompt: list[int], max_tokens: int) -> Answer:
    answer = httpx.post(
        f"{url}/v1/completions", json=body(prompt, max_tokens), headers=HEADERS, timeout=PATIENCE_S
    )
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
