"""Jumps and anchors: how large they are, how often one comes, and what a late replica fetches."""

from __future__ import annotations

from typing import NamedTuple

from delta_weight_sync.plan import coding, rates
from delta_weight_sync.plan.rates import Encoding, Trainer
from delta_weight_sync.ways import ANCHOR_PAYS, MAX_FILES, STRIDES

_DENSE = 0.3  # of the weights: beyond it a change costs what it costs there
_SPANS = (*reversed(STRIDES), 1)


class Behind(NamedTuple):
    """What is fetched behind an anchor."""

    size: float  # bytes
    changes: float
    files: int


class Shortcuts:
    """Of a run in which every version changes `share` of the weights, from 0 to 1."""

    def __init__(self, params: int, share: float, encoding: Encoding, trainer: Trainer) -> None:
        self._full = 2.0 * params
        self._changes = {span: params * merged(share, span) for span in _SPANS}
        self._sizes = {span: self._size(params, merged(share, span), encoding, trainer) for span in _SPANS}

    def _size(self, params: int, share: float, encoding: Encoding, trainer: Trainer) -> float:
        size = coding.delta_bytes(params, min(share, _DENSE), encoding, trainer)
        return min(size * max(share / _DENSE, 1.0), self._full)

    @property
    def delta(self) -> float:
        """Bytes of a delta over one version."""
        return self._sizes[1]

    @property
    def jumps(self) -> float:
        """Bytes of jumps per version."""
        return sum(self._sizes[stride] / stride for stride in STRIDES)

    def behind(self, versions: float) -> Behind:
        """The way from an anchor over so many versions, with the longest jumps first."""
        size, changes, files, left = 0.0, 0.0, 0, int(versions)
        for span in _SPANS:
            count, left = divmod(left, span)
            size, changes = size + count * self._sizes[span], changes + count * self._changes[span]
            files += count
        return Behind(size, changes, files)

    def anchor_every(self) -> int:
        """After how many versions the publisher puts the next anchor."""
        versions = 1
        while not self._pays(self.behind(versions)):
            versions += 1
        return versions

    def _pays(self, way: Behind) -> bool:
        return way.size > ANCHOR_PAYS * self._full or way.files >= MAX_FILES


def merged(share: float, span: int) -> float:
    """Share of the weights that a delta over so many versions changes: many move again, some move back."""
    return min(share * rates.MERGED[span], 1.0)
