"""What both implementations of the wire format must agree on, written for `npm test` in web/."""

import base64
import json
from pathlib import Path
from random import Random
from typing import Any

from delta_weight_sync import codec
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import CodecError
from tests.fuzz.deltas import OLD, mutate, seeds
from tests.fuzz.forged import forged, sound

Case = dict[str, Any]


def write(folder: Path, deltas: int, runs: int) -> None:
    """Whole and damaged deltas with what Python makes of each, and forged runs."""
    rng, files = Random(3), list(seeds().values())
    damaged = [mutate(rng.choice(files), rng) for _ in range(deltas)]
    cases = [_verdict(folder / "delta", file) for file in [*files, *damaged]]
    assert 0 < sum(case["digest"] is not None for case in cases[len(files) :]) < deltas
    model = {name: {"shape": bits.shape, "bits": _text(bits.tobytes())} for name, bits in OLD.items()}
    (folder / "deltas.json").write_text(json.dumps({"model": model, "cases": cases}))
    buckets = [sound(), *(forged(rng)[1] for _ in range(runs))]
    texts = [{key: _text(content) for key, content in bucket.items()} for bucket in buckets]
    (folder / "runs.json").write_text(json.dumps(texts))


def _verdict(path: Path, file: bytes) -> Case:
    """The digest of the new weights; None if the project's own reader refuses the file."""
    path.write_bytes(file)
    new = {name: bits.copy() for name, bits in OLD.items()}
    try:
        for patch in codec.Delta(path).patches({n: b.shape for n, b in OLD.items()}, OLD.__getitem__):
            codec.apply(patch, new[patch.name])
    except CodecError as error:
        return {"file": _text(file), "digest": None, "why": str(error)}
    return {"file": _text(file), "digest": to_hex(state_digest(new))}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
