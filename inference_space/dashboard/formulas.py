"""What the explaining animations compute: the one place of these formulas.

`static/formulas.js` holds the same functions for the browser, under the same names; a test compares the two.
Bytes and bytes per second, seconds, and bf16 weights as ordinary numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MANTISSA = 7  # bits that bf16 stores of it
SMALLEST = -126  # exponent of the smallest normal number

Lane = Literal["trainer", "wire", "replica"]
Span = tuple[Lane, str, float, float]  # lane, what happens, first and last second


@dataclass(frozen=True)
class Facts:
    """What one run measured, or an example; the animations show nothing that does not follow from these."""

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


def transfer_s(size: float, link: float) -> float:
    """Seconds that `size` bytes take over a link."""
    return size / link


def ulp(weight: float) -> float:
    """The distance from one bf16 number to the next at the magnitude of `weight`."""
    return 2.0 ** (max(_exponent(weight), SMALLEST) - MANTISSA)


def _exponent(weight: float) -> int:
    return math.frexp(weight)[1] - 1 if weight else SMALLEST


def bf16(value: float) -> float:
    """The nearest bf16 number; halfway between two, the one whose last bit is 0."""
    tick = ulp(value)
    return round(value / tick) * tick


def bits(weight: float) -> int:
    """The 16 bits of a normal bf16 number, as an integer."""
    exponent = _exponent(weight)
    mantissa = round((abs(weight) / 2.0**exponent - 1) * (1 << MANTISSA))
    return (32768 if weight < 0 else 0) + (exponent + 127) * (1 << MANTISSA) + mantissa


def flip_chance(weight: float, update: float) -> float:
    """How likely an update moves the cast of a weight to another number, its fp32 value being anywhere."""
    return min(1.0, abs(update) / ulp(weight))


def flip_share(weights: Sequence[float], updates: Sequence[float], rate: float) -> float:
    """The expected share of `weights` that flip when each moves by `rate` times its update."""
    chances = [flip_chance(w, rate * u) for w, u in zip(weights, updates, strict=True)]
    return sum(chances) / len(chances)


def rate_for_share(weights: Sequence[float], updates: Sequence[float], share: float) -> float:
    """The learning rate at which `share` of the weights are expected to flip."""
    low, high = 1e-9, 1.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if flip_share(weights, updates, middle) < share else (low, middle)
    return math.sqrt(low * high)


def broadcast_spans(facts: Facts, link: float, window: float) -> list[Span]:
    """Full weights after every step: trainer and replicas wait for the transfer."""
    spans: list[Span] = []
    wait, t = transfer_s(facts.full_bytes, link), 0.0
    while t < window:
        sent = t + facts.step_s
        spans += [("trainer", "train", t, sent), ("trainer", "wait", sent, sent + wait)]
        spans += [("replica", "generate", t, sent), ("replica", "wait", sent, sent + wait)]
        spans.append(("wire", "full", sent, sent + wait))
        t = sent + wait
    return spans


def delta_spans(facts: Facts, link: float, window: float) -> list[Span]:
    """A delta after every step: the trainer waits for the diff, a replica for the commit.

    While an upload is under way, later steps are merged into the next one.
    """
    cycle = facts.step_s + facts.diff_s
    spans: list[Span] = []
    for step in range(math.ceil(window / cycle)):
        t = step * cycle
        spans += [("trainer", "train", t, t + facts.step_s), ("trainer", "wait", t + facts.step_s, t + cycle)]
    start, generating = cycle, 0.0
    while start < window:
        uploaded = start + facts.encode_s + transfer_s(facts.delta_bytes, link)
        seen = uploaded + facts.poll_s / 2  # on average, HEAD moved half a poll ago
        staged = seen + transfer_s(facts.delta_bytes, link) + facts.stage_s
        spans += [("wire", "up", start, uploaded), ("wire", "down", seen, staged)]
        spans += [
            ("replica", "generate", generating, staged),
            ("replica", "wait", staged, staged + facts.pause_s),
        ]
        generating = staged + facts.pause_s
        start = max(uploaded, (math.floor(start / cycle + 1e-9) + 1) * cycle)
    spans.append(("replica", "generate", generating, max(window, generating)))
    return spans


def idle_share(spans: Sequence[Span], lane: Lane, window: float) -> float:
    """The share of `window` that a lane spends waiting."""
    waits = [(a, min(b, window)) for at, what, a, b in spans if at == lane and what == "wait" and a < window]
    return sum(b - a for a, b in waits) / window


def steps_done(spans: Sequence[Span], window: float) -> int:
    """Optimizer steps that end within `window`."""
    return sum(lane == "trainer" and what == "train" and b <= window for lane, what, _, b in spans)


Stage = tuple[str, float]


def bucket_sync(facts: Facts, link: float) -> list[Stage]:
    """One sync through the bucket, stage by stage, for every replica at once: each has a link of its own."""
    wire = transfer_s(facts.delta_bytes, link)
    return [
        ("diff", facts.diff_s),
        ("encode", facts.encode_s),
        ("upload", wire),
        ("poll", facts.poll_s / 2),
        ("fetch", wire),
        ("stage", facts.stage_s),
        ("commit", facts.pause_s),
    ]


def broadcast_sync(facts: Facts, link: float) -> list[Stage]:
    """One broadcast of all weights, passed on from replica to replica while it arrives (as NCCL does)."""
    return [("broadcast", transfer_s(facts.full_bytes, link))]


def stopped_s(facts: Facts, link: float, replicas: int) -> tuple[float, float]:
    """Machine-seconds in which nobody works, per sync: through the bucket, and by broadcast."""
    whole = transfer_s(facts.full_bytes, link)
    return facts.diff_s + replicas * facts.pause_s, (1 + replicas) * whole


def moved_bytes(facts: Facts, replicas: int) -> tuple[float, float]:
    """Bytes over all links per sync: one upload and a download each, and a broadcast to each."""
    return (1 + replicas) * facts.delta_bytes, replicas * facts.full_bytes


def break_even_link(facts: Facts) -> float:
    """From this link speed on a broadcast serves the new weights sooner than the bucket does."""
    fixed = facts.diff_s + facts.encode_s + facts.poll_s / 2 + facts.stage_s + facts.pause_s
    return (facts.full_bytes - 2 * facts.delta_bytes) / fixed


Landing = tuple[str, int, str, float]  # what, version, which replica ("" for the bucket), bytes


def landings(facts: Facts, versions: int, anchor_every: int, joins_at: int) -> list[Landing]:
    """What happens in the bucket and at two replicas, in order.

    Replica A follows from the start; B joins once `joins_at` is published: newest anchor, then the deltas.
    """
    story: list[Landing] = [("anchor", 0, "", facts.full_bytes), ("take-anchor", 0, "A", facts.full_bytes)]
    for version in range(1, versions + 1):
        story.append(("delta", version, "", facts.delta_bytes))
        if version % anchor_every == 0:
            story.append(("anchor", version, "", facts.full_bytes))
        story.append(("take-delta", version, "A", facts.delta_bytes))
        if version == joins_at:
            anchor = version - version % anchor_every
            story += [("join", version, "B", 0.0), ("take-anchor", anchor, "B", facts.full_bytes)]
            story += [("take-delta", v, "B", facts.delta_bytes) for v in range(anchor + 1, version + 1)]
        elif version > joins_at:
            story.append(("take-delta", version, "B", facts.delta_bytes))
    return story


def bytes_to_join(facts: Facts, anchor_every: int, version: int) -> float:
    """What a replica fetches to join at `version`."""
    return facts.full_bytes + version % anchor_every * facts.delta_bytes
