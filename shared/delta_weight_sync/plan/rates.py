"""What the cost model stands on: measured rates and list prices, each with where it comes from.

Rates are those of `make bench` (one core of an AMD EPYC; `bench/results.json`, 2026-11-23). Tests hold this
table against that file: sizes within 1 %, seconds within a factor of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from delta_weight_sync.plan.prices import HARDWARE

Encoding = Literal["fast", "small"]
Trainer = Literal["fp32", "fp32-start", "bf16"]


@dataclass(frozen=True)
class Size:
    """Bytes per change of a delta file in which `share` of the weights changed."""

    share: float
    fast: float
    small: float


# "fp32": section growth, 63 M weights in the shapes of Qwen3-0.6B, master weights in fp32, late in a run.
# The others: at 1 % section size (SmolLM2-135M; Qwen3-0.6B-shaped). Their other rows were measured once, on
# 2026-11-21, from `bench.deltas.smollm2(GRID, share)` and `bench.deltas.qwen(BF16, share, 63 M weights)`.
SIZES: Final[dict[Trainer, tuple[Size, ...]]] = {
    "fp32": (
        Size(0.000992, 1.6886, 1.1785),
        Size(0.002969, 1.4649, 1.0259),
        Size(0.009905, 1.2470, 0.8888),
        Size(0.029759, 1.0726, 0.7759),
        Size(0.100022, 0.8705, 0.6535),
        Size(0.300014, 0.7064, 0.5506),
    ),
    "fp32-start": (
        Size(0.001006, 1.8212, 0.7929),
        Size(0.003000, 1.5451, 0.7201),
        Size(0.009865, 1.3033, 0.6643),
        Size(0.029895, 1.0977, 0.6677),
        Size(0.099790, 0.8773, 0.6398),
        Size(0.300080, 0.7095, 0.5514),
    ),
    "bf16": (
        Size(0.000993, 1.8810, 0.6033),
        Size(0.002932, 1.6476, 0.5717),
        Size(0.009883, 1.4140, 0.5454),
        Size(0.029891, 1.2183, 0.5452),
        Size(0.100058, 0.9894, 0.5473),
        Size(0.300022, 0.7780, 0.5364),
    ),
}
# How many times as many weights a jump over so many versions changes as one version; section joining.
MERGED: Final = {1: 1.0, 8: 4.93, 64: 16.1}
TABLE_BYTES: Final = 75.0  # of a delta file's header per tensor that it lists
WEIGHTS_PER_TENSOR: Final = 1.4e6  # of the set above; larger models have larger tensors


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of one core per weight of the model and per changed weight."""

    per_weight: float
    per_change: float = 0.0

    def seconds(self, weights: float, changes: float = 0.0) -> float:
        """Time for so many."""
        return 1e-9 * (self.per_weight * weights + self.per_change * changes)


# Sections speed (596 M weights, 1 % changed) and growth (16 to 596 M weights, 0.1 to 30 % changed).
DIFF: Final[dict[Trainer, Cost]] = {"fp32": Cost(0.67), "fp32-start": Cost(0.67), "bf16": Cost(0.45)}
ENCODE: Final[dict[Encoding, Cost]] = {"fast": Cost(0.0, 12.0), "small": Cost(0.14, 30.0)}
DENSE: Final = 1 / 8  # share of changes above which other modes are tried (shared/codec/modes.py) ...
TRIED: Final = 2.5  # ... and encoding takes so many times as long
DECODE: Final[dict[Encoding, Cost]] = {"fast": Cost(0.02, 8.5), "small": Cost(0.26, 17.0)}
DIGEST: Final = Cost(0.11)  # of the live weights, before each delta
PLACE: Final = Cost(0.0, 11.0)  # find a change's place, read its old bits
COMMIT: Final = Cost(0.0, 9.4)  # write, read back: what generation waits for (also section live)
SAVE: Final = Cost(3.1)  # a checkpoint onto a disk ("publish whole")
LOAD: Final = Cost(0.175)  # a checkpoint out of the disk's cache ("receive whole")
APPLY: Final = Cost(0.0, 8.6)  # add a decoded delta to weights on the host

TWO_THREADS: Final = (1.12, 1.62)  # times as fast as one, at least and at most; `make bench`, section threads

GPU_BYTES: Final = 80e9  # assumed: one accelerator
TRAINER_BYTES: Final = 16.0  # assumed, per weight: fp32 weights, gradients, and AdamW's two moments
REPLICA_BYTES: Final = 2.4  # assumed, per weight: bf16, and a fifth for keys and values


@dataclass(frozen=True)
class Space:
    """A hardware flavour of Spaces: GPU memory in bytes, dollars per hour."""

    name: str
    memory: float
    usd_per_hour: float


@dataclass(frozen=True)
class Requests:
    """Requests to the Hub, one after the other: all, those to its API, and those for files ("/resolve/")."""

    all: int
    api: int
    files: int


# Counted per version with the real clients at the simulated Hub. A look at HEAD is one request for a file;
# one for safety, where the Hub tells of changes, also lists all writers'.
PUBLISHING: Final = Requests(28, 7, 3)
TAKING: Final = Requests(18, 6, 3)
LOOKS: Final = 2  # at HEAD per version that the Hub tells of: at once, and an interval later
WINDOW_S: Final = 300.0  # the Hub counts requests per user in windows of five minutes (docs/hub/rate-limits)
FILES_ALLOWED: Final = {"free": 5000, "PRO": 12000, "Team": 20000}
API_ALLOWED: Final = {"free": 1000, "PRO": 2500, "Team": 3000}

PRICES_READ: Final = "2026-11-21, from copies of huggingface.co/pricing, /storage and /docs/hub/spaces-gpus"
PRIVATE_USD_TB_MONTH: Final = 18.0  # beyond what the plan includes; less from 50 TB on
INCLUDED_TB: Final = 1.0  # with PRO, or per seat of an organization
EGRESS_RATIO: Final = 8.0  # egress and CDN are included up to this multiple of what is stored
_CHEAPEST: Final = (  # for their memory, smallest first
    *("l4x1", "l40sx1", "a100-large", "rtx-pro-6000", "rtx-pro-6000x2", "a100x4"),
    *("rtx-pro-6000x4", "a100x8", "rtx-pro-6000x8"),
)
SPACES: Final = tuple(
    Space(name, 1e9 * HARDWARE[name].gpus * HARDWARE[name].gpu_gb, HARDWARE[name].usd_per_hour)
    for name in _CHEAPEST
)
