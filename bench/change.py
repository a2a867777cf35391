"""One version of a model to the next, as the benchmarks use it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Patch


@dataclass(frozen=True)
class Change:
    """`old` bits by tensor, and the patches that lead to the new ones.

    `model` and `trainer` say in words what changed and how; `lr` is the learning rate of the update.
    """

    model: str
    trainer: str
    lr: float
    old: dict[str, Bits]
    patches: list[Patch]

    @property
    def elements(self) -> int:
        """Weights of the model."""
        return sum(bits.size for bits in self.old.values())

    @property
    def changed(self) -> int:
        """Changed weights."""
        return sum(patch.index.size for patch in self.patches)

    @property
    def model_bytes(self) -> int:
        """Size of the whole model in bf16."""
        return 2 * self.elements

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: bits.shape for name, bits in self.old.items()}

    def new_values(self, patch: Patch) -> Bits:
        """The bits that the patch's elements get."""
        return self.old[patch.name].reshape(-1)[patch.index] + patch.ulps

    def encode(self, encoding: codec.Encoding) -> bytes:
        """The delta file."""
        return codec.encode(self.patches, self.old.__getitem__, base=0, version=1, encoding=encoding)

    def taken(self) -> Change:
        """Take the step, in place: the change that leads back. This one must not be used any more."""
        for patch in self.patches:
            codec.apply(patch, self.old[patch.name])
        return replace(self, patches=[codec.inverse(patch) for patch in self.patches])
