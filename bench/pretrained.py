"""Draws docs/pretrained.svg: how SmolLM2-135M learns two tasks, from the logs in bench/data/pretrained.

    python -m bench.pretrained
    python -m bench.pretrained --run file:///tmp/bucket#first --name wordle    # takes a finished run in first

A log has a line for each step, with the version that came of it. The rewards go to the dashboard, too (see
`bench.learned`). Prints what README and docs/learning.md quote.
"""

import argparse
import json
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from bench import learned
from bench.plots import STYLE, save
from bench.results import ROOT
from bench.study import smooth
from delta_weight_sync.reader import open_run
from delta_weight_sync.runlog import RunLogReader, StepEvent, SyncEvent

FOLDER = ROOT / "bench" / "data" / "pretrained"
_SAID = {  # by TRL, and by `exact.py` where it was asked for
    "ratio": "ratio",
    "kl": "kl",
    "entropy": "entropy",
    "staleness": "sample/staleness_mean",
    "mismatch_ratio": "exact/mismatch_ratio",
    "solved": "games/solve_rate",
    "invalid": "games/invalid_rate",
}
_COLOURS = {"reverse_text": "#2da44e", "wordle": "#0969da"}

Steps = list[dict[str, Any]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="How SmolLM2-135M learns two tasks.")
    parser.add_argument("--run", help="<bucket>#<run>, to be taken in")
    parser.add_argument("--name", choices=_COLOURS, help="its task")
    options = parser.parse_args()
    if options.run:
        FOLDER.mkdir(exist_ok=True)
        lines = [json.dumps(step) + "\n" for step in taken_in(options.run)]
        (FOLDER / f"{options.name}.jsonl").write_text("".join(lines))
    runs = {
        file.stem: [*map(json.loads, file.read_text().splitlines())]
        for file in sorted(FOLDER.glob("*.jsonl"))
    }
    with mpl.rc_context(STYLE):
        save("pretrained", _paint, runs)
    (learned.DATA / "pretrained.json").write_text(
        json.dumps({name: [step["reward"] for step in steps] for name, steps in runs.items()}) + "\n"
    )
    learned.main()
    for name, steps in runs.items():
        print(name, json.dumps(figures(steps), indent=1))


def taken_in(url: str) -> Iterator[dict[str, Any]]:
    """A line for each step of a run."""
    reader = open_run(url)
    events = list(RunLogReader(reader.bucket, reader.keys.run).poll())
    syncs = {event.version: event for event in events if isinstance(event, SyncEvent)}
    for event in events:
        if isinstance(event, StepEvent) and event.reward is not None and event.step in syncs:
            sync = syncs[event.step]
            said = {name: event.metrics[key] for name, key in _SAID.items() if key in event.metrics}
            density, size = sync.changed / sync.total, sync.payload_bytes
            rounded = {name: round(value, 6) for name, value in (said | {"density": density}).items()}
            yield {"step": event.step, "reward": event.reward, **rounded, "payload_bytes": size}


def figures(steps: Steps) -> dict[str, Any]:
    """What a run came to."""
    tenth = max(1, len(steps) // 10)
    found: dict[str, Any] = {"syncs": len(steps)}
    for name in ("reward", "solved", "invalid"):
        if name in steps[0]:
            ends = (steps[:tenth], steps[-tenth:])
            found[name] = [round(mean(step[name] for step in part), 4) for part in ends]
    for name in ("ratio", "mismatch_ratio"):
        ratios = [step[name] for step in steps if name in step]
        if ratios:
            found[name] = [round(of(ratios), 4) for of in (min, mean, max)]
    found["ratio_fresh"] = [step["ratio"] for step in steps if not step["staleness"]]
    densities = [step["density"] for step in steps]
    found["density"] = [round(of(densities), 5) for of in (min, median, max)]
    found["payload_bytes"] = median(step["payload_bytes"] for step in steps)
    return found


def _paint(axes: Axes, runs: dict[str, Steps]) -> None:
    for name, steps in runs.items():
        rewards = [step["reward"] for step in steps]
        numbers = [step["step"] for step in steps]
        axes.plot(numbers, rewards, ".", color=_COLOURS[name], alpha=0.3, markersize=3)
        axes.plot(numbers, smooth(rewards, 15), color=_COLOURS[name], label=name.replace("_", "-"))
    axes.set(xlabel="sync", ylabel="reward")


if __name__ == "__main__":
    main()
