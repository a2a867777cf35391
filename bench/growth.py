"""How size and speed grow: with the share of weights that change, and with the size of the model."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import competitors, deltas
from bench.change import Change
from bench.research.entropy import limits
from bench.results import SCRATCH, Results
from bench.shapes import qwen_shapes
from bench.timing import summary, take_turns
from delta_weight_sync import codec
from delta_weight_sync.codec import Encoding, Patch

SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
PARTS = {"16 M": (1, 0), "63 M": (4, 0), "220 M": (14, 0), "596 M": (28, 151936)}  # layers, vocabulary
_LEVELS: tuple[Encoding, ...] = ("fast", "small")
_ROUNDS = 3


def run(results: Results) -> dict[str, Any]:
    """Both sweeps, on parts of the Qwen3-0.6B-shaped set."""
    part = qwen_shapes(*PARTS["63 M"])
    with_changes = [measure(deltas.qwen(share=share, shapes=part)) for share in SHARES]
    with_size = [measure(deltas.qwen(shapes=qwen_shapes(*part))) for part in PARTS.values()]
    return {"changes": with_changes, "size": with_size}


def measure(change: Change) -> dict[str, Any]:
    """Bytes per change, limits, and speeds of encode and decode."""
    print(
        f"  {change.elements / 1e6:.0f} M weights, {change.changed / change.elements:.2%} changed", flush=True
    )
    files = {encoding: _file(change, encoding) for encoding in _LEVELS}
    sizes = {encoding: file.stat().st_size for encoding, file in files.items()}
    sizes |= {"gap_zstd": competitors.gap_zstd(change), "bitmask_zstd": competitors.bitmask_zstd(change)}
    works = {f"encode {encoding}": functools.partial(change.encode, encoding) for encoding in _LEVELS}
    works |= {
        f"decode {encoding}": functools.partial(_decode, change, file) for encoding, file in files.items()
    }
    rounds = take_turns(works, _ROUNDS)
    return {
        "elements": change.elements,
        "changed": change.changed,
        "share": change.changed / change.elements,
        "per_change": {name: round(size / change.changed, 4) for name, size in sizes.items()},
        "limits": asdict(limits(change.old, change.patches)),
        "parts": {name: summary(seconds, change.model_bytes) for name, seconds in rounds.items()},
    }


def _file(change: Change, encoding: Encoding) -> Path:
    path = SCRATCH / f"growth-{encoding}.safetensors"
    path.write_bytes(change.encode(encoding))
    return path


def _decode(change: Change, path: Path) -> list[Patch]:
    return list(codec.Delta(path).patches(change.shapes, change.old.__getitem__))
