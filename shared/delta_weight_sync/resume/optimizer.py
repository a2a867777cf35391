"""The parts of a trainer state as tensors and JSON, restored bit for bit: optimizer, random numbers, masters.

Of a sharded (FSDP2) parameter each rank saves its own part; the main rank saves any other in full.
`Optimizer.load_state_dict` does not fit, since it casts moments to the dtype of the parameter.

A float32 master is its published bf16 bits and 16 more bits. bf16 is the upper half of a float32, rounded to
nearest even, so the lower half says how the upper one was rounded. There are two exceptions, saved in full: a
number exactly halfway between two bf16, and NaN.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from delta_weight_sync.checkpoint import Bits, to_nearest
from delta_weight_sync.codec import Index
from delta_weight_sync.errors import StateError
from delta_weight_sync.publish.sharding import local

_HOST, _DEVICE = "random/torch", "random/device"
_MOVES = ("params", "lr")  # keys of a parameter group that may differ: the parameters, and a schedule's rate
_MIDDLE = 0x8000
_CHUNK = 1 << 16  # elements at a time; the scratch space stays in the cache
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool} | {
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}  # that a state can hold
Tensors = dict[str, torch.Tensor]
Words = NDArray[np.uint32]


def take_random_state() -> tuple[dict[str, torch.Tensor], Any]:
    """The states of python, numpy, torch and its GPU in this process: tensors, and the rest as JSON."""
    tensors = {_HOST: torch.random.get_rng_state()}
    if torch.cuda.is_available():
        tensors[_DEVICE] = torch.cuda.get_rng_state()
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return tensors, {"python": [version, numbers, gauss], "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def put_random_state(tensors: dict[str, torch.Tensor], note: Any) -> None:
    """Continue the random numbers from where `take_random_state` was called."""
    version, numbers, gauss = note["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = note["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.random.set_rng_state(tensors[_HOST])
    if _DEVICE in tensors:
        torch.cuda.set_rng_state(tensors[_DEVICE])


class Rest(NamedTuple):
    """What float32 numbers hold besides their bf16 cast."""

    low: Bits  # uint16 [n], the lower half of each
    odd: Index  # int64 [m], the exceptions
    words: Words  # uint32 [m], their bits


def split(masters: NDArray[np.float32]) -> Rest:
    """What to save besides the bf16 cast of `masters`, float32 [n]."""
    words = masters.view(np.uint32)
    low, found = np.empty(words.size, np.uint16), [np.empty(0, np.int64)]
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK]
        low[start : start + part.size] = part  # assignment keeps the lower half
        numbers = part.view(np.float32)
        lost = join(to_nearest(numbers), low[start : start + part.size]) != part
        found.append(np.flatnonzero(lost | np.isnan(numbers)) + start)
    odd = np.concatenate(found)
    return Rest(low, odd, words[odd])


def join(published: Bits, low: Bits) -> Words:
    """The bits of the float32 numbers, uint32, except the odd ones; from bf16 bits and lower halves."""
    high = published - (low > _MIDDLE)
    return high.astype(np.uint32) << np.uint32(16) | low.astype(np.uint32)


def masters(published: Bits, rest: Rest) -> NDArray[np.float32]:
    """The float32 numbers [n], exactly as before `split`."""
    words = join(published, rest.low)
    words[rest.odd] = rest.words
    return words.view(np.float32)


def take_optimizer(optimizer: torch.optim.Optimizer, *, main: bool) -> tuple[Tensors, Any]:
    """Copies on the host of this rank's part of the optimizer, and the rest as JSON. Raises `StateError`."""
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


def put_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], note: Any) -> None:
    """Restore what `take_optimizer` gave into a new optimizer. Raises `StateError`."""
    _require_same(optimizer, note)
    for group, then in zip(optimizer.param_groups, note["groups"], strict=True):
        for key, value in then.items():
            if key != "params":  # JSON makes lists of tuples
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    parameters = dict(_parameters(optimizer))
    for entry, tensor in tensors.items():
        if entry.startswith("optimizer/"):
            _, name, key = entry.split("/", 2)
            parameter, stays = parameters[name], entry in note["on_host"] and tensor.dim() == 0
            optimizer.state[parameter][key] = tensor if stays else _onto(parameter, tensor)
    for name, values in note["values"].items():
        optimizer.state[parameters[name]].update(values)


def to_host(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A copy on the host of this rank's part of `tensor`. Raises `StateError` for a special tensor type."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, DTensor) or tensor.dtype not in _DTYPES:
        raise StateError(
            f"{what} is a {type(tensor).__name__} of {tensor.dtype}, which a state cannot hold; use an"
            " optimizer that keeps plain tensors, or train without states"
        )
    return local(tensor).to("cpu", copy=True, memory_format=torch.contiguous_format)


def as_json(value: Any, what: str) -> Any:
    """`value` as JSON gives it back. Raises `StateError` if it is not JSON."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise StateError(f"{what} cannot be saved in a state ({error}); train without states") from error


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"{number}.{index}", parameter


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(getattr(optimizer, "optimizer", optimizer)).__name__  # Accelerate wraps it


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
            "the optimizer has other parameters than when the state was saved: train the same ones, or start"
            " again"
        )
    for old, new in zip(then, now, strict=True):
        for key in sorted((old.keys() | new.keys()) - set(_MOVES)):
            if old.get(key) != new.get(key):
                raise _changed(key, old.get(key), new.get(key))


def _changed(what: str, then: object, now: object) -> StateError:
    return StateError(
        f"the optimizer's {what} was {then} when the state was saved and is {now}: use the old one, or start"
        " again"
    )


def _onto(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A saved tensor on the parameter's device, and sharded as the parameter is."""
    own = local(parameter)
    moved = tensor.to(own.device, copy=True)
    if not isinstance(parameter, DTensor) or tensor.shape != own.shape:
        return moved
    place = parameter.device_mesh, parameter.placements
    return DTensor.from_local(moved, *place, shape=parameter.shape, stride=parameter.stride())
