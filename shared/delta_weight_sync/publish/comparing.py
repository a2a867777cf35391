"""What the trainer hands over, compared with the newest bits that were handed over before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Patch
from delta_weight_sync.publish.mirror import Found, Mirror
from delta_weight_sync.publish.sharded import Weights, own_parts, union

Rest = Callable[[Mapping[str, tuple[int, ...]]], Iterable[tuple[str, Bits]]]


def nothing(_: Mapping[str, tuple[int, ...]]) -> Iterable[tuple[str, Bits]]:
    """The rest where everything is handed over."""
    return ()


class Comparison:
    """Every hand-over gives the tensors of the first one; what that leaves out stays as it is."""

    def __init__(self, mirror: Mirror, rest: Rest) -> None:
        """`rest`: of the shapes that version 0 was handed, the tensors that belong to it besides."""
        self._mirror, self._rest = mirror, rest
        self._given: set[str] = set()  # names

    def begin(self, weights: Weights) -> None:
        """Mirror a run's first hand-over."""
        for name, tensor in weights:
            self._mirror.add(name, tensor)
        self._given = set(self._mirror.shapes)
        for name, bits in self._rest(self._mirror.shapes):
            self._mirror.add(name, torch.from_numpy(bits).view(torch.bfloat16))

    def find(
        self, weights: Weights, remote_patches: Callable[[], list[Patch]]
    ) -> tuple[Found, list[Patch], list[Patch]]:
        """What this rank found, what the others found, and both by tensor; only reads the mirror.

        Raises `CodecError` if a tensor is missing, or its shape changed.
        """
        by_name: dict[str, list[Patch]] = {}
        found = self._mirror.find(own_parts(weights, self._mirror.shapes, by_name))
        self._given = self._given or set(by_name)
        if missing := self._given - by_name.keys():
            raise codec.CodecError(f"parameter {min(missing)} was not handed over; a version holds every one")
        theirs = remote_patches()
        for patch in (*found.patches, *theirs):
            by_name[patch.name].append(patch)
        return found, theirs, [patch for parts in by_name.values() for patch in union(parts)]
