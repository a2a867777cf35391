"""The parts of a trainer state, as tensors and JSON: optimizer, random numbers, float32 master weights.

Each rank saves its own part of a sharded (FSDP2) parameter; the main rank saves all other parameters in full.
Optimizer moments are restored here, because `Optimizer.load_state_dict` casts them to the parameter's dtype.

A float32 master weight is stored as its published bf16 bits and 16 more bits. bf16 is the upper half of a
float32, rounded to nearest even, and the lower half tells which way it was rounded. Two exceptions are saved
in full: a number exactly halfway between two bf16 values, and NaN.
"""

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from delta_weight_sync.checkpoint import Bits, to_nearest
from delta_weight_sync.errors import StateError
from delta_weight_sync.publish.sharding import local

_HOST, _DEVICE = "random/torch", "random/device"
_MOVES = ("params", "lr")  # keys of a parameter group that may differ from the saved ones
_MIDDLE = 0x8000
_CHUNK = 1 << 16  # elements split at a time, so that the scratch space stays in the cache
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool} | {
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}  # what a state can hold
Tensors = dict[str, torch.Tensor]


def take_random_state() -> tuple[dict[str, torch.Tensor], Any]:
    """Return the states of all random generators (python, numpy, torch, its GPU): tensors, and JSON."""
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


def split(masters: NDArray[np.float32]) -> Tensors:
    """Return what to save of `masters`, float32 [n], in addition to their bf16 cast.

    "low", int16 [n]: the lower half of each. Of the exceptions, if there are any, "index", int64 [m]: their
    positions, and "words", int32 [m]: all their bits.
    """
    words = masters.view(np.uint32)
    low, found = np.empty(words.size, np.uint16), [np.empty(0, np.int64)]
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK]
        low[start : start + part.size] = part  # assignment keeps the lower half
        numbers = part.view(np.float32)
        lost = _join(to_nearest(numbers), low[start : start + part.size]) != part
        found.append(np.flatnonzero(lost | np.isnan(numbers)) + start)
    rest, odd = {"low": torch.from_numpy(low.view(np.int16))}, np.concatenate(found)
    if odd.size:
        rest["index"] = torch.from_numpy(odd)
        rest["words"] = torch.from_numpy(words[odd].view(np.int32))
    return rest


def masters(published: Bits, rest: Tensors) -> torch.Tensor:
    """Return the float32 numbers [n], exactly as before `split`."""
    words = _join(published, rest["low"].numpy().view(np.uint16))
    if "index" in rest:
        words[rest["index"].numpy()] = rest["words"].numpy().view(np.uint32)
    return torch.from_numpy(words.view(np.float32))


def _join(published: Bits, low: Bits) -> NDArray[np.uint32]:
    """Join bf16 bits and lower halves to float32 bits; wrong for the exceptions."""
    high = published - (low > _MIDDLE)
    return high.astype(np.uint32) << np.uint32(16) | low.astype(np.uint32)


def take_optimizer(optimizer: torch.optim.Optimizer, *, main: bool) -> tuple[Tensors, Any]:
    """Return this rank's part of the optimizer: copies on the host, and JSON. Raises `StateError`."""
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
    """Put what `take_optimizer` returned into a new optimizer. Raises `StateError`."""
    _require_same(optimizer, note)
    for group, then in zip(optimizer.param_groups, note["groups"], strict=True):
        for key, value in then.items():
            if key != "params":  # JSON turned tuples into lists
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
    """Copy this rank's part of `tensor` to the host. Raises `StateError` for a special tensor type."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, DTensor) or tensor.dtype not in _DTYPES:
        raise StateError(
            f"{what} is a {type(tensor).__name__} of {tensor.dtype}, which a state cannot hold; use an"
            " optimizer that keeps plain tensors, or train without states"
        )
    return local(tensor).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def as_json(value: Any, what: str) -> Any:
    """Return `value` as JSON would give it back. Raises `StateError` if JSON cannot hold it."""
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
    if [group["params"] for group in now] != [group["params"] for group in then]:
        raise StateError(
            "the optimizer has other parameters than the saved state: train the same ones, or start again"
        )
    kinds = {"class": note["kind"]}, {"class": _kind(optimizer)}
    for old, new in (kinds, *zip(then, now, strict=True)):
        for key in sorted((old.keys() | new.keys()) - set(_MOVES)):
            was, is_now = old.get(key), new.get(key)
            if was != is_now:
                raise StateError(
                    f"the optimizer's {key} was {was} when the state was saved and is {is_now}: set it to"
                    f" {was}, or start again"
                )


def _onto(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Move a saved tensor to the parameter's device. A shard becomes a `DTensor` again."""
    own = local(parameter)
    moved = tensor.to(own.device, copy=True)
    if not isinstance(parameter, DTensor) or tensor.shape != own.shape:
        return moved
    place = parameter.device_mesh, parameter.placements
    return DTensor.from_local(moved, *place, shape=parameter.shape, stride=parameter.stride())
