"""The explain tab: what each of the four animations shows, in words; scripts draw them from `facts.scene`."""

from __future__ import annotations

_LEAD = (
    "Between two steps of RL about 99 % of the bf16 weights keep their bits. So a trainer ships only what"
    " changed, through a bucket, and nobody waits. Move the sliders: everything is computed from the numbers"
    " you choose."
)
_SCENES = (
    (
        "ship",
        "Two ways to ship the same weights",
        "The same stretch of time twice. Hatched is idle: the trainer or the replica waits.",
    ),
    (
        "rounding",
        "Why so little changes",
        "The optimizer moves the fp32 weight at every step. Generation uses its bf16 cast, which snaps to the"
        " nearest of few numbers: only when the weight crosses a midpoint do bits flip.",
    ),
    (
        "landing",
        "What lands in the bucket",
        "An anchor holds every weight, a delta what changed since the version before. A replica takes the"
        " newest anchor, then the deltas after it.",
    ),
    (
        "sync",
        "One sync, end to end",
        "From the trainer's hand-over to the moment at which new weights serve. Pink machines stand still.",
    ),
)


def explain() -> str:
    """The HTML of the tab, before its scripts have filled it."""
    scenes = "".join(
        f'<article class="card" data-scene="{name}"><h2>{title}</h2><p>{about}</p></article>'
        for name, title, about in _SCENES
    )
    return f'<p class="lead">{_LEAD}</p><p class="whose" role="group" aria-label="Whose numbers"></p>{scenes}'
