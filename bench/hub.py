"""`python -m bench.hub`: how long one version takes over the Hub, and how many requests.

A real Publisher and followers without vLLM, which otherwise do what a replica does, meet at the simulated
Hub, which lets every request wait. Publishing is measured from the hand-over until `flush` returns. Taking is
measured from the moment at which the Hub has the new HEAD until the last follower has staged the version:
fetched, checked and decoded its delta, found its places and computed the digest that will result.

Requests are counted twice: all, and those that follow one another, which is the longest chain of requests
that do not overlap in time.
"""

import argparse
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.followers import Followers, following
from bench.results import ROOT, Results
from bench.tables import hub_table
from delta_weight_sync.checkpoint import read_bits
from tests.support.hubsim import HubSim

POLICY = ROOT / "trainer" / "policies" / "wordle-tiny"
RUN = "hf://buckets/team/bench#bench"
SHARE = 0.01
VERSIONS = 20
WARM = 2
READER = "hf_read"  # the followers' token; the publisher has another one
LATENCIES = {0.1: VERSIONS, 0.3: 5}  # seconds, and versions with it
WAYS = (("events", 1), ("polling", 1), ("events", 16))
PUBLISH = "hand-over to HEAD"
_IDS = re.compile(r"[0-9a-f]{32,}|(?<=/)\d+\..*|team/bench(/.*)?")


class Request(NamedTuple):
    """One request at the Hub."""

    line: str
    token: str
    start: float
    end: float


class Part(NamedTuple):
    """One part of one version: its requests are those of all followers."""

    seconds: float
    requests: Sequence[Request]


def run(_: Results) -> dict[str, Any]:
    """The figures at each of `LATENCIES`."""
    weights = sum(bits.size for _, bits in read_bits(POLICY))
    measured = {f"{latency:g}": measure(latency, versions) for latency, versions in LATENCIES.items()}
    return {"weights": weights, "latencies": measured}


def measure(latency: float, versions: int = VERSIONS) -> dict[str, Any]:
    """Medians over `versions` versions, with every request delayed by `latency` seconds."""
    figures: dict[str, Any] = {}
    for way, count in WAYS:
        with tempfile.TemporaryDirectory() as folder, HubSim(Path(folder, "hub")) as hub:
            hub.feed(ping_s=30.0)
            if way == "polling":
                hub.fault("GET .*/events", status=404)
            parts = list(_versions(hub, Path(folder), latency, versions, count))
            if not figures:
                figures[PUBLISH] = _figures([published for published, _ in parts], 1)
            name = f"HEAD to staged, {count} follower{'s' if count > 1 else ''}, {way}"
            figures[name] = _figures([taken for _, taken in parts], count)
    return figures


def _figures(parts: Sequence[Part], count: int) -> dict[str, Any]:
    kinds = Counter(_IDS.sub("...", request.line) for part in parts for request in part.requests)
    return {
        "seconds": round(median(part.seconds for part in parts), 3),
        # Those of many followers overlap: only one follower's are a chain.
        "in_turn": median(in_turn(part.requests) for part in parts) if count == 1 else None,
        "requests": median(len(part.requests) for part in parts) / count,
        "files": median(sum("/resolve/" in one.line for one in part.requests) for part in parts) / count,
        "kinds": {kind: round(number / len(parts) / count, 2) for kind, number in kinds.items()},
    }


def in_turn(requests: Sequence[Request]) -> int:
    """The longest chain of requests of which none overlaps the next."""
    length = 0
    reached = 0.0
    for request in sorted(requests, key=lambda request: request.end):
        if request.start >= reached:
            length += 1
            reached = request.end
    return length


def _versions(
    hub: HubSim, folder: Path, latency: float, versions: int, count: int
) -> Iterator[tuple[Part, Part]]:
    """Publishing and taking of each version."""
    os.environ.update(hub.env(folder / "client"))
    from delta_weight_sync.publish.publisher import Publisher

    rng = np.random.default_rng(0)
    live = {}
    for name, bits in read_bits(POLICY):
        live[name] = torch.from_numpy(bits).view(torch.bfloat16)
    with Publisher(RUN, POLICY) as publisher:
        publisher.publish(live.items())
        publisher.flush()
        with following(count, RUN, HF_TOKEN=READER) as followers:
            followers.staged(0)
            time.sleep(2.0)  # until all have connections, where there are events
            hub.fault(match="^(?!.*/events).*", delay=latency)
            for version in range(1, versions + WARM + 1):
                for tensor in live.values():
                    bits = tensor.view(torch.int16).view(-1)
                    bits += torch.from_numpy((rng.random(bits.numel()) < SHARE).astype(np.int16))
                # The run's log is written by itself, once a second, and a look follows a notification.
                time.sleep(random.uniform(1.2 + 9 * latency, 2.2 + 9 * latency))
                started = time.time()
                publisher.publish(live.items())
                publisher.flush()
                if version > WARM:
                    yield _measured(hub, followers, version, started, time.time())


def _measured(
    hub: HubSim, followers: Followers, version: int, started: float, flushed: float
) -> tuple[Part, Part]:
    staged = max(followers.staged(version))
    requests = [Request(*line) for line in hub.times()]
    theirs = [one for one in requests if one.token == READER or "/cas-bridge/" in one.line]
    there = max(one.end for one in requests if one.line.endswith("/batch") and one.end < flushed)
    made = [one for one in requests if one not in theirs and started <= one.start and one.end <= flushed]
    taken = [one for one in theirs if there < one.end and one.start < staged]
    return Part(flushed - started, made), Part(staged - there, taken)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.hub", description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=0.1, help="seconds that each request takes")
    parser.add_argument("--versions", type=int, default=VERSIONS)
    options = parser.parse_args()
    figures = measure(options.latency, options.versions)
    print(hub_table({f"{options.latency:g}": figures}))
    for name, one in figures.items():
        print(f"\n{name}")
        print("\n".join(f"  {count:g} x {kind}" for kind, count in one["kinds"].items()))


if __name__ == "__main__":
    main()
