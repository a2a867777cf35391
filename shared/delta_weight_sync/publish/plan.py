"""How the trainer's tensors become the tensors of a version.

A version holds each tensor of the checkpoint, under its name there, in its dtype there. There are two
exceptions:

- A checkpoint that is float32 as a whole gives versions in bf16, the dtype that servers use. In a checkpoint
  of a 16-bit dtype, float32 tensors are there on purpose, so they stay float32.
- If the trainer holds a tensor in another 16-bit dtype than the checkpoint, the version has the trainer's. If
  the run has versions already, this is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import torch

from delta_weight_sync.checkpoint import DTYPES, FLOATS, Spec, Specs, dtype_of
from delta_weight_sync.errors import CheckpointError
from delta_weight_sync.publish.names import Joined, Names, View
from delta_weight_sync.publish.readable import no_elements

HALF: Final = ("BF16", "F16")
PACKED: Final = ("U8", "I8", "I32")  # dtypes in which quantized checkpoints pack weights


class Target(NamedTuple):
    """A tensor of a version, made from one tensor of the trainer.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Its dtype in a version.
        words: The shape of its words.
        view: How it lies in the trainer's tensor; None if it is the whole tensor.
    """

    name: str
    dtype: str
    words: tuple[int, ...]
    view: View | None


@dataclass(frozen=True)
class Plan:
    """How the trainer's tensors become the tensors of a version.

    Attributes:
        source: Name of the checkpoint or of the run that decides, for messages.
        stored: The tensors that it has; empty if it has no weights.
        names: What the parameters of the trainer's model are called there.
        quantized: Whether it is quantized, so that its dtypes say nothing about the trainer's.
        fixed: Whether it is a run, whose dtypes cannot change.
    """

    source: str
    stored: Specs
    names: Names
    quantized: bool = False
    fixed: bool = False
    _known: dict[tuple[str, torch.dtype, torch.Size], list[Target]] = field(
        default_factory=dict, compare=False
    )

    def targets(self, name: str, tensor: torch.Tensor) -> list[Target]:
        """The tensors of a version that are views of a tensor of the trainer.

        Raises:
            CheckpointError: A version cannot hold them.
        """
        key = name, tensor.dtype, tensor.shape
        if key not in self._known:
            self._known[key] = [*self._targets(name, tensor)]
        return self._known[key]

    def _targets(self, name: str, tensor: torch.Tensor) -> Iterator[Target]:
        trained = dtype_of(tensor)
        shape = tuple(tensor.shape)
        views = self.names.views.get(name)
        named = views[0].name if views else name
        if not tensor.numel() and named in self.stored and 0 not in self.stored[named].shape:
            raise no_elements(name, tensor)
        if views is None:
            yield self.target(name, trained, shape)
        elif len(views) == 1 and views[0].is_whole:
            yield self.target(views[0].name, trained, shape)
        elif views[0].parameter != shape:
            raise CheckpointError(
                f"{name} has shape {shape}, but the model of {self.source} has {views[0].parameter}: give as"
                " base the checkpoint that the policy was loaded from"
            )
        else:
            for view in views:
                yield self.target(view.name, trained, view.shape, view)

    def target(self, name: str, trained: str, shape: tuple[int, ...], view: View | None = None) -> Target:
        """The tensor `name` of a version; `trained` is the dtype that the trainer has it in."""
        dtype = self._dtype(name, trained)
        return Target(name, dtype, Spec(dtype, shape).words, view)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor that comes from this tensor of the trainer."""
        names = [view.name for view in self.names.views.get(name, ())] or [name]
        return not self.stored or any(each in self.stored for each in names)

    def lacks_tied(self, name: str) -> bool:
        """Whether versions lack this tensor of the trainer, given that the trainer ties it to another one."""
        names = [view.name for view in self.names.views.get(name, ())] or [name]
        tied = () if self.fixed else self.names.tied
        return all(each in tied or (self.stored and each not in self.stored) for each in names)

    def joined(self, name: str) -> Joined | None:
        """The tensors that are computed from a tensor of the trainer and others."""
        return self._joined.get(name)

    @cached_property
    def _joined(self) -> dict[str, Joined]:
        return {source: joined for joined in self.names.joined for source in joined.sources}

    @cached_property
    def main(self) -> str:
        """The float dtype of most elements of the checkpoint; "" if it has none."""
        return main_dtype(self.stored)

    def is_kept(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor in a wider float dtype than most of its weights."""
        return self.main in HALF and name in self.stored and self.stored[name].dtype in ("F32", "F64")

    def _dtype(self, name: str, trained: str) -> str:
        stored = self.stored[name].dtype if name in self.stored else trained
        both_float = trained in FLOATS and (stored in FLOATS or self.quantized)
        if trained in PACKED and stored in FLOATS:
            raise CheckpointError(
                f"{name} is quantized ({trained}) in the trainer: load the model in bf16, or merge and"
                " dequantize it, before you publish"
            )
        if not both_float and stored != trained:
            raise CheckpointError(
                f"{name} is {trained} in the trainer, but {stored} in {self.source}: publish it in that"
                " dtype, or leave it out if training does not change it"
            )
        if self.fixed and {trained, stored} == {*HALF}:
            raise CheckpointError(
                f"{name} is {trained} in the trainer, but {stored} in {self.source}, which cannot hold the"
                f" same values: load the model in {DTYPES[stored][0]}, or choose another run name"
            )
        if not both_float or (self.fixed and name in self.stored) or self.is_kept(name):
            return stored
        if trained in HALF or (trained == "F32" and name in self.names.float32):
            return trained
        return self.main if self.main in HALF else "BF16"


def main_dtype(specs: Specs) -> str:
    """The float dtype of most elements; "" if there is none."""
    elements = Counter[str]()
    for spec in specs.values():
        if spec.dtype in FLOATS:
            elements[spec.dtype] += math.prod(spec.shape)
    return max(elements, key=elements.__getitem__, default="")
