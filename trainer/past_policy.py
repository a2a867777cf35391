"""The policy as it was at one of the last syncs: a second model, moved along by what the syncs changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from trl.experimental.async_grpo.packing import TreeRow

from delta_weight_sync.publish.past import Past, rolled_bits
from delta_weight_sync.publish.trl_trainer import live_weights

LogProbs = NDArray[np.float32]


class Query(NamedTuple):
    """Tokens of one sample: int64 [n], and which of them are asked for, bool [n]; never the first one."""

    input_ids: NDArray[np.int64]
    asked: NDArray[np.bool_]


class PastPolicy:
    """What replicas served at a sync: the published bf16 bits, in the trainer's arithmetic and attention."""

    def __init__(self, policy: torch.nn.Module, token_budget: int) -> None:
        """Copies TRL's model. `token_budget`: the most tokens of a forward pass, 0 for no limit.

        Raises `ValueError` for weights of a dtype that does not hold every bf16.
        """
        self._model = copy.deepcopy(policy).requires_grad_(False).eval()
        self._weights = dict(live_weights(self._model))
        for weights in self._weights.values():
            rolled_bits(weights)
        self._token_budget = token_budget
        self._past: Past | None = None
        self.sync = -1
        self.written = 0  # weights, by all rolls

    def begin(self, policy: torch.nn.Module, past: Past) -> None:
        """Be what `policy` has just handed over, as the only sync of `past`."""
        for name, weights in live_weights(policy):
            self._weights[name].copy_(weights.detach().to(torch.bfloat16))
        self._past, (self.sync,) = past, past.syncs

    def knows(self, sync: int) -> bool:
        """Whether it can be what it was then."""
        return self._past is not None and sync in self._past.syncs

    def keep_up(self) -> None:
        """After a hand-over: do not stay at the sync that the next one makes forgotten."""
        assert self._past
        if self._past.syncs[0] == self.sync != self._past.syncs[-1]:
            self.roll(self._past.syncs[1])

    def roll(self, sync: int) -> None:
        """Be what it was then; raises `NotKeptError`."""
        assert self._past
        self.written += self._past.roll(self._weights, self.sync, sync)
        self.sync = sync

    @torch.no_grad()
    def log_probs(self, queries: Sequence[Query]) -> LogProbs:
        """Of the tokens that are asked for, at the temperature of TRL's model, query by query: float32."""
        found = [forward(self._model, row.pack()) for row in self._rows(queries)]
        return torch.cat(found).float().cpu().numpy()

    def _rows(self, queries: Sequence[Query]) -> Iterator[TreeRow]:
        row = TreeRow()
        for query in queries:
            sample = as_trl_has_it(query)
            if row.samples and self._token_budget and not row.fits(sample, self._token_budget):
                yield row
                row = TreeRow()
            row.add(sample)
        yield row


def forward(model: torch.nn.Module, packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probabilities of the tokens of one packed row, as `AsyncGRPOTrainer.compute_loss` has them."""
    device = next(model.parameters()).device
    packed = {key: column.to(device) for key, column in packed.items()}
    longest_q, longest_k = packed["tree_max_seqlens"].tolist()
    outputs = model(
        **{key: packed[key][None] for key in ("input_ids", "position_ids", "shift_labels")},
        **{key: packed[key] for key in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")},
        tree_max_seqlen_q=longest_q,
        tree_max_seqlen_k=longest_k,
        fused_lm_head=True,
    )
    log_probs: torch.Tensor = outputs.log_probs.flatten()[packed["token_index"]]
    return log_probs


def as_trl_has_it(query: Query) -> dict[str, Any]:
    """A sample whose asked tokens are those that it is trained on."""
    nothing = np.zeros(len(query.input_ids))
    return {
        "input_ids": query.input_ids,
        "completion_mask": query.asked.astype(np.int64),
        "old_log_probs": nothing,
        "advantage": 0.0,
        "group_id": 0,
    }
