"""Measures one version of a run as a row of the data set; every row has the same fields (see `card.md`).

FP8 figures describe a copy of the weights in e4m3. Each tensor has one scale: the power of two that brings
the largest weight of its first version just below 448, the largest number of e4m3, so that scaling itself
rounds nothing. Larger numbers saturate.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.research.entropy import limits
from delta_weight_sync import codec
from delta_weight_sync.codec import ULP_CLASSES, Bits, Encoding, Patch, count_ulps
from delta_weight_sync.records import Manifest

Row = dict[str, Any]
MODES: Final = ("gaps", "bands", "mask", "dense", "raw")
_ENCODINGS: tuple[Encoding, ...] = ("fast", "small")
_LARGEST, _SMALLEST_EXPONENT, _FRACTION_BITS = 448.0, -6, 3  # of e4m3
_PARTS: Final = {  # the first match counts: a norm inside the attention is a norm
    "norm": r"norm|\bln_|layernorm",
    "head": r"\blm_head\b|\bembed_out\b|^output\.",
    "embedding": r"embed|\bwte\b|\bwpe\b",
    "attention": r"attn|attention|\b[qkvo]_proj\b|\bqkv",
    "mlp": r"mlp|feed_forward|ffn|experts|\bfc\d?\b|\b(gate|up|down)_proj\b",
}
KINDS: Final = ("embedding", "attention", "mlp", "norm", "head", "other")


@dataclass(frozen=True)
class Step:
    """One version: its manifest, the bits of every tensor before it, and what it changed."""

    manifest: Manifest
    before: Mapping[str, Bits]
    patches: Sequence[Patch]


@dataclass(frozen=True)
class About:
    """Facts about a run that its bucket may not hold."""

    model: str
    trainer: str  # "fp32": with fp32 master weights; "bf16": without
    rates: Mapping[int, float]  # learning rate by version, as far as known


def row(step: Step, about: About, scales: Mapping[str, int]) -> Row:
    """Measure a version; `scales` has the FP8 scale of each tensor."""
    manifest, patches, before = step.manifest, step.patches, step.before
    in_fp8 = {patch.name: fp8_changes(before[patch.name], patch, scales[patch.name]) for patch in patches}
    bound = asdict(limits(before, patches))
    moved = sum(map(count_ulps, patches), np.zeros(len(ULP_CLASSES), np.int64))
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
        "density_fp8": _share(sum(in_fp8.values()), manifest.total),
        "ulps": dict(zip(ULP_CLASSES, moved.tolist(), strict=True)),
        "kinds": _by_kind(step, in_fp8),
        "limits": {name: round(value, 4) for name, value in bound.items()},
        "bytes": {encoding: _bytes(step, encoding) for encoding in _ENCODINGS},
        "published_bytes": sum(part.size for part in manifest.delta),
        "full_bytes": manifest.full_bytes,
    }


def kind_of(name: str) -> str:
    """The part of a transformer that a tensor belongs to, one of `KINDS`."""
    return next((kind for kind, pattern in _PARTS.items() if re.search(pattern, name)), "other")


def _by_kind(step: Step, in_fp8: Mapping[str, int]) -> dict[str, dict[str, int]]:
    weights, changed, changed_fp8 = Counter[str](), Counter[str](), Counter[str]()
    for name, bits in step.before.items():
        weights[kind_of(name)] += bits.size
    for patch in step.patches:
        changed[kind_of(patch.name)] += patch.index.size
        changed_fp8[kind_of(patch.name)] += in_fp8[patch.name]
    return {
        kind: {"weights": weights[kind], "changed": changed[kind], "changed_fp8": changed_fp8[kind]}
        for kind in KINDS
    }


def _bytes(step: Step, encoding: Encoding) -> dict[str, int]:
    """Bytes of the version's delta in one encoding, by mode of its groups; "table" is the rest."""
    base, version = step.manifest.version - 1, step.manifest.version
    data = codec.encode(step.patches, step.before.__getitem__, base=base, version=version, encoding=encoding)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    modes = [group["mode"] for group in json.loads(header.pop("__metadata__")["groups"])]
    found = dict.fromkeys(MODES, 0)
    for stream, entry in header.items():
        start, end = entry["data_offsets"]
        found[modes[int(stream.split(".")[0])]] += end - start
    return {**found, "table": len(data) - sum(found.values())}


def _share(part: int, total: int) -> float:
    return round(part / total, 8) if total else 0.0


def fp8_scale(bits: Bits) -> int:
    """The exponent of a tensor's FP8 scale; 0 if no weight is finite and nonzero."""
    values = np.abs(_to_float(bits.reshape(-1)))
    largest = float(values[np.isfinite(values)].max(initial=0.0))
    return int(np.floor(np.log2(_LARGEST / largest))) if largest else 0


def fp8_changes(old: Bits, patch: Patch, scale: int) -> int:
    """Count the changes of a tensor with bits `old` that its FP8 copy shows."""
    before = old.reshape(-1)[patch.index]
    return int(np.count_nonzero(to_fp8(before, scale) != to_fp8(before + patch.ulps, scale)))


def to_fp8(bits: Bits, scale: int) -> NDArray[np.uint32]:
    """Round bf16 weights times 2^scale to e4m3, ties to even; returns the float32 bits of the result."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.ldexp(_to_float(bits), scale)
        exponent = np.frexp(values)[1] - 1
        step = np.ldexp(np.float32(1), np.maximum(exponent, _SMALLEST_EXPONENT) - _FRACTION_BITS)
        nearest = np.clip(np.rint(values / step) * step, -_LARGEST, _LARGEST)
    return nearest.astype(np.float32).view(np.uint32)


def _to_float(bits: Bits) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
