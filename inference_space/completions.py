"""Which completions may be asked for: by known fields, as long as the model reads, so many at once.

vLLM takes much more, for callers that it trusts: what costs it minutes or gigabytes is not passed on. What it
checks by itself before it costs anything (types, logprobs, lengths in tokens) is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inference_space.whole import Whole

PER_TOKEN = 16  # bytes of a body per token of the context: a token id takes 8, an escaped sign 6 to 12
BESIDES = 64 << 10  # bytes for everything else
MOST = 8 << 20  # bytes, while the context is not known yet or is longer than that
STOPS = 4  # as many as OpenAI takes
STOP_SIGNS = 1024  # of all of them together
CHOICES = 128  # that an answer is chosen from
GRAMMAR = 16 << 10  # bytes of a grammar, and of what vLLM makes one from
LISTED = 1024  # entries of any other list

# What OpenAI's clients and TRL send, and vLLM's sampling parameters that cost nothing.
_NAMES = (
    "model prompt messages stream stream_options user n max_tokens max_completion_tokens min_tokens"
    " temperature top_p top_k min_p seed stop stop_token_ids logit_bias frequency_penalty presence_penalty"
    " repetition_penalty ignore_eos include_stop_str_in_output skip_special_tokens"
    " spaces_between_special_tokens add_special_tokens echo suffix logprobs top_logprobs return_token_ids"
    " return_tokens_as_token_ids tools tool_choice parallel_tool_calls reasoning_effort chat_template_kwargs"
    " add_generation_prompt continue_final_message response_format structured_outputs"
)
FIELDS = frozenset(_NAMES.split())


@dataclass(frozen=True)
class Completions:
    """Reads the bodies of requests for completions."""

    context: Callable[[], int | None]  # tokens that the model reads, None before it is known
    at_once: int  # completions of one request

    @property
    def limit(self) -> int:
        """The largest body, in bytes."""
        context = self.context()
        return MOST if context is None else min(MOST, BESIDES + PER_TOKEN * context)

    def read(self, body: bytes) -> Whole:
        """The body as it is, if vLLM may have it; raises `ValueError` if not."""
        asked = _parsed(body)
        for name, value in asked.items():
            if name not in FIELDS and value is not None:
                raise ValueError(f"the field {name[:40]!r} is not taken here: leave it out")
            _check_size(name, value)
        _check_stops(asked.get("stop"))
        _check_template(asked.get("chat_template_kwargs"))
        return Whole(body, self._places(asked))

    def _places(self, asked: Mapping[str, Any]) -> int:
        """How many completions are asked for."""
        n = 1 if asked.get("n") is None else asked["n"]
        if type(n) is not int or n < 1:  # vLLM would read "64" as 64
            raise ValueError("n must be a whole number from 1 on")
        prompt = asked.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and not _is_one(prompt) else 1
        if n * prompts > self.at_once:
            raise ValueError(f"too many completions: at most {self.at_once} in one request, prompts times n")
        return n * prompts


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON: send an object with a prompt or messages") from None
    if not isinstance(asked, dict):
        raise ValueError("the body is no JSON object: send one with a prompt or messages")
    return asked


def _is_one(prompt: list[Any]) -> bool:
    """Whether it is the tokens of a single prompt."""
    return not prompt or isinstance(prompt[0], int)


def _check_size(name: str, value: Any) -> None:
    if name in ("structured_outputs", "response_format", "tools"):
        if len(json.dumps(value)) > GRAMMAR:
            raise ValueError(f"{name} is too large: at most {GRAMMAR >> 10} KB")
        choices = value.get("choice") if isinstance(value, dict) else None
        if isinstance(choices, list) and len(choices) > CHOICES:
            raise ValueError(f"too many choices: at most {CHOICES}")
    elif name not in ("prompt", "messages") and isinstance(value, list | dict) and len(value) > LISTED:
        raise ValueError(f"{name} is too long: at most {LISTED} entries")


def _check_stops(stop: Any) -> None:
    stops = stop if isinstance(stop, list) else [stop]
    if len(stops) > STOPS or sum(len(text) for text in stops if isinstance(text, str)) > STOP_SIGNS:
        raise ValueError(f"too much to stop at: at most {STOPS} strings, of {STOP_SIGNS} characters together")


def _check_template(options: Any) -> None:
    """A template may count up to a number, so that it is given none."""
    values = options.values() if isinstance(options, dict) else ()
    if not all(value is None or isinstance(value, bool) or _is_word(value) for value in values):
        raise ValueError("chat_template_kwargs may hold true, false and short words only")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 64
