"""The closest rival beside this codec: ModelExpress by NVIDIA, which ships deltas over S3 to vLLM.

Its delta is the XOR of old and new bytes, tensor by tensor, through zstd. Both take turns on the same deltas:

out   from the trainer's tensors to a file's bytes: find the difference and encode it
in    from these to new weights: decode and change them

Each side checks as it does at work: ModelExpress by an Adler-32 of every tensor that changed, both ways; this
project by a digest that the publisher carries along and the replica takes of all weights.
"""

import functools
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from bench import deltas
from bench.change import Change
from bench.model import Model, Reader
from bench.results import Results
from bench.timing import Work, added, summary, take_turns
from delta_weight_sync.codec import Encoding

_ROUNDS = 5
_LEVELS: tuple[Encoding, ...] = ("fast", "small")


def run(results: Results) -> dict[str, Any]:
    """Bytes per change and GB/s of both on each set."""
    if not find_spec("modelexpress_rl"):
        return {"unmeasured": "ModelExpress is not installed"}
    os.environ["MX_REFIT_DELTA_WORKERS"] = "1"
    return {"sets": [measure(change) for change in _sets()]}


def measure(change: Change) -> dict[str, Any]:
    """All ways on one set. Raises `RuntimeError` if the two sides end with different weights."""
    from bench.modelexpress import ModelExpress

    print(f"  {change.model}, {change.trainer}: {change.changed / change.elements:.3%} changed", flush=True)
    rival = ModelExpress(change.old)
    model = Model(change)
    reader = Reader(model)
    works: dict[str, Work] = {"publish": functools.partial(rival.publish, model), "diff": model.diff}
    works |= {f"encode {way}": functools.partial(model.encode, way) for way in _LEVELS}
    works |= {"write": model.write} | _receiving(reader) | {"receive": rival.receive}
    rounds = take_turns(works, _ROUNDS, before_round=model.turn)
    if not rival.holds(reader.live):
        raise RuntimeError("the two sides end with different weights: one is not called as it should be")
    ways = {way: (["diff", f"encode {way}"], [f"decode {way}", f"apply {way}", "digest"]) for way in _LEVELS}
    ways["modelexpress"] = ["publish"], ["receive"]
    sizes = {way: len(model.files[way]) for way in _LEVELS} | {"modelexpress": len(rival.shard)}
    return {
        "model": change.model,
        "trainer": change.trainer,
        "share": change.changed / change.elements,
        "per_change": {way: round(size / change.changed, 4) for way, size in sizes.items()},
        "out": {way: summary(added(rounds, parts[0]), change.model_bytes) for way, parts in ways.items()},
        "in": {way: summary(added(rounds, parts[1]), change.model_bytes) for way, parts in ways.items()},
    }


def _receiving(reader: Reader) -> dict[str, Work]:
    """Each encoding in turn; at the end the reader has gone on to the new weights."""
    works: dict[str, Work] = {}
    for way in _LEVELS:
        works |= {f"decode {way}": functools.partial(reader.decode, way), f"apply {way}": reader.apply}
        works[f"take back {way}"] = reader.take_back
    return works | {"go on": reader.apply, "digest": reader.digest}


def _sets() -> Iterator[Change]:
    for trainer in (deltas.LATE, deltas.BF16):
        yield deltas.smollm2(trainer)
