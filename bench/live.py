"""A real vLLM on the CPU serves SmolLM2-135M while its weights change: commits, pauses, throughput, memory.

The delta is one real update of about 1 %, forth and back. Three ways to get it into the same server take
turns: our commit, vLLM's own sparse loader with the same delta in the original layout, and vLLM's loader with
a whole checkpoint. Then requests run all the time, while windows without syncs, with one every two seconds,
one per second, and one right after the other take turns.
"""

import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import deltas, updates
from bench.change import Change
from bench.live_server import LiveServer, throughput
from bench.original import write as write_original
from bench.results import SCRATCH, Results
from delta_weight_sync.checkpoint import WEIGHTS, write_bits
from delta_weight_sync.digest import state_digest, to_hex

_ROUNDS = 10
_WINDOWS = 12
_WINDOW_S = 5.0
IN_FLIGHT = 8
_PERIODS = {
    "none": None,
    "every 2 s": 2.0,
    "each second": 1.0,
    "without a break": 0.0,
}  # seconds between syncs


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Target:
    """One of the two states: how each way gets there from the other, and the digest it must have."""

    digest: str
    delta: Path
    original: Path
    checkpoint: Path


@dataclass(frozen=True)
class Sync:
    """Seconds of one sync."""

    stage_s: float
    pause_s: float
    commit_s: float


class Switch:
    """Takes the server from one state to the other and back, and counts versions."""

    def __init__(self, server: LiveServer, targets: list[Target]) -> None:
        self.server = server
        self._targets = targets
        self.version = 0

    def next(self) -> Target:
        """The state to go to now."""
        self.version += 1
        return self._targets[self.version % 2]

    def sync(self) -> Sync:
        """Our way: stage beside generation, commit between two steps."""
        target = self.next()
        return Sync(*self.server.take(target.delta, target.digest, json.dumps({"version": self.version})))


def run(results: Results) -> dict[str, Any]:
    """All live figures."""
    folder = SCRATCH / "live"
    shutil.rmtree(folder, ignore_errors=True)
    change = deltas.smollm2()
    about = {"elements": change.elements, "changed": change.changed, "model_bytes": change.model_bytes}
    shapes = change.shapes
    targets = write(folder, change, updates.folder())
    del change
    server = LiveServer(folder)
    server.start(targets[0].checkpoint)
    try:
        if _learn(server, shapes) != targets[0].digest:
            raise RuntimeError("vLLM did not load the checkpoint's bits; is it a version that we know?")
        return about | _measure(server, Switch(server, targets), shapes)
    finally:
        server.stop()
        shutil.rmtree(folder)


def _measure(server: LiveServer, switch: Switch, shapes: Shapes) -> dict[str, Any]:
    memory = _memory(server, switch, shapes)  # first, while the process has not kept any memory it freed
    commits = _commits(server, switch, shapes)
    with server.requests_in_flight(IN_FLIGHT):
        time.sleep(5)  # until all of them generate
        load = under_load(server, switch)
    return {"commits": commits, "in_flight": IN_FLIGHT, **load, "memory": memory}


def write(folder: Path, change: Change, assets: Path) -> list[Target]:
    """The files of both states; `change` leads from the first to the second, `assets` holds the tokenizer."""
    (folder / "files").mkdir(parents=True)
    first_digest = state_digest(change.old)
    forth = _files(folder / "files", "forth", change)
    first = _checkpoint(folder / "first", change, assets)
    back_change = change.taken()
    second_digest = state_digest(back_change.old)
    back = _files(folder / "files", "back", back_change)
    second = _checkpoint(folder / "second", back_change, assets)
    back_change.taken()
    return [Target(to_hex(first_digest), *back, first), Target(to_hex(second_digest), *forth, second)]


def _files(folder: Path, name: str, change: Change) -> tuple[Path, Path]:
    ours = folder / f"{name}.safetensors"
    original = folder / f"{name}-original.safetensors"
    ours.write_bytes(change.encode("fast"))
    original.write_bytes(write_original(change.patches, change.old.__getitem__))
    return ours, original


def _checkpoint(folder: Path, change: Change, assets: Path) -> Path:
    shutil.copytree(assets, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    write_bits({n: bits.shape for n, bits in change.old.items()}, change.old.__getitem__, folder / WEIGHTS)
    return folder


def _commits(server: LiveServer, switch: Switch, shapes: Shapes) -> dict[str, Any]:
    """Seconds of the commit alone, of each way, without load; all three start from what is in memory."""
    seconds: dict[str, list[float]] = {"ours": [], "sparse loader": [], "dense": [], "our stage": []}
    for _ in range(_ROUNDS + 1):
        for _ in range(2):  # there and back, so that our engine finds what it left
            sync = switch.sync()
            seconds["ours"].append(sync.commit_s)
            seconds["our stage"].append(sync.stage_s)
        for _ in range(2):
            seconds["sparse loader"].append(_sparse_loader(server, switch, shapes))
        for _ in range(2):
            path = str(switch.next().checkpoint / WEIGHTS)
            seconds["dense"].append(float(server.call("bench_dense", path)))
        _learn(server, shapes)
    counted = {way: measured[2:] for way, measured in seconds.items()}
    median = {way: statistics.median(measured) for way, measured in counted.items()}
    ratios = {
        f"times_{way.replace(' ', '_')}": median[way] / median["ours"] for way in ("sparse loader", "dense")
    }
    return {way: _spread(measured) for way, measured in counted.items()} | ratios


def under_load(server: LiveServer, switch: Switch) -> dict[str, Any]:
    """Tokens per second in windows of each kind, in turns, and the syncs that went on meanwhile."""
    tokens: dict[str, list[float]] = {kind: [] for kind in _PERIODS}
    syncs: dict[str, list[Sync]] = {kind: [] for kind in _PERIODS}
    for turn in range(_WINDOWS):
        for kind in list(_PERIODS)[:: -1 if turn % 2 else 1]:  # forth and back: no kind is always the first
            with _stream(switch, _PERIODS[kind], syncs[kind]):
                tokens[kind].append(throughput(server, _WINDOW_S))
    still = tokens["none"]
    shares = {kind: [a / b for a, b in zip(tokens[kind], still, strict=True)] for kind in _PERIODS}
    return {
        "window_s": _WINDOW_S,
        "tokens_per_s": {kind: [round(t, 1) for t in all_] for kind, all_ in tokens.items()},
        "throughput_kept": {kind: round(statistics.median(all_), 4) for kind, all_ in shares.items()},
        "throughput_kept_total": {kind: round(sum(all_) / sum(still), 4) for kind, all_ in tokens.items()},
        "syncs": {kind: _explain(all_) for kind, all_ in syncs.items() if all_},
    }


@contextmanager
def _stream(switch: Switch, period: float | None, syncs: list[Sync]) -> Iterator[None]:
    """Sync every `period` seconds during the block; never for None."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            started = time.perf_counter()
            syncs.append(switch.sync())
            stop.wait(max((period or 0.0) - (time.perf_counter() - started), 0.0))

    thread = threading.Thread(target=loop)
    if period is not None:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if period is not None:
            thread.join()


def _explain(syncs: list[Sync]) -> dict[str, Any]:
    return {
        "count": len(syncs),
        "pause_ms": percentiles([sync.pause_s for sync in syncs]),
        "commit_ms": percentiles([sync.commit_s for sync in syncs]),
        "stage_ms": percentiles([sync.stage_s for sync in syncs]),
        "pauses_ms": sorted(round(1e3 * sync.pause_s, 3) for sync in syncs),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds; p99 is the smallest value that 99 % do not exceed."""
    ordered = sorted(seconds)
    ranks = {"p50": 0.5, "p99": 0.99}
    return {
        name: round(1e3 * ordered[-(-int(share * 100) * len(ordered) // 100) - 1], 3)
        for name, share in ranks.items()
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"best_s": round(min(seconds), 5), "median_s": round(statistics.median(seconds), 5)}


def _memory(server: LiveServer, switch: Switch, shapes: Shapes) -> dict[str, int]:
    """MiB of the engine's process, and what two syncs add at their peak; then two by vLLM's sparse loader."""
    memory = server.memory()
    before = memory.mib("VmRSS")
    memory.forget_peak()
    switch.sync()
    switch.sync()
    ours = memory.mib("VmHWM") - before
    memory.forget_peak()
    before_others = memory.mib("VmRSS")
    _sparse_loader(server, switch, shapes)
    _sparse_loader(server, switch, shapes)
    others = memory.mib("VmHWM") - before_others
    _learn(server, shapes)
    return {"engine_mib": before, "extra_mib": ours, "sparse_loader_extra_mib": others}


def _learn(server: LiveServer, shapes: Shapes) -> str:
    """Let our engine hash all weights anew: it takes what vLLM's own loaders write for damage."""
    learned = server.ask("learn", shapes={name: list(shape) for name, shape in shapes.items()})
    return str(learned["digest"])


def _sparse_loader(server: LiveServer, switch: Switch, shapes: Shapes) -> float:
    listed = {name: list(shape) for name, shape in shapes.items()}
    return float(server.call("bench_sparse", str(switch.next().original), listed))
