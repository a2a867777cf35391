"""Speculative decoding: drafts whose weights the run has follow it, others keep the weights that they had.

Either way, answers are those of the served version, because vLLM checks each token that a draft proposes. But
of a draft with old weights, vLLM accepts fewer tokens as training goes on.

A draft follows if vLLM loaded it from the model's own checkpoint, and the run has all of its tensors: the
layers for multi-token prediction (MTP) in a checkpoint, or a second copy of the model. Then the draft's
parameters are further places of these tensors, so a commit writes them with the model's. A parameter that a
draft shares with the model needs nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from delta_weight_sync.errors import RouteError
from delta_weight_sync.runlog import Drafts
from delta_weight_sync.vllm import hooks, routes
from delta_weight_sync.vllm.routes import Dtypes, Learned, Shapes

_DRAFTED = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class Draft:
    """What a worker drafts with. `kept`: why the draft keeps its weights, "" if it follows or has none."""

    def __init__(self, worker: Any) -> None:
        """`worker`: vLLM's worker, of an engine that decodes speculatively."""
        config = worker.vllm_config
        settings = config.speculative_config
        source = settings.draft_model_config
        self.method = str(settings.method)
        self._model: torch.nn.Module | None = None
        self.kept = ""
        if not hooks.DRAFTS.works():
            self.kept = "this release of vLLM does not show its draft"
        elif model := worker.model_runner.get_draft_model():
            if config.model_config.quantization:
                self.kept = "vLLM quantizes this model"
            elif source is None or source.model != config.model_config.model:
                self.kept = "it is loaded from another checkpoint than the model"
            else:
                self._model = model

    def follow(self, learned: Learned, model: torch.nn.Module, shapes: Shapes, dtypes: Dtypes) -> Learned:
        """Add the places of the run's tensors in the draft to those in `model`, if the draft can follow."""
        if self._model is None:
            return learned
        self.kept = ""
        try:
            return routes.with_copy(learned, model, self._model, shapes, dtypes)
        except RouteError as error:
            self.kept = f"{error}"
            return learned


def read_counts(facts: dict[str, str]) -> Drafts:
    """A worker's answer about its draft, with vLLM's counts of tokens, which this process may have."""
    from prometheus_client import REGISTRY

    counts = dict[str, int]()
    for metric in REGISTRY.restricted_registry([f"{_DRAFTED}_total", f"{_ACCEPTED}_total"]).collect():
        for sample in metric.samples:
            counts[metric.name] = counts.get(metric.name, 0) + int(sample.value)
    return Drafts(**facts, drafted=counts.get(_DRAFTED), accepted=counts.get(_ACCEPTED))
