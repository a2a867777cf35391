"""What TRL 1.16's async GRPO needs to run on a CPU, in float32, without vLLM on the trainer's box, and with
weights that are published as they lie on several ranks.

Patches of TRL internals, for whoever calls `install`: pinned to the release they were written for. Each place
is looked at first, and where it does not look as expected any more, that is said loudly. With a GPU, 16-bit
weights, vLLM installed and one process, TRL needs none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

TESTED = "1.16."
Named = Iterator[tuple[str, torch.Tensor]]


def install(*, flash_attention: bool = False) -> None:
    """Patch TRL in this process; raises `RuntimeError` if this release is not the tested one.

    `flash_attention` keeps TRL's own attention kernel: it needs a GPU and 16-bit weights.
    """
    if not trl.__version__.startswith(TESTED):
        raise RuntimeError(
            f"tested with trl {TESTED}*, found {trl.__version__}; pip install 'trl=={TESTED}0'"
        )
    if "_streaming_iter" not in async_grpo_trainer.AsyncGRPOTrainer._sync_weight_merged.__code__.co_names:
        raise RuntimeError(f"trl {trl.__version__} syncs weights in another way; adapt trl_patches.py")
    _rollouts_without_vllm()
    if not flash_attention:
        _attention_without_kernel()
    if not torch.cuda.is_available():
        _throughput_without_gpu()


def _rollouts_without_vllm() -> None:
    """The rollout worker speaks HTTP only, yet refuses to start where vLLM is not installed.

    Ends when TRL asks for vLLM in `WeightTransferClient` alone, the only place that imports it.
    """
    _replace(async_rollout_worker, "is_vllm_available", lambda *args, **kwargs: True)


def _attention_without_kernel() -> None:
    """Tree packing downloads FlashAttention 3, which needs a GPU and 16-bit weights.

    Ends when TRL falls back to another `attn_implementation`, as transformers does.
    """
    _replace(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=_varlen_attention))


def _throughput_without_gpu() -> None:
    """The peak throughput is looked up by the name of the GPU, of which a CPU has none.

    Ends when `get_peak_flops_per_device` returns None on a CPU, as it does for an unknown GPU.
    """
    _replace(async_grpo_trainer, "get_peak_flops_per_device", lambda *args, **kwargs: None)


class BucketGRPOTrainer(async_grpo_trainer.AsyncGRPOTrainer):
    """Calls `hand_over` on every rank at each sync, with every parameter as it lies on that rank.

    TRL leaves frozen parameters out, gathers each sharded one in full, and keeps the `weight_transfer` of the
    main rank only. Ends when TRL hands a `WeightTransferProtocol` the parameters as they are, on all ranks.
    """

    def __init__(self, *, hand_over: Callable[[Named], None], **kwargs: Any) -> None:
        super().__init__(weight_transfer=_Nowhere(), **kwargs)
        self._hand_over = hand_over

    def weights(self) -> Named:
        """Every parameter of the policy."""
        return named_weights(self.accelerator.unwrap_model(self.model))

    def _streaming_iter(self) -> Named:
        # At each sync TRL takes this to its end on every rank, and on the main one gives it to `_Nowhere`.
        self._hand_over(self.weights())
        yield from ()


class _Nowhere:
    """TRL's `WeightTransferProtocol` for a trainer whose weights take another way."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Named) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def named_weights(model: torch.nn.Module) -> Named:
    """Every parameter under its checkpoint name, frozen ones too; of LoRA, what its adapters merge into."""
    if async_grpo_trainer.is_peft_model(model):
        yield from async_grpo_trainer._iter_vllm_named_params(model)
        return
    for name, parameter in model.named_parameters():
        # What DDP and gradient checkpointing put around modules is no part of a checkpoint.
        yield name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), parameter


def _replace(module: Any, name: str, value: Any) -> None:
    if not hasattr(module, name):
        raise RuntimeError(
            f"trl {trl.__version__} has no {module.__name__}.{name} any more; adapt trl_patches.py"
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
