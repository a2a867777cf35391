"""Publish and receive on the Qwen3-0.6B-shaped set: each part, and the original layout's way, in turns.

publish       what a trainer and its publisher do: diff against the mirror, encode to a file's bytes
receive       what a reader on the host does: decode the file, add the changes as they come
commit, undo  the replica's writes within the pause

GB/s are gigabytes of bf16 model, whatever the dtype of the parameters.
"""

import functools
from typing import Any

from bench import deltas
from bench.change import Change
from bench.model import Model, Reader, bf16_tensors
from bench.results import Results
from bench.timing import Rounds, added, ratio, summary, take_turns

_ROUNDS = 5
ENCODINGS = ("fast", "small", "original")


def run(results: Results) -> dict[str, Any]:
    """All speeds."""
    return measure(deltas.qwen(), _ROUNDS)


def measure(change: Change, rounds: int) -> dict[str, Any]:
    """Seconds and GB/s of every part for `change`."""
    model = Model(change)
    measured = _bf16_rounds(model, rounds) | _fp32_rounds(model, rounds)
    return {"elements": change.elements, "changed": change.changed, **report(measured, change.model_bytes)}


def _bf16_rounds(model: Model, rounds: int) -> Rounds:
    reader = Reader(model)
    snapshot = bf16_tensors(model.bits)
    works = {"diff bf16": model.diff}
    works |= {f"encode {encoding}": functools.partial(model.encode, encoding) for encoding in ENCODINGS}
    works["publish by others bf16"] = functools.partial(model.publish_original, snapshot)
    works["write files"] = model.write
    for encoding in ENCODINGS:
        works |= {
            f"decode {encoding}": functools.partial(reader.decode, encoding),
            f"apply {encoding}": reader.apply,
        }
        works[f"take back {encoding}"] = reader.take_back
        works[f"receive {encoding}"] = functools.partial(reader.receive, encoding)
        works[f"take back again {encoding}"] = reader.take_back
    works |= {"stage": reader.stage, "commit": reader.commit, "undo": reader.undo}
    works |= {"receive by others": reader.receive_original, "digest": reader.digest}
    works |= {"publish whole": reader.publish_full, "receive whole": reader.receive_full}
    return take_turns(works, rounds, before_round=model.turn)


def _fp32_rounds(model: Model, rounds: int) -> Rounds:
    model.to_fp32()
    snapshot = bf16_tensors(model.bits)
    works = {
        "diff fp32": model.diff,
        "publish by others fp32": functools.partial(model.publish_original, snapshot),
    }
    return take_turns(works, rounds, before_round=model.turn)


def report(rounds: Rounds, model_bytes: int) -> dict[str, Any]:
    """Parts, totals and ratios from the rounds' seconds."""
    totals = {
        f"publish {encoding} {dtype}": added(rounds, [f"diff {dtype}", f"encode {encoding}"])
        for encoding in ENCODINGS
        for dtype in ("bf16", "fp32")
    }
    everything = rounds | totals
    return {
        "parts": {name: summary(seconds, model_bytes) for name, seconds in everything.items()},
        "ratios": {
            f"publish {encoding} {dtype}": ratio(
                rounds[f"publish by others {dtype}"], totals[f"publish {encoding} {dtype}"]
            )
            for encoding in ENCODINGS
            for dtype in ("bf16", "fp32")
        }
        | {
            f"receive {encoding}": ratio(rounds["receive by others"], rounds[f"receive {encoding}"])
            for encoding in ENCODINGS
        },
    }
