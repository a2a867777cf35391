"""Conversations as samples for TRL's trainer, with the sync whose weights generated each token."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1  # the sync of tokens that the policy did not generate, or whose sync is not known for sure
TokenSyncs = NDArray[np.int64]
Messages = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class TracedSample:
    """A sample with the fields that TRL's trainer reads, and with the sync of each token.

    All arrays have the shape [tokens]: `input_ids` and `completion_mask` (1 for tokens to train on) are
    int64, `old_log_probs` float32, and `token_syncs` (the sync whose weights generated the token, or
    `UNKNOWN`) int64. `model_version` is the oldest sync whose weights generated a token of the conversation.
    `rates` are the environment's counts (see `trainer.tasks.Task`), in one sample of each conversation.
    """

    prompt: Messages
    completion: Messages
    input_ids: NDArray[np.int64]
    completion_mask: NDArray[np.int64]
    old_log_probs: NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    token_syncs: TokenSyncs
    rates: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    enqueued_at: float | None = None


class Weights(TypedDict):
    """Which published weights made an answer, as the label of their tokens says."""

    version: int
    term: int
    sync: int


class MadeBy(TypedDict):
    """Weights, and the tokens that they made: number of the choice, first token, token after the last.
    Without `tokens`, these weights or newer ones made the whole answer."""

    weights: Weights
    tokens: NotRequired[list[tuple[int, int, int]]]


def made_by(headers: Mapping[str, str]) -> list[MadeBy]:
    """Read which published weights made a replica's answer from its headers; the oldest come first.

    Raises `ValueError` if the header has another form, as of another release.
    """
    text = headers.get("x-policy-versions", "[]")
    try:
        published = [entry for entry in json.loads(text) if entry["weights"]]
        return sorted(published, key=lambda entry: int(entry["weights"]["version"]))
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"its header x-policy-versions is of another release: {text[:100]!r}") from error


@dataclass
class Row:
    """What one sample is made of. Of each token: its id, whether it is trained on, its log-probability, and
    its sync. `begun`: where the last answer begins."""

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    syncs: list[int] = field(default_factory=list)
    begun: int = 0

    def keep(self, count: int) -> None:
        """Drop all tokens but the first `count`."""
        for column in (self.tokens, self.mask, self.log_probs, self.syncs):
            del column[count:]

    def add(self, tokens: list[int], log_probs: list[float], syncs: list[int], *, own: bool) -> None:
        self.tokens += tokens
        self.mask += [int(own)] * len(tokens)
        self.log_probs += log_probs
        self.syncs += syncs


class Conversation:
    """The messages of one conversation, and the rows of tokens to train on."""

    def __init__(self, prompt: Messages, forks_at: int) -> None:
        self.prompt = prompt
        self.completion: Messages = []
        self.ids: list[int] = []  # the tokens of all answers
        self.rows = [Row()]
        self.turns = 0
        self.oldest = sys.maxsize  # the oldest sync whose weights generated a token
        self.replica = ""  # the replica that got the last request
        self.cut_off = False  # whether the limit of tokens or the context ended the last answer
        self.calls = 0  # of tools
        self.failures = 0
        self.reward: float | None = None  # the environment's
        self.rates: dict[str, tuple[int, int]] = {}  # the environment's
        self._forks_at = forks_at

    def add_turn(
        self, prompt: list[int], ids: list[int], log_probs: list[float], made: list[MadeBy], last: int
    ) -> None:
        """Record an answer and the weights that made it. This trainer has the weights of syncs up to `last`.
        Tokens of later syncs stay `UNKNOWN`. In the age of the answer, they count as `last`.

        Each turn's prompt is the whole conversation, tokenized again. It may differ from the tokens of the
        row. Fewer than `forks_at` tokens at the end of the last answer become what the prompt has, and are
        not trained on, because the policy did not write them so. A larger difference begins a new row.
        """
        syncs = np.full(len(ids), UNKNOWN)
        for entry in made:
            for _, start, end in entry.get("tokens", ()):  # requests ask for one choice
                if entry["weights"]["sync"] <= last:
                    syncs[start:end] = entry["weights"]["sync"]
        self.oldest = min(self.oldest, made[0]["weights"]["sync"] if made else 0, last)
        row = self.rows[-1]
        same = _common(row.tokens, prompt)
        drift = len(row.tokens) - same
        if drift and (same < row.begun or drift >= self._forks_at):
            self.rows.append(row := Row())
            same = 0
        row.keep(same)
        rest = prompt[same:]
        row.add(rest, [0.0] * len(rest), [UNKNOWN] * len(rest), own=False)
        row.begun = len(row.tokens)
        row.add(ids, log_probs, syncs.tolist(), own=True)
        self.ids += ids
        self.turns += 1


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens at the start are the same in both."""
    if one == other[: len(one)]:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
