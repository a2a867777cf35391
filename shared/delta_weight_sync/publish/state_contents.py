"""What a trainer state holds: weights, optimizer, random numbers, and the state of schedules and the like.

Each rank saves its blocks of sharded (FSDP2) tensors. If several ranks hold copies of a block, one of them
saves it. The main rank also saves the unsharded tensors, which must be the same on all ranks.
Moments are restored here, because `Optimizer.load_state_dict` casts them to the parameter's dtype.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BeforeValidator, ConfigDict, PlainSerializer
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from delta_weight_sync.checkpoint import DTYPES
from delta_weight_sync.digest import tensor_digest
from delta_weight_sync.errors import StateError
from delta_weight_sync.publish.blocks import Block
from delta_weight_sync.publish.sharding import Peers, held_block, is_copy, local
from delta_weight_sync.records import Record
from delta_weight_sync.util import SafeLogger, time_text

_DTYPES = {f"torch.{name}": getattr(torch, name) for name, _ in DTYPES.values()}  # what a state can hold
# JSON has neither tuples nor keys that are not text. So such a value is saved as an object with one of these
# names alone, and a list: of the tuple's items, or of [key, value].
_KINDS: Final = {"__tuple__": tuple, "__counter__": Counter, "__items__": dict}
_log = SafeLogger()
Tensors = dict[str, torch.Tensor]
Others = Mapping[str, Stateful]
Groups = list[dict[str, Any]]
Fill = Callable[[str, torch.Tensor], None]


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_encoded(item) for item in value]}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = [[_encoded(key), _encoded(item)] for key, item in value.items()]
    if isinstance(value, Counter):  # as in `MultiStepLR`
        return {"__counter__": items}
    if all(isinstance(key, str) for key in value) and (len(value) != 1 or value.keys().isdisjoint(_KINDS)):
        return dict(items)
    return {"__items__": items}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value)) if len(value) == 1 else ""
    if name not in _KINDS:
        return {key: _decoded(item) for key, item in value.items()}
    content = _decoded(value[name])
    try:
        return tuple(content) if name == "__tuple__" else _KINDS[name](dict(content))
    except TypeError as error:  # the object is damaged: pydantic refuses it only for a `ValueError`
        raise ValueError(f"{name} has no such content: {error}") from error


KEPT: Final = BeforeValidator(_decoded), PlainSerializer(_encoded)  # of a field that is made with `as_json`
Kept = Annotated[Any, *KEPT]


class SavedBlock(NamedTuple):
    """The block of a tensor that a rank saved."""

    dtype: str
    block: Block
    on_host: bool  # whether the trainer had the tensor on the host


class StateHeader(Record):
    """What a rank saved in addition to tensors. The metadata of the rank's object holds this header."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    format: Literal[2]  # states without it lost keys that are not text, so they are not restored
    held: dict[str, SavedBlock]  # by name
    setup: dict[str, dict[str, Kept]]  # see `_setup`
    groups: list[dict[str, Kept]]  # of the optimizer, see `groups_of`
    values: dict[str, Kept]  # those values of the optimizer's state that are not tensors
    others: dict[str, Kept]  # by name: the state of a schedule and the like
    random: dict[str, Any]


def snapshot(
    live: Tensors, optimizer: Optimizer, others: Others, peers: Peers, given: Groups | None
) -> tuple[Tensors, StateHeader]:
    """Return copies on the host of what this rank saves. All ranks must call this at the same time.

    `given`: the optimizer's groups before training, if they are known.

    Raises `StateError` if a value cannot be saved.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps the optimizer
    if hasattr(inner, "optim"):  # whose `state` has the moments, and `inner.state` is empty
        raise StateError(
            f"a {type(inner).__name__} divides its moments among the ranks, which a state cannot hold: shard"
            " by FSDP2, use an optimizer that keeps all moments on every rank, or train without states"
        )
    started = time.monotonic()
    tensors = Tensors()
    held = dict[str, SavedBlock]()
    values = dict[str, Any]()
    same = dict[str, Any]()  # what all ranks must agree on
    for entry, value, parameter in _entries(live, optimizer):
        if isinstance(value, torch.Tensor):
            _require_plain(entry, value, parameter)
            saves = not is_copy(value) if isinstance(value, DTensor) else peers.main
            if saves:
                on_host = value.device.type == "cpu"
                held[entry] = SavedBlock(str(value.dtype), held_block(value), on_host)
                tensors[entry] = local(value).to("cpu", copy=True, memory_format=torch.contiguous_format)
            plain = peers.size > 1 and not isinstance(value, DTensor)
            same[entry] = _fingerprint(tensors.get(entry, value)) if plain else "not compared"
        else:
            values[entry] = as_json(value, entry)
            same[entry] = "no tensor"
    for rank, other in enumerate(ranks := peers.exchange(same)):
        for entry in {**ranks[0], **other}:
            if ranks[0].get(entry) != other.get(entry):
                raise StateError(
                    f"{entry} is not the same on rank {rank} as on rank 0, and a state holds only rank 0's:"
                    " keep it the same on all ranks, shard it by FSDP2, or train without states"
                )
    states = {name: as_json(other.state_dict(), f"the {name}") for name, other in others.items()}
    setup = _setup(live, optimizer, others, given)
    groups = groups_of(optimizer)
    numbers = snapshot_random_state()
    _log.info("training waited %s for a copy of its state", time_text(time.monotonic() - started))
    return tensors, StateHeader(
        format=2, held=held, setup=setup, groups=groups, values=values, others=states, random=numbers
    )


def load(
    header: StateHeader,
    saved: Mapping[str, SavedBlock],
    fill: Fill,
    live: Tensors,
    optimizer: Optimizer,
    others: Others,
) -> None:
    """Restore all but the random numbers, from this rank's `header`. `saved`: a block of every saved tensor.

    `fill` gets a tensor and its name in the state, and fills this rank's part of the tensor. Raises
    `StateError` if the state does not fit this trainer.
    """
    for part, now in _decoded(_setup(live, optimizer, others, groups_of(optimizer))).items():
        then = header.setup.get(part, now)  # what the groups were given may be unknown
        for key in sorted(now.keys() | then.keys()):
            was = then.get(key, "absent")
            is_now = now.get(key, "absent")
            if was != is_now:
                raise StateError(
                    f"the {part} {key} was {was} when the state was saved and is {is_now}: train with the"
                    " saved value, or start again"
                )
    for name, tensor in live.items():
        fill(f"weight/{name}", tensor)
    for group, values in zip(optimizer.param_groups, header.groups, strict=True):
        group.update(values)
    parameters = dict(_parameters(optimizer))
    for entry, held in saved.items():
        if entry.startswith("optimizer/"):
            _, number, key = entry.split("/", 2)
            parameter = parameters[number]
            dtype = _DTYPES[held.dtype]
            shape = held.block.shape
            if shape and shape == parameter.shape:
                moment = torch.empty_like(parameter, dtype=dtype)  # sharded like the parameter
            else:  # for example AdamW's step count, a scalar that may be on the host
                device = "cpu" if held.on_host and not shape else parameter.device
                moment = torch.empty(shape, dtype=dtype, device=device)
            fill(entry, moment)
            optimizer.state[parameter][key] = moment
    for entry, value in header.values.items():
        _, number, key = entry.split("/", 2)
        optimizer.state[parameters[number]][key] = value
    for name, other in others.items():
        other.load_state_dict(header.others[name])


def snapshot_random_state() -> dict[str, Any]:
    """Return the states of all random generators (python, numpy, torch on CPU and GPU) as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": [state.tolist() for state in (torch.get_rng_state(), *gpu)],
    }


def load_random_state(saved: Mapping[str, Any], branch: int = 0) -> None:
    """Continue the random numbers from where `snapshot_random_state` was called.

    If more ranks resume than saved, each additional rank takes the numbers of rank 0, with a `branch` that is
    not 0. Its new seed is the next random number plus `branch`, so that all ranks have different numbers.
    """
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    host, *gpu = (torch.tensor(state, dtype=torch.uint8) for state in saved["torch"])
    torch.set_rng_state(host)
    for state in gpu:  # at most one
        torch.cuda.set_rng_state(state)
    if branch:
        seed = int(torch.randint(1 << 62, ())) + branch
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"{number}.{index}", parameter


def _entries(live: Tensors, optimizer: Optimizer) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield (name in the state, value, parameter) of each weight and each value of the optimizer's state."""
    for name, tensor in live.items():
        yield f"weight/{name}", tensor, tensor
    for number, parameter in _parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer/{number}/{key}", value, parameter


def groups_of(optimizer: Optimizer) -> Groups:
    """The values of the optimizer's groups, for a field of `Kept`. Raises `StateError`."""
    return [
        {key: as_json(value, f"the optimizer's {key}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _setup(
    live: Tensors, optimizer: Optimizer, others: Others, given: Groups | None
) -> dict[str, dict[str, Any]]:
    """Return what must be the same when a state is saved and restored.

    Schedules, and some optimizers, change the groups' values during training. So what is compared is the
    arguments of the optimizer, the rates from which schedules begin, and, if they are known, the groups
    before training, but for `lr`, which schedules set before the first step.
    """
    trained = {f"parameter {number}": list(p.shape) for number, p in _parameters(optimizer)}
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__  # Accelerate wraps the optimizer
    kinds = {name: type(other).__name__ for name, other in others.items()}
    rates = [group.get("initial_lr") for group in optimizer.param_groups]
    arguments = {**getattr(optimizer, "defaults", {}), "initial_lr": rates}
    setup: dict[str, dict[str, Any]] = {
        "model's": {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in live.items()},
        "trainer's": kinds | {"optimizer": kind} | trained,
        "optimizer's": {key: as_json(value, f"the optimizer's {key}") for key, value in arguments.items()},
    }
    if given is not None:
        keys = {key for group in given for key in group if key != "lr"}
        setup["optimizer groups'"] = {key: [group.get(key) for group in given] for key in keys}
    return setup


def _fingerprint(tensor: torch.Tensor) -> tuple[str, list[int], int]:
    data = local(tensor).cpu().reshape(-1).view(torch.uint8).numpy()
    words = data.view(np.uint16) if data.size % 2 == 0 else data
    return str(tensor.dtype), list(tensor.shape), tensor_digest("", words)


def _require_plain(entry: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        fits = tensor.shape == parameter.shape and not any(p.is_partial() for p in tensor.placements)
    else:  # saved by the main rank alone: if the parameter is sharded, ranks agree only on scalars
        fits = not isinstance(parameter, DTensor) or not tensor.dim()
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter, DTensor) and str(tensor.dtype) in _DTYPES
    if not (known and fits):
        raise StateError(
            f"{entry} is a {type(tensor).__name__} of {tensor.dtype}, which a state cannot hold; use an"
            " optimizer that keeps plain tensors, sharded like the parameters, or train without states"
        )


def as_json(value: Any, what: str) -> Any:
    """A copy of `value` for a field with `KEPT`. Raises `StateError`, which calls the value `what`."""
    try:
        return json.loads(json.dumps(_encoded(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"{what} cannot be saved in a state ({error}); train without states") from error
