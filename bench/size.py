"""Bytes per change: this codec's levels, their limits, and what others send."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from bench import competitors, deltas, original
from bench.change import Change
from bench.results import Results
from bench.shapes import qwen_shapes
from delta_weight_sync.codec import Encoding
from tests.support.entropy import limits

_LEVELS: tuple[Encoding, ...] = ("fast", "small")


def run(results: Results) -> dict[str, Any]:
    """Every data set, and the adapters that would be sent instead."""
    return {"sets": [measure(change) for change in _sets()], "adapters": adapters()}


def measure(change: Change) -> dict[str, Any]:
    """Sizes of one change, in all forms."""
    print(f"  {change.model}, {change.trainer}: {change.changed / change.elements:.3%} changed", flush=True)
    sizes = {encoding: len(change.encode(encoding)) for encoding in _LEVELS}
    sizes["gap_zstd"], sizes["bitmask_zstd"] = competitors.gap_zstd(change), competitors.bitmask_zstd(change)
    sizes["original"] = len(original.write(change.patches, change.old.__getitem__))
    sizes["full"] = change.model_bytes
    per_change = {name: size / change.changed for name, size in sizes.items()}
    bound = limits(change.old, change.patches)
    return {
        "model": change.model,
        "trainer": change.trainer,
        "lr": change.lr,
        "elements": change.elements,
        "changed": change.changed,
        "share": change.changed / change.elements,
        "bytes": sizes,
        "per_change": {name: round(size, 4) for name, size in per_change.items()},
        "limits": {name: round(limit, 4) for name, limit in asdict(bound).items()},
        "above_limit": {
            "fast": round(per_change["fast"] / bound.independent - 1, 4),
            "small": round(per_change["small"] / bound.by_exponent - 1, 4),
        },
    }


def adapters() -> list[dict[str, Any]]:
    """Sizes of LoRA adapters for Qwen3-0.6B; fp32 is what is sent, bf16 what could be."""
    kinds = {"all linear layers": competitors.ALL_LINEAR, "query and value": competitors.QUERY_VALUE}
    shapes = qwen_shapes()
    return [
        {
            "rank": rank,
            "targets": kind,
            "bytes": competitors.adapter(shapes, rank, targets),
            "bytes_bf16": competitors.adapter(shapes, rank, targets, torch.bfloat16),
        }
        for rank in (16, 32)
        for kind, targets in kinds.items()
    ]


def _sets() -> Iterator[Change]:
    for trainer in (deltas.LATE, deltas.GRID, deltas.BF16):
        yield deltas.smollm2(trainer)
    for trainer in (deltas.LATE, deltas.BF16):
        yield deltas.qwen(trainer)
