"""The tables of joining late."""

from __future__ import annotations

from bench.markdown import table
from bench.results import Results
from delta_weight_sync.units import size_text


def joining(results: Results) -> str:
    """What a replica fetches that joins at version 500, by each way."""
    join = results["joining"]["join"]
    way, least = join["way"], join["least"]
    rows = [
        ("anchor and the true difference to it, as one file", least),
        (f"**the cheapest way**: anchor {way['anchor']}, {way['files']} jumps and deltas", way["bytes"]),
        ("the newest anchor, were there one in 128 versions, and deltas", join["anchors_and_deltas"]),
        ("the anchor of version 0 and all deltas", join["naive"]),
    ]
    head = [f"joining at version {join['versions']}, {join['changed']:.2%} changed per version", "", "times"]
    return table(head, [[name, size_text(size), f"{size / least:.2f}"] for name, size in rows])


def background(results: Results) -> str:
    """What the publisher's threads spend, and what the run above stored."""
    join, measured = results["joining"]["join"], results["joining"]["background"]
    spent, share = (
        measured["cpu_s"],
        f"{measured['weights'] / 1e6:.0f} M weights, {measured['share']:.2%} changed",
    )
    rows = [
        [f"CPU per version, {share}: deltas alone", f"{1e3 * spent['without']:.1f} ms"],
        ["the same with jumps and anchors", f"{1e3 * spent['with']:.1f} ms"],
    ]
    rows += [[f"stored by the run above: {kind}", size_text(size)] for kind, size in join["stored"].items()]
    return table(["publisher's background", ""], rows)
