"""Logprobs of fixed prompts as the published bits of a version give them."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from delta_weight_sync.checkpoint import CheckpointError, read_bits
from delta_weight_sync.history import RunReader
from delta_weight_sync.kept import KeptCheckpoint

PROMPTS, TOKENS = 4, 48  # so many of the task, each of so many tokens
Logprobs = list[list[float]]  # per prompt, of each token but the first


def prompts_of(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The first different prompts of a task as token ids, each cut to `TOKENS` or repeated up to it."""
    found: dict[tuple[int, ...], None] = {}
    for row in dataset:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        found[tuple((ids * TOKENS)[:TOKENS])] = None
        if len(found) == PROMPTS:
            break
    return [list(ids) for ids in found]


class Reference:
    """Builds versions as a replica does, from the bucket, and puts the prompts through them in float32."""

    def __init__(self, base: str, reader: RunReader, kept: KeptCheckpoint, prompts: list[list[int]]) -> None:
        """`base`: a checkpoint of the same architecture, whose weights are replaced."""
        with torch.random.fork_rng():  # a run with canaries draws what one without them draws
            self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._reader, self._kept, self._prompts = reader, kept, torch.tensor(prompts)

    @torch.inference_mode()
    def logprobs(self, version: int) -> Logprobs:
        """Those of a version; raises what reading the bucket raises."""
        left = dict(self._model.named_parameters())
        for name, bits in read_bits(self._kept.take(self._reader.find(version))):
            if name in left:  # a tied head may be stored twice
                left.pop(name).copy_(torch.from_numpy(bits).view(torch.bfloat16))
        if left:
            raise CheckpointError(f"{min(left)} is not published: this model is not that of the run")
        return token_logprobs(self._model, self._prompts)


def token_logprobs(model: Any, prompts: torch.Tensor) -> Logprobs:
    """Of prompts, int64 [n, tokens], the logprob of every token but the first."""
    logits = model(input_ids=prompts).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(2, prompts[:, 1:, None])[..., 0]
    found: Logprobs = chosen.tolist()
    return found
