"""What one rank of a trainer knows at a moment: copied in its thread, written by another, put back later.

Of a float32 parameter that was handed over only the low 16 bits are written, of a bfloat16 one nothing: the
rest is the version that was published at that moment (see `masters`). Everything else is written whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from delta_weight_sync.codec import Bits
from delta_weight_sync.publish import masters, optimizer_state, random_state
from delta_weight_sync.publish.blocks import held_block, is_block, local
from delta_weight_sync.publish.optimizer_state import StateError, Tensors, as_json, to_host
from delta_weight_sync.publish.sharded import Weights
from delta_weight_sync.publish.tensor_file import write_tensors
from delta_weight_sync.refs import ProtocolError

Published = Callable[[str, torch.Size], Bits]
_NOTE = {"weights", "optimizer", "random", "others"}
_LOW, _PUBLISHED, _WHOLE = "low", "published", "whole"  # how a weight is kept
_TYPES = {_LOW: torch.float32, _PUBLISHED: torch.bfloat16}


class Stateful(Protocol):
    """A learning rate schedule or a gradient scaler: what it remembers is JSON."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from there."""


@dataclass
class Snapshot:
    """One rank's copies, on the host: float32 `masters` by name, other tensors, and a `note` of JSON."""

    masters: Tensors
    tensors: Tensors
    note: dict[str, Any]

    def write(self, path: Path) -> str:
        """Write a `.safetensors` file, letting go of the masters on the way; returns the sha256."""
        for name in list(self.masters):
            rest = masters.split(self.masters.pop(name).reshape(-1).numpy())
            self.tensors[f"low/{name}"] = torch.from_numpy(rest.low.view(np.int16))
            if rest.odd.size:
                self.tensors[f"index/{name}"] = torch.from_numpy(rest.odd)
                self.tensors[f"words/{name}"] = torch.from_numpy(rest.words.view(np.int32))
        return write_tensors(self.tensors, json.dumps(self.note), path)


def take(
    weights: Weights,
    handed_over: Container[str],
    optimizer: torch.optim.Optimizer,
    others: dict[str, Stateful],
    *,
    main: bool,
) -> Snapshot:
    """Copy this rank's part of all; `handed_over`: the names that versions hold. Raises `StateError`."""
    kinds: dict[str, tuple[str, list[int]]] = {}
    copies: dict[str, Tensors] = {_LOW: {}, _WHOLE: {}}
    for name, tensor in weights:
        kind = _kind(name, tensor, handed_over)
        kinds[name] = kind, list(tensor.shape)
        if kind in copies and (main or isinstance(tensor, DTensor)):
            copies[kind][name] = to_host(tensor, name)
    moments, remembered = optimizer_state.take(optimizer, main=main)
    chance, numbers = random_state.take()
    whole = {f"whole/{name}": tensor for name, tensor in copies[_WHOLE].items()}
    states = {name: as_json(other.state_dict(), f"the {name}") for name, other in others.items()}
    note = {"weights": kinds, "optimizer": remembered, "random": numbers, "others": states}
    return Snapshot(copies[_LOW], whole | moments | chance, note)


class Saved:
    """The files of one rank, and of the main one where this rank did not write what all of them hold."""

    def __init__(self, path: Path, main: Path) -> None:
        self.note = _note(path)
        self._main = _note(main)
        self._files = list(dict.fromkeys((main, path)))

    @property
    def published_whole(self) -> bool:
        """True if each of the weights is one of the version's."""
        return all(kind != _WHOLE for kind, _ in self.note["weights"].values())

    def put(
        self,
        weights: Weights,
        published: Published,
        optimizer: torch.optim.Optimizer,
        others: dict[str, Stateful],
    ) -> None:
        """Put all of it back; `published` gives the bits of a weight in full, and is called on every rank.

        Raises `StateError` if the model, the optimizer or the others are not those that were saved.
        """
        live = dict(weights)
        self._require_same(live, others)
        tensors = self._read()
        with torch.no_grad():
            for name, tensor in live.items():
                self._put(name, tensor, tensors, published)
        values = self._main["optimizer"]["values"] | self.note["optimizer"]["values"]
        on_host = {*self._main["optimizer"]["on_host"], *self.note["optimizer"]["on_host"]}
        remembered = self.note["optimizer"] | {"values": values, "on_host": on_host}
        optimizer_state.put(optimizer, tensors, remembered)
        for name, other in others.items():
            other.load_state_dict(self.note["others"][name])
        random_state.put(tensors, self.note["random"])

    def _read(self) -> Tensors:
        """All tensors; those that both files have are this rank's."""
        tensors: Tensors = {}
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors

    def _require_same(self, live: dict[str, torch.Tensor], others: dict[str, Stateful]) -> None:
        kinds = self.note["weights"]
        if strange := live.keys() ^ kinds.keys():
            where = "only in the model" if min(strange) in live else "only in the state"
            raise StateError(f"{min(strange)} is {where}: train the model that was saved, or begin again")
        for name, tensor in live.items():
            kind, shape = kinds[name]
            if list(tensor.shape) != shape:
                raise StateError(
                    f"{name} had shape {shape} when it was saved: train that model, or begin again"
                )
            if kind in _TYPES and tensor.dtype != _TYPES[kind]:
                now, then = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, _TYPES[kind]))
                raise StateError(
                    f"{name} was {then} when the state was saved and is {now}: use --dtype {then}"
                )
        if strange := others.keys() ^ self.note["others"].keys():
            raise StateError(
                f"the state was saved with another {min(strange)}: give the old one, or begin again"
            )

    def _put(self, name: str, tensor: torch.Tensor, tensors: Tensors, published: Published) -> None:
        own, kind = local(tensor), self.note["weights"][name][0]
        if kind == _WHOLE:
            new = tensors[f"whole/{name}"]
        else:
            bits = np.array(published(name, tensor.shape)[held_block(tensor).at], order="C")
            new = _master(name, bits, tensors) if kind == _LOW else _bf16(bits)
        if new.dtype != own.dtype or new.numel() != own.numel():
            raise StateError(f"{name} lies on the ranks in another way than when it was saved: start as many")
        own.copy_(new.reshape(own.shape))


def _kind(name: str, tensor: torch.Tensor, handed_over: Container[str]) -> str:
    """Decided by what all ranks see alike."""
    plain = not isinstance(tensor, DTensor) or is_block(tensor)
    if name in handed_over and plain and tensor.dtype == torch.float32:
        return _LOW
    if name in handed_over and plain and tensor.dtype == torch.bfloat16:
        return _PUBLISHED
    return _WHOLE


def _note(path: Path) -> dict[str, Any]:
    """Raises `ProtocolError` for a file that is no state."""
    try:
        with safe_open(path, framework="pt") as file:
            note: dict[str, Any] = json.loads((file.metadata() or {})["note"])
    except (SafetensorError, LookupError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{path.name} is not a trainer's state: {error}") from error
    if not isinstance(note, dict) or note.keys() != _NOTE:
        raise ProtocolError(f"{path.name} is not a trainer's state: it lacks {', '.join(sorted(_NOTE))}")
    return note


def _master(name: str, bits: Bits, tensors: Tensors) -> torch.Tensor:
    low = tensors[f"low/{name}"].numpy().view(np.uint16)
    if low.size != bits.size:
        raise StateError(f"{name} lies on the ranks in another way than when it was saved: start as many")
    none = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    index, words = tensors.get(f"index/{name}", none[0]), tensors.get(f"words/{name}", none[1])
    rest = masters.Rest(low, index.numpy(), words.numpy().view(np.uint32))
    return torch.from_numpy(masters.masters(bits.reshape(-1), rest)).reshape(bits.shape)


def _bf16(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
