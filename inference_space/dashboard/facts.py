"""The numbers behind the animations: those of the run where it has them, else an example's."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from delta_weight_sync.protocol import POLL_S
from inference_space.dashboard.series import median
from inference_space.dashboard.view import Progress


@dataclass(frozen=True)
class Facts:
    """What one run measured, or an example; `static/formulas.js` computes all else that is shown."""

    label: str
    full_bytes: float
    delta_bytes: float  # median
    changed: float  # share of the weights that a sync changes, 0 to 1
    weights: int
    step_s: float  # the trainer's time between two hand-overs
    diff_s: float  # the trainer waits for this
    encode_s: float
    stage_s: float
    pause_s: float  # generation stands still for the commit
    poll_s: float  # how often a replica looks at HEAD
    anchor_every: int  # versions


# Qwen3-0.6B with 1.01 % of its weights changed per sync; encoding `fast` takes 1.21 bytes per change.
EXAMPLE = Facts(
    label="Qwen3-0.6B",
    full_bytes=1.192e9,
    delta_bytes=7.29e6,
    changed=0.0101,
    weights=596_049_920,
    step_s=8.0,
    diff_s=0.25,
    encode_s=0.3,
    stage_s=0.2,
    pause_s=0.02,
    poll_s=POLL_S,
    anchor_every=50,
)
LINK = 100e6  # bytes per second, for a model like the example
CELLS = 24, 14  # of the grid of weights


def facts_of(run: Progress | None, model: str | None) -> Facts | None:
    """What `run` measured; None before it has a delta and a commit."""
    if run is None or not run.payload_bytes or run.pause_ms is None or run.step_s is None:
        return None
    syncs = [(sync, slow) for sync, slow in run.syncs if sync.version]
    slow = [slow for _, slow in syncs if slow]
    newest = run.syncs[0][0]
    return replace(
        EXAMPLE,
        label=model or "this run",
        full_bytes=run.full_bytes,
        delta_bytes=run.payload_bytes,
        changed=run.changed[-1][1],
        weights=newest.total,
        step_s=run.step_s,
        diff_s=_median([sync.diff_s for sync, _ in syncs]),
        encode_s=_median([sync.encode_s for sync, _ in syncs]),
        stage_s=_median([one.stage_s for one in slow]),
        pause_s=run.pause_ms / 1000,
        anchor_every=max(2, round(run.anchor_every or EXAMPLE.anchor_every)),
    )


def scene(run: Progress | None, model: str | None) -> dict[str, Any]:
    """Everything that the animations are given, as JSON values."""
    found = facts_of(run, model)
    weights, masters, updates = _grid()
    sets = [asdict(found)] if found else []
    sets.append(asdict(EXAMPLE))
    for one in sets:
        one["link"] = min(LINK, LINK * one["full_bytes"] / EXAMPLE.full_bytes)  # a small model, a small link
    return {
        "facts": sets,
        "measured": bool(found),
        "columns": CELLS[0],
        "grid": {"weights": weights, "masters": masters, "updates": updates},
    }


def _grid() -> tuple[list[float], list[float], list[float]]:
    """Weights as a layer holds them, where their fp32 values lie within their cells, and a step's updates."""
    chance = random.Random(7)
    count = CELLS[0] * CELLS[1]
    weights = [chance.gauss(0, 0.02) for _ in range(count)]
    masters = [chance.uniform(-0.5, 0.5) for _ in range(count)]  # in units of the last place
    updates = [chance.choice((-1, 1)) * chance.uniform(0.3, 1.0) for _ in range(count)]
    return weights, masters, updates


def _median(values: list[float]) -> float:
    return median(sorted(values)) or 0.0
