"""Checks of the arguments with which a run is published, before anything is opened or uploaded."""

import itertools
import operator
import os
from collections.abc import Callable, ItemsView, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, get_args

import torch

from delta_weight_sync.codec import Encoding
from delta_weight_sync.errors import ConfigError
from delta_weight_sync.prune import Keep
from delta_weight_sync.publish.adapters import Merged, adapted
from delta_weight_sync.publish.mirror import Place
from delta_weight_sync.reader import split_run

WEIGHTS = "publish the model itself, `publish(model)`, or `model.named_parameters()`"


def check(
    url: str,
    base: str | Path | None,
    *,
    adapter: bool = False,
    encoding: Encoding,
    mirror: Place,
    keep: str | None,
    state_minutes: float,
    on_version: Callable[..., object] | None,
) -> Keep | None:
    """Raise `ConfigError` for an argument of a type or value that is not allowed; return `keep`, parsed."""
    split_run(url)
    if not isinstance(base, str | os.PathLike | None):
        raise ConfigError(
            f"base is of type {type(base).__name__}, not a path: give the folder, or the model's id on the"
            ' Hub, from which the policy was loaded, as in base="Qwen/Qwen3-0.6B"'
        )
    if adapter and base is not None:
        raise ConfigError(
            "a run that publishes an adapter needs no base, because the adapter's config names it: leave out"
            " base, or adapter=True"
        )
    for argument, value, kind in (("mirror", mirror, Place), ("encoding", encoding, Encoding)):
        if value not in (known := get_args(kind)):
            raise ConfigError(f"{argument} is {value!r}, not one of {', '.join(map(repr, known))}")
    if isinstance(state_minutes, bool) or not isinstance(state_minutes, Real) or not state_minutes >= 0:
        raise ConfigError(f"state_minutes is {state_minutes!r}: give a number of minutes, 0 for no pause")
    if on_version is not None and not callable(on_version):
        raise ConfigError(f"on_version is {on_version!r}: give a function that takes a manifest")
    return None if keep is None else Keep.parse(keep)


def whole_step(step: Any, newest: int) -> int:
    """`step` as an int. Raises `ConfigError` if it is no whole number, or below `newest`, the last step."""
    try:
        number = operator.index(step)
    except (TypeError, RuntimeError):  # the latter of a tensor on the meta device
        number = -1
    if number < 0:
        raise ConfigError(f"step is {step!r}: give a whole number, at least 0, or none to count syncs")
    if number < newest:
        raise ConfigError(
            f"step {number} comes after step {newest}, but replicas and requests take a lower step for older"
            " weights: give steps that never fall, or none to count syncs; to start again, open another"
            " Publisher"
        )
    return number


def require_optimizer(optimizer: Any) -> None:
    """Raise `ConfigError` for anything but an optimizer."""
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"`optimizer` is of type {type(optimizer).__name__}: pass the torch.optim.Optimizer that trains"
        )


def named(weights: Any) -> Any:
    """Return `weights`, or an equal iterator of which the first pair was checked; of a model with adapters,
    the merged tensors.

    An error that is raised here leaves the publisher as it was; an error of `pairs` stops it.

    Raises:
        ConfigError: This is neither a model nor named tensors, or it has adapters that cannot be merged.
    """
    if isinstance(weights, torch.nn.Module):
        return adapted(weights)
    if isinstance(weights, Merged):
        return weights
    if isinstance(weights, Mapping | ItemsView | list | tuple):
        for _ in pairs(weights.items() if isinstance(weights, Mapping) else weights):
            pass
        return weights
    iterator = pairs(weights)
    return itertools.chain(list(itertools.islice(iterator, 1)), iterator)


def pairs(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs of an iterable. Raises `ConfigError` for anything but a name and a tensor."""
    if isinstance(weights, torch.Tensor) or not hasattr(weights, "__iter__"):
        raise ConfigError(f"`weights` is of type {type(weights).__name__}: {WEIGHTS}")
    for item in weights:
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            kind = type(item).__name__
            raise ConfigError(f"`weights` gives a {kind}, not a pair of a name and a tensor: {WEIGHTS}")
        name, tensor = item
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name} is of type {type(tensor).__name__}, not a tensor: {WEIGHTS}")
        yield name, tensor
