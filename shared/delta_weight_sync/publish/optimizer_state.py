"""What an optimizer remembers, as tensors and JSON, and back into a new optimizer, bit for bit.

Of a sharded (FSDP2) parameter each rank has its own part, of any other the main rank has all.
`Optimizer.load_state_dict` is not used for it: it casts moments to the type of the parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.publish.blocks import local
from delta_weight_sync.publish.tensor_file import storable

Tensors = dict[str, torch.Tensor]
_MOVES = ("params", "lr")  # of a parameter group: what is no setting, and what a schedule changes


class StateError(DeltaWeightSyncError, RuntimeError):
    """A trainer's state cannot be kept, or another trainer cannot go on from it; the message says why."""


def take(optimizer: torch.optim.Optimizer, *, main: bool) -> tuple[Tensors, Any]:
    """Copies on the host of what this rank keeps, and the rest as JSON. Raises `StateError`."""
    tensors: Tensors = {}
    values: dict[str, dict[str, Any]] = {}
    on_host: list[str] = []
    for name, parameter in _parameters(optimizer):
        if not (main or isinstance(parameter, DTensor)):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[entry := f"optimizer/{name}/{key}"] = to_host(value, f"the optimizer's {key}")
                on_host += [entry] if value.device.type == "cpu" else []
            else:
                values.setdefault(name, {})[key] = as_json(value, f"the optimizer's {key}")
    settings = {"kind": _kind(optimizer), "groups": _settings(optimizer)}
    return tensors, settings | {"values": values, "on_host": on_host}


def put(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], note: Any) -> None:
    """Let `optimizer`, which has taken no step, remember what `take` gave. Raises `StateError`."""
    _require_same(optimizer, note)
    for group, then in zip(optimizer.param_groups, note["groups"], strict=True):
        group.update({key: _like(group.get(key), value) for key, value in then.items() if key != "params"})
    parameters = dict(_parameters(optimizer))
    for entry, tensor in tensors.items():
        if entry.startswith("optimizer/"):
            _, name, key = entry.split("/", 2)
            parameter, stays = parameters[name], entry in note["on_host"] and tensor.dim() == 0
            optimizer.state[parameter][key] = tensor if stays else _onto(parameter, tensor)
    for name, values in note["values"].items():
        optimizer.state[parameters[name]].update(values)


def to_host(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A copy on the host of this rank's part of `tensor`. Raises `StateError` for a type of its own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, DTensor) or not storable(tensor):
        raise StateError(
            f"{what} is a {type(tensor).__name__} of {tensor.dtype}, which a state cannot hold; use an"
            " optimizer that keeps plain tensors, or train without states"
        )
    return local(tensor).to("cpu", copy=True, memory_format=torch.contiguous_format)


def as_json(value: Any, what: str) -> Any:
    """`value` as it comes back from JSON. Raises `StateError` where it would not."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise StateError(f"{what} cannot be kept in a state ({error}); train without states") from error


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"{number}.{index}", parameter


def _kind(optimizer: torch.optim.Optimizer) -> str:
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    return type(inner).__name__


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: as_json(value, f"the optimizer's {key}") for key, value in group.items() if key != "params"}
        | {"params": [list(parameter.shape) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _require_same(optimizer: torch.optim.Optimizer, note: Any) -> None:
    now, then = _settings(optimizer), note["groups"]
    if note["kind"] != _kind(optimizer):
        raise _changed("class", note["kind"], _kind(optimizer))
    if [group["params"] for group in now] != [group["params"] for group in then]:
        raise StateError(
            "the optimizer has other parameters than when the state was saved: train the same ones, or begin"
            " again"
        )
    for old, new in zip(then, now, strict=True):
        for key in sorted((old.keys() | new.keys()) - set(_MOVES)):
            if old.get(key) != new.get(key):
                raise _changed(key, old.get(key), new.get(key))


def _changed(what: str, then: object, now: object) -> StateError:
    return StateError(
        f"the optimizer's {what} was {then} when the state was saved and is {now}: give the old one, or begin"
        " again"
    )


def _like(now: object, then: object) -> object:
    return tuple(then) if isinstance(now, tuple) and isinstance(then, list) else then


def _onto(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What was kept of a parameter, beside it and sharded as it is."""
    own = local(parameter)
    moved = tensor.to(own.device, copy=True)
    if not isinstance(parameter, DTensor) or tensor.shape != own.shape:
        return moved
    place = parameter.device_mesh, parameter.placements
    return DTensor.from_local(moved, *place, shape=parameter.shape, stride=parameter.stride())
