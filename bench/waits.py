"""What a trainer waits for: a hand-over while an anchor is written, and beside one; and what it costs to take
pending changes of many small tensors back, as the background thread does before it encodes.
"""

import shutil
import statistics
import threading
import time
from typing import Any

import torch

from bench import deltas
from bench.change import Change
from bench.results import SCRATCH, Results
from delta_weight_sync import codec
from delta_weight_sync.publish.outbox import PendingUpdate
from delta_weight_sync.publish.publisher import Publisher
from delta_weight_sync.publish.shortcuts import undone

_ROUNDS, _TENSORS = 5, (5_000, 20_000)


def run(results: Results) -> dict[str, Any]:
    """Both figures."""
    return {"hand_over": _hand_overs(deltas.qwen()), "taken_back": _taken_back()}


def _hand_overs(change: Change) -> dict[str, Any]:
    """Seconds of hand-overs of the same kind: none behind them, or an anchor on its way to a local folder."""
    folder = SCRATCH / "waits"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    seconds: dict[str, list[float]] = {"alone": [], "beside an anchor": []}
    publisher = Publisher(folder.as_uri(), folder)
    live = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in change.old.items()}
    publisher.publish(live.items())
    assert publisher._writer
    writing, put = threading.Event(), publisher._writer.put_weights
    publisher._writer.put_weights = lambda *arguments: (writing.set(), put(*arguments))[1]  # type: ignore[method-assign]
    for number in range(2 * _ROUNDS):
        due = bool(number % 2)
        publisher._writer.anchor_is_due = lambda due=due: due  # type: ignore[method-assign]
        change = change.taken()
        publisher.publish(live.items())  # an anchor of its version is made beside what follows
        if due:
            writing.wait()
            writing.clear()
        else:
            publisher.flush()
        change = change.taken()
        started = time.perf_counter()
        publisher.publish(live.items())
        seconds["beside an anchor" if due else "alone"].append(time.perf_counter() - started)
        publisher._writer.anchor_is_due = lambda: False  # type: ignore[method-assign]
        publisher.flush()
        publisher._outbox.shortcuts.idle(600)
        writing.clear()
    publisher.close()
    shutil.rmtree(folder)
    median = {kind: round(statistics.median(all_), 4) for kind, all_ in seconds.items()}
    return {"model_bytes": change.model_bytes, "seconds": median, "ratio": _ratio(*median.values())}


def _taken_back() -> dict[str, Any]:
    """Seconds to see all tensors of a model as they were before two pending hand-overs."""
    seconds = {}
    for count in _TENSORS:
        bits = torch.zeros(64, dtype=torch.int16).numpy().view("uint16")
        patch = [codec.diff(f"t{i}", bits, bits + 1) for i in range(count)]
        pending = [PendingUpdate(patch, "", step, 0.0, 0.0) for step in (2, 1)]
        started = time.perf_counter()
        for i in range(count):
            undone(bits, [update.by_name.get(f"t{i}") for update in pending])
        seconds[f"{count} tensors"] = round(time.perf_counter() - started, 4)
    return {"seconds": seconds, "ratio": _ratio(*seconds.values())}


def _ratio(first: float, second: float) -> float:
    return round(second / first, 3)
