"""What vLLM's own ways to load new weights into a live model leave, against a fresh load of these weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from delta_weight_sync.vllm import routes

COMPUTED = " (computed)"  # ends the name of what a layer computes


class Difference(NamedTuple):
    """How many tensors differ, how many of their elements, and the name of the first tensor."""

    tensors: int = 0
    elements: int = 0
    first: str = ""


Found = Difference | str
"""How a model differs from a fresh load, or the first line of the error."""
Load = Callable[[Any, Path], None]


def reload(live: Any, folder: Path) -> None:
    """What `collective_rpc("reload_weights")` does on a worker with the checkpoint in `folder`."""
    from vllm.config import set_current_vllm_config  # imported here, because `compare` needs no vLLM
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    with set_current_vllm_config(live.config):
        reload_weights(live.config, live.model, None, str(folder), is_checkpoint_format=True)


def load_weights(live: Any, folder: Path) -> None:
    """`model.load_weights` on the live model, which several trainers call."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    live.config.model_config.model = str(folder)
    loader = get_model_loader(live.config.load_config)
    with set_current_vllm_config(live.config):
        live.model.load_weights(loader.get_all_weights(live.config.model_config, live.model))


def compare(one: torch.nn.Module, other: torch.nn.Module) -> Difference:
    """Compare all floating-point tensors of two models bit by bit, and what their linear layers compute.

    What only one of them has is left over from its construction: learning would have refused it. Tensors
    without memory are of parts that are not served.
    """
    mine, others = (dict(routes.floating(model)) | dict(_computed(model)) for model in (one, other))
    counts = {name: _different(tensor, others[name]) for name, tensor in mine.items() if name in others}
    different = [name for name, count in counts.items() if count]
    return Difference(len(different), sum(counts.values()), next(iter(different), ""))


def result(load: Load, live: Any, folders: Sequence[Path], fresh: Any) -> Found:
    """Load checkpoints into `live`, one after the other, and compare it with `fresh`."""
    try:
        for folder in folders:
            load(live, folder)
        return compare(live.model, fresh.model)
    except Exception as error:  # noqa: BLE001 - vLLM's code may raise anything; it is the result
        return ": ".join([type(error).__name__, *f"{error}".splitlines()[:1]])


def _computed(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weight of each linear layer, as the layer multiplies by it.

    vLLM's CPU backend may pack the weight into an object that is no tensor, and drop the weight.
    """
    for name, layer in model.named_modules():
        size = getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", 0))
        if size and hasattr(layer, "cpu_linear") and not layer.weight.is_meta:
            unit = torch.eye(size, dtype=layer.weight.dtype)
            yield name + COMPUTED, layer.cpu_linear(unit, layer.weight, None)


def _different(one: torch.Tensor, other: torch.Tensor) -> int:
    """The number of elements that are different."""
    if one.is_meta and other.is_meta:
        return 0
    if (one.shape, one.dtype, one.is_meta) != (other.shape, other.dtype, other.is_meta):
        return max(one.numel(), other.numel())
    rows = one.element_size()
    mine, others = (
        tensor.detach().contiguous().view(-1).view(torch.uint8).view(-1, rows) for tensor in (one, other)
    )
    return int((mine != others).any(1).sum())


LOADS: tuple[Load, ...] = (reload, load_weights)
