"""A whole sync over a link: the measured parts of section `speed`, and bytes divided by the link's speed.

Nothing is sent; this is arithmetic. The parts follow each other, as they do for one version: diff, encode,
transfer, decode, digest of the live weights, stage, commit. A whole checkpoint is written, transferred,
loaded and copied; neither it nor the original authors' way checks anything.
"""

from typing import Any

from bench.results import Results

LINKS = (10, 100, 1000)  # megabytes per second
CURVE = [10 ** (exponent / 10) for exponent in range(41)]  # 1 to 10,000 MB/s, for the plot
Sync = tuple[float, int]
"""Seconds besides the transfer, and bytes."""


def run(results: Results) -> dict[str, Any]:
    """Seconds per sync by way and link; needs sections `size` and `speed`."""
    syncs = parts(results)
    return {
        "seconds": {
            f"{link}": {way: round(time(sync, link), 3) for way, sync in syncs.items()} for link in LINKS
        },
        "fastest": {f"{link}": min(syncs, key=lambda way: time(syncs[way], link)) for link in LINKS},
        "besides_transfer_s": {way: round(sync[0], 3) for way, sync in syncs.items()},
        "bytes": {way: sync[1] for way, sync in syncs.items()},
        "crossovers_mb_s": {
            f"{a} | {b}": crossover(syncs[a], syncs[b])
            for a, b in (("small", "fast"), ("fast", "original layout"), ("fast", "others' way"))
        },
    }


def parts(results: Results) -> dict[str, Sync]:
    """The ways to sync, from the medians of the measured parts."""
    median = {name: part["median_s"] for name, part in results["speed"]["parts"].items()}
    sizes = next(s["bytes"] for s in results["size"]["sets"] if s["model"].startswith("Qwen"))
    names = {"fast": "fast", "small": "small", "original": "original layout"}
    replica = median["digest"] + median["stage"] + median["commit"]
    ways = {
        name: (
            median[f"publish {encoding} bf16"] + median[f"decode {encoding}"] + replica,
            sizes[encoding],
        )
        for encoding, name in names.items()
    }
    others = median["publish by others bf16"] + median["receive by others"]
    whole = median["publish whole"] + median["receive whole"]
    return ways | {"others' way": (others, sizes["original"]), "whole model": (whole, sizes["full"])}


def time(sync: Sync, link: float) -> float:
    """Seconds of a sync over a link of `link` MB/s."""
    return sync[0] + sync[1] / link / 1e6


def crossover(leaner: Sync, faster: Sync) -> float | None:
    """The link speed in MB/s below which the one that sends less wins; None if the other never does."""
    slower_by, less = leaner[0] - faster[0], faster[1] - leaner[1]
    return round(less / slower_by / 1e6, 1) if slower_by > 0 and less > 0 else None
