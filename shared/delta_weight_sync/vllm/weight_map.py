"""Checkpoint coordinates -> places in the runtime parameters, learned once from the model's own loader.

vLLM fuses, splits, transposes and renames: `q_proj`, `k_proj` and `v_proj` become rows of one `qkv_proj`, of
which a tensor-parallel rank holds some. Its `load_weights` knows how, so it is run once on probes and the
copies it would make are recorded. A route is the record: all pieces of a checkpoint tensor on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from delta_weight_sync.vllm.geometry import Geometry, joined, times_touched
from delta_weight_sync.vllm.loader_trace import RouteError, record


@dataclass(frozen=True)
class Piece:
    """One recorded copy: where a strided part of a checkpoint tensor is in a runtime parameter.

    `memory`: flat int16 view of the parameter, from the part's first element to its last; in a float32 one
    the bf16 patterns are every other element. `source`: the part in the row-major checkpoint tensor;
    `target`: the same elements, in the same dimensions, in `memory`. `whole`: the part is the entire tensor,
    and both positions are the same number.
    """

    memory: torch.Tensor
    source: Geometry
    target: Geometry
    whole: bool


@dataclass(frozen=True)
class Route:
    """All pieces of one checkpoint tensor on this rank: none if others hold it, several if it is split."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self, which: Sequence[int]) -> torch.Tensor:
        """The tensor's live bits, row-major int16 [numel], in the pieces with these numbers; zero elsewhere.

        One piece that is the whole tensor is not copied: the result is the parameter's memory.
        """
        chosen = [self.pieces[number] for number in which]
        if len(chosen) == 1 and chosen[0].whole:
            return chosen[0].memory
        device = chosen[0].memory.device if chosen else None
        bits = torch.zeros(math.prod(self.shape), dtype=torch.int16, device=device)
        for piece in chosen:
            piece.source.of(bits).copy_(piece.target.of(piece.memory))
        return bits


Sources = dict[str, tuple[Geometry, ...] | str]
"""What one rank holds: per tensor its parts, or why it has no route. Plain data, for the other ranks."""


@dataclass(frozen=True)
class Learned:
    """What a rank learned: `routes` of the tensors that arrive by copies, and why the others do not."""

    routes: dict[str, Route]
    unroutable: dict[str, str]

    def sources(self) -> Sources:
        """This rank's share of what `ownership` needs."""
        parts = {name: [piece.source for piece in route.pieces] for name, route in self.routes.items()}
        canonical = {
            name: tuple(Geometry(p.offset, *joined(*p[1:])) for p in ps) for name, ps in parts.items()
        }
        return {**canonical, **self.unroutable}


def learn(model: torch.nn.Module, shapes: Mapping[str, Sequence[int]]) -> Learned:
    """Routes of the tensors in `shapes` (checkpoint name -> shape, all bf16); nothing is written.

    Raises `RouteError` for a model that deltas cannot be written into.
    """
    recorder = record(model, shapes)
    routes = {
        name: _route(name, tuple(shape), recorder.copies[name])
        for name, shape in shapes.items()
        if name not in recorder.unroutable
    }
    return Learned(routes, recorder.unroutable)


def ownership(
    shapes: Mapping[str, Sequence[int]], ranks: Sequence[Sources]
) -> tuple[list[dict[str, tuple[int, ...]]], dict[str, str]]:
    """Which pieces each rank counts in the digest, so that every element counts once, and what has no route.

    Returns per rank {name: numbers of its pieces}, and {name: reason} for all ranks. Of equal parts the first
    one counts. Raises `RouteError` where parts overlap otherwise, or leave elements of a tensor out.
    """
    owned: list[dict[str, tuple[int, ...]]] = [{} for _ in ranks]
    unroutable: dict[str, str] = {}
    for name, shape in shapes.items():
        held = [rank[name] for rank in ranks]
        parts = [part for part in held if not isinstance(part, str)]
        if len(parts) == len(held) and any(parts):
            for mine, numbers in zip(owned, _first_of_each(name, math.prod(shape), parts), strict=True):
                mine[name] = numbers
        else:
            reasons = [reason for reason in held if isinstance(reason, str)]
            unroutable[name] = reasons[0] if reasons else "vLLM's loader drops it"
    return owned, unroutable


def _first_of_each(name: str, numel: int, held: Sequence[Sequence[Geometry]]) -> list[tuple[int, ...]]:
    """Per rank the numbers of its parts that no part before equals; together they must be the tensor."""
    seen: dict[Geometry, tuple[int, int]] = {}
    for rank, parts in enumerate(held):
        for number, part in enumerate(parts):
            seen.setdefault(part, (rank, number))
    if (times_touched(list(seen), numel) != 1).any():
        raise RouteError(f"{name}: its parts in the model overlap, or are not all of it: {list(seen)}")
    return [tuple(number for at, number in seen.values() if at == rank) for rank in range(len(held))]


def _route(name: str, shape: tuple[int, ...], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Route:
    numel = math.prod(shape)
    return Route(name, shape, tuple(piece for copy in copies for piece in _pieces(*copy, numel)))


def _pieces(destination: torch.Tensor, source: torch.Tensor, numel: int) -> list[Piece]:
    """The copy as pieces: one, or one for each repetition of a source that is broadcast."""
    for dim, size in enumerate(source.shape):
        if size > 1 and source.stride(dim) == 0:
            pairs = zip(destination.unbind(dim), source.unbind(dim), strict=True)
            return [piece for pair in pairs for piece in _pieces(*pair, numel)]
    sizes, strides, places = joined(source.shape, source.stride(), destination.stride())
    wide = destination.element_size() // 2  # 2 for float32, of which bf16 is the upper half
    to = Geometry(wide - 1, sizes, tuple(place * wide for place in places))
    memory = destination.detach().as_strided((Geometry(0, sizes, places).end,), (1,)).view(torch.int16)
    whole = (sizes, strides, to) == ((numel,), (1,), (0, (numel,), (1,)))
    return [Piece(memory, Geometry(int(source.storage_offset()), sizes, strides), to, whole)]
