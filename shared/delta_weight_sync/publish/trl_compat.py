"""What TRL 1.16's async GRPO needs to run on a CPU, in float32, without vLLM on the trainer's box, and with
weights that are published as they lie on several ranks.

Patches of TRL internals, pinned to the release they were written for. `install` checks that each place still
looks as expected and says so loudly where it does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

TESTED = "1.16."


def install(*, flash_attention: bool = False) -> None:
    """Patch TRL in this process; raises `RuntimeError` if this release is not the tested one.

    `flash_attention` keeps TRL's own attention kernel: it needs a GPU and 16-bit weights.
    """
    if not trl.__version__.startswith(TESTED):
        raise RuntimeError(
            f"tested with trl {TESTED}*, found {trl.__version__}; pip install 'trl=={TESTED}0'"
        )
    # The rollout worker speaks HTTP only, yet refuses to start where vLLM is not installed.
    _replace(async_rollout_worker, "is_vllm_available", lambda *args, **kwargs: True)
    if not flash_attention:
        _replace(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=_varlen_attention))
    if "_streaming_iter" not in async_grpo_trainer.AsyncGRPOTrainer._sync_weight_merged.__code__.co_names:
        raise RuntimeError(f"trl {trl.__version__} syncs weights in another way; adapt trl_compat.py")
    if not torch.cuda.is_available():  # TRL looks throughput up by the name of the GPU
        _replace(async_grpo_trainer, "get_peak_flops_per_device", lambda *args, **kwargs: None)


class BucketGRPOTrainer(async_grpo_trainer.AsyncGRPOTrainer):
    """Hands over every parameter as it lies on each rank; `weight_transfer` is needed on all of them.

    TRL leaves frozen parameters out, gathers each sharded one in full, and drops the `weight_transfer` of all
    ranks but the main one.
    """

    def __init__(self, *, weight_transfer: Any, **kwargs: Any) -> None:
        super().__init__(weight_transfer=weight_transfer, **kwargs)
        self._transfer = weight_transfer

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the policy."""
        return named_weights(self.accelerator.unwrap_model(self.model))

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        # TRL gives this to the main rank's `send_weights`; on the others it only takes it to its end.
        if self.accelerator.is_main_process:
            yield from self.weights()
        else:
            self._transfer.send_weights(self.weights())


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter under its checkpoint name, frozen ones too; of LoRA, what its adapters merge into."""
    if async_grpo_trainer.is_peft_model(model):
        yield from async_grpo_trainer._iter_vllm_named_params(model)
        return
    every = [(name, SimpleNamespace(requires_grad=True, it=it)) for name, it in model.named_parameters()]
    renamed = async_grpo_trainer._iter_vllm_named_params(SimpleNamespace(named_parameters=lambda: every))
    yield from ((name, parameter.it) for name, parameter in renamed)


def _replace(module: Any, name: str, value: Any) -> None:
    if not hasattr(module, name):
        raise RuntimeError(
            f"trl {trl.__version__} has no {module.__name__}.{name} any more; adapt trl_compat.py"
        )
    setattr(module, name, value)


def _varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """FlashAttention's varlen function through PyTorch's SDPA.

    `q` is [tokens, heads, head_dim], `k` and `v` likewise with fewer heads; `starts_*` are the cumulative
    lengths of the packed sequences. Causal masks are aligned to the bottom right, as FlashAttention does.
    """
    if not causal or window_size != (-1, -1):
        raise ValueError("this model needs sliding-window attention: train it on a GPU with --dtype bfloat16")
    spans = zip(_spans(starts_q), _spans(starts_k), strict=True)
    return torch.cat([_attend(q[a:b], k[c:d], v[c:d], softmax_scale) for (a, b), (c, d) in spans])


def _spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts.tolist()))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # heads first
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)
