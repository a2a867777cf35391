"""What is measured of one version, as a row of the data set; every row has the same fields."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Encoding
from delta_weight_sync.codec.modes import LAYOUTS
from delta_weight_sync.corpus import entropy, fp8, ulps
from delta_weight_sync.corpus.kinds import KINDS, kind_of
from delta_weight_sync.corpus.versions import Step

Row = dict[str, Any]
_ENCODINGS: tuple[Encoding, ...] = ("fast", "small")


@dataclass(frozen=True)
class About:
    """What the bucket does not say of every run."""

    model: str
    trainer: str  # "fp32": with fp32 master weights; "bf16": without
    rates: Mapping[int, float]  # learning rate by version, where it is known


def row(step: Step, about: About, scales: Mapping[str, int]) -> Row:
    """All figures of one version; `scales`: of the tensors in FP8, see `fp8.scale_of`."""
    manifest, patches, before = step.manifest, step.patches, step.before
    seen = {patch.name: fp8.changed(before[patch.name], patch, scales[patch.name]) for patch in patches}
    kinds = _by_kind(step, seen)
    bound = entropy.limits(before, patches)
    moved = sum((ulps.histogram(patch.ulps) for patch in patches), np.zeros(len(ulps.CLASSES), np.int64))
    return {
        "run": manifest.run,
        "model": about.model,
        "trainer": about.trainer,
        "lr": about.rates.get(manifest.version),
        "version": manifest.version,
        "sync": manifest.sync,
        "weights": manifest.total,
        "changed": manifest.changed,
        "density": _share(manifest.changed, manifest.total),
        "density_fp8": _share(sum(seen.values()), manifest.total),
        "ulps": dict(zip(ulps.CLASSES, moved.tolist(), strict=True)),
        "kinds": kinds,
        "limits": {name: round(value, 4) for name, value in asdict(bound).items()},
        "bytes": {encoding: _bytes(step, encoding) for encoding in _ENCODINGS},
        "published_bytes": manifest.deltas[-1].size,
        "full_bytes": manifest.full_bytes,
    }


def scales_of(state: Mapping[str, Bits]) -> dict[str, int]:
    """The FP8 scale of every tensor."""
    return {name: fp8.scale_of(bits) for name, bits in state.items()}


def _by_kind(step: Step, seen: Mapping[str, int]) -> dict[str, dict[str, int]]:
    weights, changed, in_fp8 = Counter[str](), Counter[str](), Counter[str]()
    for name, bits in step.before.items():
        weights[kind_of(name)] += bits.size
    for patch in step.patches:
        changed[kind_of(patch.name)] += patch.index.size
        in_fp8[kind_of(patch.name)] += seen[patch.name]
    return {
        kind: {"weights": weights[kind], "changed": changed[kind], "changed_fp8": in_fp8[kind]}
        for kind in KINDS
    }


def _bytes(step: Step, encoding: Encoding) -> dict[str, int]:
    """Of the delta in one encoding: bytes of the groups in each mode, and of the rest of the file."""
    base, version = step.manifest.version - 1, step.manifest.version
    data = codec.encode(step.patches, step.before.__getitem__, base=base, version=version, encoding=encoding)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    modes = [group["mode"] for group in json.loads(header.pop("__metadata__")["groups"])]
    found: dict[str, int] = dict.fromkeys(LAYOUTS, 0)
    for stream, entry in header.items():
        start, end = entry["data_offsets"]
        found[modes[int(stream.split(".")[0])]] += end - start
    return {**found, "table": len(data) - sum(found.values())}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 8) if whole else 0.0
