"""Which of the trainer's weight syncs made each token of a sample, as the replicas say of their answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample, TurnRecord, _chain_to_sequences

UNKNOWN = -1  # of a token that the policy did not make, or of which nobody said by which weights
TokenSyncs = NDArray[np.int64]
_SPAN = re.compile(r"(\d+):(\d+)-(\d+)", re.ASCII)


@dataclass(slots=True, kw_only=True)
class TracedSample(RolloutSample):
    """TRL's sample, and the sync of each of its tokens, int64 [tokens]; UNKNOWN where it made none."""

    token_syncs: TokenSyncs


class Conversation:
    """What the replicas said of the answers of one conversation."""

    def __init__(self) -> None:
        self._oldest: list[int] = []
        self._spans: list[tuple[int, int, int]] = []
        self._turns: list[TurnRecord] = []  # with syncs in the place of log-probabilities

    def hear(self, headers: Mapping[str, str], writer_term: int, inherited: int) -> None:
        """The headers of an answer, whose tokens come next.

        Of weights that another trainer than `writer_term` made, those up to sync `inherited` are this one's
        as well; newer ones it never had.
        """
        oldest, spans = int(headers.get("x-policy-sync", 0)), _spans(headers.get("x-policy-syncs", ""))
        if int(headers.get("x-policy-term", -1)) != writer_term:
            # Weights of an earlier trainer of this run: those that it had when this one took over from it, or
            # what that one had made of them and this one has not.
            oldest = min(oldest, inherited)
            spans = [span for span in spans if span[0] <= inherited]
        self._oldest.append(oldest)
        self._spans = spans

    def add_turn(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        """The answer itself."""
        syncs = np.full(len(output_ids), UNKNOWN)
        for sync, start, end in self._spans:
            syncs[start:end] = sync
        self._turns.append(TurnRecord(prompt_ids, output_ids, syncs.tolist()))

    def rows(self, fork_threshold: int) -> list[tuple[int, TokenSyncs]]:
        """Of each sample that TRL makes of it: the oldest sync of the whole conversation, and its tokens'."""
        sequences, _ = _chain_to_sequences(self._turns, "", fork_threshold)
        made = [(np.array(s.completion_mask) == 1, np.array(s.old_log_probs)) for s in sequences]
        return [(min(self._oldest), np.where(own, syncs, UNKNOWN).astype(np.int64)) for own, syncs in made]


def traced(sample: RolloutSample, oldest: int, syncs: TokenSyncs) -> TracedSample:
    """The sample with what is known of its tokens; its version is the oldest of its conversation."""
    known = {field.name: getattr(sample, field.name) for field in fields(RolloutSample)}
    return TracedSample(**known | {"model_version": oldest}, token_syncs=syncs)


def _spans(text: str) -> list[tuple[int, int, int]]:
    """Sync, first token and token after the last, of the first choice; an answer of the trainer has one."""
    first = text.split(";")[0]
    return [(int(sync), int(start), int(end)) for sync, start, end in _SPAN.findall(first)]
