"""`python -m bench.hub`: how long one version takes over the Hub, and how many requests.

A real Publisher and a real RunReader meet at the simulated Hub, which lets every request wait. Publishing is
measured from the hand-over until `flush` returns; reading from there until the delta is on the follower's
disk. Each runs alone.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.results import ROOT, Results
from bench.tables import table
from delta_weight_sync.checkpoint import read_bits
from tests.support.hubsim import HubSim

POLICY = ROOT / "trainer" / "policies" / "wordle-tiny"
SHARE, VERSIONS, WARM = 0.01, 20, 2
LATENCIES = (0.1, 0.3)  # seconds
_NAMES = re.compile(r"[0-9a-f]{64}|team/bench/(.*)|(?<=/)\d+\..*")


class Measured(NamedTuple):
    """One part of one version."""

    seconds: float
    requests: tuple[str, ...]


def run(_: Results) -> dict[str, Any]:
    """The figures at each of `LATENCIES`."""
    return {"latencies": {f"{latency:g}": measure(latency) for latency in LATENCIES}}


def measure(latency: float, versions: int = VERSIONS) -> dict[str, Any]:
    """Medians over `versions` versions, with every request delayed by `latency` seconds."""
    with tempfile.TemporaryDirectory() as folder, HubSim(Path(folder, "hub")) as hub:
        os.environ.update(hub.env(Path(folder, "client")))
        parts = _versions(hub, Path(folder), latency, versions)
    return {
        name: {
            "seconds": round(median(one.seconds for one in some), 3),
            "requests": median(len(one.requests) for one in some),
            "kinds": Counter(some[-1].requests),
        }
        for name, some in parts.items()
    }


def _versions(hub: HubSim, folder: Path, latency: float, versions: int) -> dict[str, list[Measured]]:
    from delta_weight_sync.publish.publisher import Publisher
    from delta_weight_sync.reader import open_run
    from delta_weight_sync.watch import Watcher

    url, rng = "hf://buckets/team/bench#bench", np.random.default_rng(0)
    live = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in read_bits(POLICY)}
    parts: dict[str, list[Measured]] = {"hand-over to HEAD": [], "HEAD to delta": []}
    with Publisher(url, POLICY) as publisher:
        publisher.publish(live.items())
        publisher.flush()
        reader = open_run(url)
        watcher = Watcher(reader)
        seen = watcher.poll()
        assert seen
        watcher.mark_used()
        hub.fault(match=".*", delay=latency)

        def measured(work: Callable[[], object]) -> Measured:
            before, started = len(hub.requests()), time.perf_counter()
            work()
            seconds = time.perf_counter() - started
            return Measured(seconds, tuple(map(_kind, hub.requests()[before:])))

        def publish() -> None:
            publisher.publish(live.items())
            publisher.flush()

        def read() -> None:
            manifest = watcher.poll()
            assert manifest
            _, deltas = reader.recipe(manifest, manifest.version - 1)
            for delta in deltas:
                reader.fetch(delta, folder / "replica")
            watcher.mark_used()

        for _ in range(versions + WARM):
            for tensor in live.values():
                bits = tensor.view(torch.int16).view(-1)
                bits += torch.from_numpy((rng.random(bits.numel()) < SHARE).astype(np.int16))
            parts["hand-over to HEAD"].append(measured(publish))
            time.sleep(2.5)  # the run's log is written by itself, once a second
            parts["HEAD to delta"].append(measured(read))
        watcher.close()
    return {name: some[WARM:] for name, some in parts.items()}


def _kind(request: str) -> str:
    """A request without what differs between two versions."""
    return _NAMES.sub("...", request)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.hub", description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=0.1, help="seconds that each request takes")
    parser.add_argument("--versions", type=int, default=VERSIONS)
    options = parser.parse_args()
    figures = measure(options.latency, options.versions)
    rows = [[name, f"{one['seconds']:.2f} s", f"{one['requests']:g}"] for name, one in figures.items()]
    print(table([f"{options.latency:g} s per request", "median", "requests"], rows))
    for name, one in figures.items():
        print(f"\n{name}")
        print("\n".join(f"  {count} x {kind}" for kind, count in one["kinds"].items()))


if __name__ == "__main__":
    main()
