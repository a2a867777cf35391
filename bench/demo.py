"""Compares the lag of `make demo` with the lag that the simulator `bench.fleet` predicts for the same run.

The benchmark runs `make demo` for three minutes. Once a second, it pokes the replica and streams a few
tokens, to measure how long a poke and a step of vLLM take. The run's log has the times of the other parts:
publishing, fetching, staging and the commit. The simulator gets the times of the parts, and predicts the lag.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import Any

import httpx

from bench.fleet.__main__ import Figures
from bench.fleet.hub import OneMachine
from bench.fleet.machines import Fleet, Scenario
from bench.results import ROOT, SCRATCH, Results
from delta_weight_sync.runlog import CommitEvent, RunLogReader, SyncEvent
from delta_weight_sync.store import open_bucket
from delta_weight_sync.vllm import MODEL_NAME
from trainer.demo.__main__ import RUN
from trainer.demo.processes import free_port
from trainer.observe import POKE_PATH

MINUTES = 3
_TOKENS = 16  # few, because the request itself makes vLLM's steps a little longer
_EACH_S = 1.0
_POLL_S = 0.1  # of the replica of `make demo`


def run(_: Results) -> dict[str, Any]:
    """Run the demo. Return the times of its parts and its lag; print the lag that the simulator predicts."""
    folder = SCRATCH / "demo"
    port = free_port()
    command = [sys.executable, "-m", "trainer.demo", "--minutes", f"{MINUTES}", "--folder", f"{folder}"]
    with subprocess.Popen(
        [*command, "--port", f"{port}"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as demo:
        pokes, steps = _probe(demo, f"http://127.0.0.1:{port}")
    events = list(RunLogReader(open_bucket((folder / "bucket").as_uri()), RUN).poll())
    syncs = [event for event in events if isinstance(event, SyncEvent) and event.version]
    commits = [event for event in events if isinstance(event, CommitEvent)]
    served_since = next((commit.t for commit in commits if commit.joined), None)
    if demo.returncode or served_since is None:
        raise SystemExit(f"the demo failed: read the logs in {folder}")
    handed_over = {sync.version: sync.t - sync.publish_s for sync in syncs}
    commits = [each for each in commits if handed_over.get(each.version, 0.0) > served_since]
    measured: dict[str, Any] = {
        "versions": len(syncs),
        "weights": syncs[0].total,
        "changed": median(sync.changed for sync in syncs) / syncs[0].total,
        "every_s": (syncs[-1].t - syncs[0].t) / (len(syncs) - 1),
        "publish_s": _sample([sync.publish_s for sync in syncs]),
        "poke_s": _sample(pokes),
        "fetch_s": _sample([commit.fetch_s for commit in commits]),
        "stage_s": _sample([commit.stage_s for commit in commits]),
        "commit_s": _sample([commit.commit_ms / 1e3 for commit in commits]),
        "step_s": _sample(steps),
        "lag_s": _spread([commit.lag_s for commit in commits]),
    }
    simulated = _spread(simulate(measured).fleet.lags)
    print(f"lag: measured {measured['lag_s']}, simulated {simulated}")
    return measured


def simulate(measured: Results) -> Figures:
    """The same run in the simulator."""
    machine = OneMachine(
        reads=measured["fetch_s"],
        publishes=measured["publish_s"],
        pokes=measured["poke_s"],
        stages=measured["stage_s"],
        commits=measured["commit_s"],
        steps=measured["step_s"],
    )
    weights = measured["weights"]
    changed = measured["changed"]
    every_s = measured["every_s"]
    asked = Scenario(weights, changed, 1, every_s, minutes=10, one_machine=machine, poll_s=_POLL_S)
    return Figures(Fleet(asked).run())


def _probe(demo: subprocess.Popen[bytes], url: str) -> tuple[list[float], list[float]]:
    """The seconds of pokes, and of steps of vLLM, until the demo ends."""
    pokes = list[float]()
    steps = list[float]()
    with httpx.Client(base_url=url, timeout=30) as client:
        while demo.poll() is None:
            time.sleep(_EACH_S)
            try:
                if client.get("/ready").is_success:
                    began = time.perf_counter()
                    client.post(POKE_PATH).raise_for_status()
                    pokes.append(time.perf_counter() - began)
                    came = list(_tokens(client))
                    steps += [then - first for first, then in itertools.pairwise(came)]
            except httpx.HTTPError:  # the replica starts, or the demo ends
                continue
    return pokes, steps


def _tokens(client: httpx.Client) -> Iterator[float]:
    """When each token of a completion comes."""
    asked = {"model": MODEL_NAME, "prompt": "crane", "max_tokens": _TOKENS, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


def _sample(seconds: Sequence[float]) -> list[float]:
    """Every second percentile, from the first to the 99th."""
    return [round(each, 6) for each in quantiles(seconds, n=100)[::2]]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": median(seconds), "p95": quantiles(seconds, n=20)[-1], "longest": max(seconds)}
