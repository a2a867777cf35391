"""What both implementations of the wire format must agree on, written for `npm test` in web/."""

import base64
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from delta_weight_sync import codec
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import CodecError, DeltaWeightSyncError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests.fuzz.deltas import OLD, mutate, seeds
from tests.fuzz.forged import PARTS, RUN, Files, forged, forged_parts, sound, sound_parts, written
from tests.support.parted import parted
from tests.support.real_run import Drifting

Case = dict[str, Any]


def write(folder: Path, deltas: int, runs: int) -> None:
    """Whole and damaged deltas with what Python makes of each, forged runs, and one in parts, with a jump."""
    rng, files = Random(3), list(seeds().values())
    damaged = [mutate(rng.choice(files), rng) for _ in range(deltas)]
    cases = [_verdict(folder / "delta", file) for file in [*files, *damaged]]
    assert 0 < sum(case["digest"] is not None for case in cases[len(files) :]) < deltas
    model = {name: {"shape": bits.shape, "bits": _text(bits.tobytes())} for name, bits in OLD.items()}
    (folder / "deltas.json").write_text(json.dumps({"model": model, "cases": cases}))
    judged = {"sound": sound(), "sound parts": sound_parts()} | {name: forged_parts(name) for name in PARTS}
    texts: list[Case] = [
        {"what": what, "files": _texts(files), "version": _taken(files)} for what, files in judged.items()
    ]
    texts += [{"what": "forged", "files": _texts(forged(rng)[1])} for _ in range(runs)]
    (folder / "runs.json").write_text(json.dumps(texts))
    run = Drifting(folder / "bucket", run=RUN, drift=1e-6)
    run.steps(10)
    run.close()
    (folder / "parts.json").write_text(json.dumps(_texts(parted(run.reader))))


def _taken(files: Files) -> int | None:
    """The version that the project's own reader builds; None if it refuses the run."""
    with tempfile.TemporaryDirectory() as folder:
        reader = RunReader(open_bucket(written(files, Path(folder) / "bucket")), RUN)
        try:
            manifest = reader.manifest()
            reader.checkout(manifest, Path(folder) / "checkout")
        except DeltaWeightSyncError:
            return None
    return manifest.version


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


def _texts(files: Files) -> dict[str, str]:
    return {key: _text(content) for key, content in files.items()}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
