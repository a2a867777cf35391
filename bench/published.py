"""A run of two versions of a tiny model, published in one of the ways in which a trainer can hold a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from delta_weight_sync import Publisher, follow
from delta_weight_sync.checkpoint import WEIGHTS
from delta_weight_sync.reader import RunReader, open_run
from tests.support import tiny

EXACT = "exact"  # the best verdict
_TOWER = re.compile("visual|vision|audio")  # a name with this part is of a tower that is usually frozen
_EACH = 3  # without a tower, one of this many parameters is frozen


@dataclass(frozen=True)
class Way:
    """A way to publish a model: `column` heads its verdicts, `weights` makes what `publish` is given."""

    column: str
    weights: Callable[[Any, Path], Any]
    is_float32: bool = False
    is_frozen: bool = False
    has_buffers: bool = False


def _named(model: Any, _: Path) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder / "saved")
    return load_file(folder / "saved" / WEIGHTS)


WAYS = (
    Way("`publish(model)`", lambda model, _: model, has_buffers=True),
    Way("`named_parameters()`", _named),
    Way("names of `save_pretrained`", _saved),
    Way("float32 masters", _named, is_float32=True),
    Way("frozen parts", _named, is_frozen=True),
)


class Run:
    """A run of two versions.

    Attributes:
        reader: Reads the run.
        newest: The folder of the second version, as `follow` writes it.
        wrong: The first tensor that transformers loads otherwise than the trainer holds it; "" if none.
    """

    def __init__(self, way: Way, base: Path, folder: Path) -> None:
        """Publish the base, change a fifth of each trained tensor, and publish the second version.

        Raises:
            DeltaWeightSyncError: `publish` refuses the model.
        """
        model = tiny.load(base)
        if way.is_float32:
            model.float()
        if way.is_frozen:
            names = [name for name, _ in model.named_parameters()]
            frozen = [name for name in names if _TOWER.search(name)] or names[::_EACH]
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
        url = f"file://{folder.absolute()}/bucket"
        random = torch.Generator().manual_seed(0)
        with Publisher(url, base=base) as publisher:
            publisher.publish(way.weights(model, folder))
            publisher.flush()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if way.has_buffers:
                stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
                trained += [b for b in model.buffers() if id(b) in stored and b.is_floating_point()]
            for tensor in trained:
                tiny.move(tensor, random)
            publisher.publish(way.weights(model, folder))
        self.reader: RunReader = open_run(url)
        self.newest = next(follow(url, into=folder / "newest", version=1)).path
        self.wrong = different(model, tiny.load(self.newest))


def different(trained: Any, loaded: Any) -> str:
    """The first tensor of the trainer that is not loaded with the same bits; "" if there is none.

    The trainer's tensor is rounded, if transformers loads it in bf16.
    """
    state: dict[str, torch.Tensor] = loaded.state_dict()
    names: list[str] = [
        name
        for name, tensor in trained.state_dict().items()
        if name not in state or not same(tensor.to(state[name].dtype), state[name])
    ]
    return next(iter(names), "")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and the same bits."""
    parts = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and torch.equal(*parts)
