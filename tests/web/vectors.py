"""What both implementations of the wire format must agree on, written for `npm test` in web/."""

import base64
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from delta_weight_sync import Publisher, codec
from delta_weight_sync.checkpoint import DTYPES
from delta_weight_sync.codec import Encoding
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import CodecError, DeltaWeightSyncError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests.fuzz.deltas import OLD, mutate, seeds
from tests.fuzz.forged import (
    PARTS,
    RUN,
    Files,
    forged,
    forged_parts,
    intact_parts,
    intact_run,
    name_in_head,
    newest,
    write_files,
)
from tests.support.parted import parted
from tests.support.real_run import Drifting
from tests.support.waiting import PATIENCE_S

Case = dict[str, Any]
MIXED = "mixed"
ASSETS = {"additional_chat_templates/tool_use.jinja": "{{ tools }}", "1_Pooling/x.txt": "deep"}


def write(folder: Path, deltas: int, runs: int) -> None:
    """Whole and damaged deltas with what Python makes of each, forged runs, and one in parts, with a jump."""
    rng = Random(3)
    files = list(seeds().values())
    damaged = [mutate(rng.choice(files), rng) for _ in range(deltas)]
    cases = [_verdict(folder / "delta", file) for file in [*files, *damaged]]
    assert 0 < sum(case["digest"] is not None for case in cases[len(files) :]) < deltas
    model = {name: {"shape": bits.shape, "bits": _text(bits.tobytes())} for name, bits in OLD.items()}
    (folder / "deltas.json").write_text(json.dumps({"model": model, "cases": cases}))
    judged = {"sound": intact_run(), "sound parts": intact_parts()} | {
        name: forged_parts(name) for name in PARTS
    }
    judged |= {f"names {names}": _with_names(names) for names in NAMES}
    texts: list[Case] = [
        {"what": what, "files": _texts(files), "version": _taken(files)} for what, files in judged.items()
    ]
    whole = _taken(intact_run())
    named = zip(texts[-len(NAMES) :], NAMES.values(), strict=True)
    assert all((text["version"] == whole) == allowed for text, allowed in named)
    texts += [{"what": "forged", "files": _texts(forged(rng)[1])} for _ in range(runs)]
    (folder / "runs.json").write_text(json.dumps(texts))
    run = Drifting(folder / "bucket", run=RUN, drift=1e-6)
    run.steps(10)
    run.close()
    (folder / "parts.json").write_text(json.dumps(_texts(parted(run.reader))))
    for encoding in ("fast", "small"):
        reader, states = mixed(folder / encoding, encoding)
        files = {info.key: reader.bucket.get(info.key) for info in reader.bucket.list("")}
        names = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
        dtypes = {name: names[str(tensor.dtype).removeprefix("torch.")] for name, tensor in states[0].items()}
        counts = {name: max(tensor.nbytes // 2, tensor.numel()) for name, tensor in states[0].items()}
        facts: Case = {"files": _texts(files), "assets": ASSETS, "newest": len(states) - 1}
        facts |= {"dtypes": dtypes, "counts": counts}  # of each tensor: its dtype, its number of words
        (folder / f"mixed-{encoding}.json").write_text(json.dumps(facts))


def mixed(folder: Path, encoding: Encoding) -> tuple[RunReader, list[dict[str, torch.Tensor]]]:
    """Publish a run whose tensors have all dtypes, most of their elements BF16, into the folder's `bucket`.

    From version to version, all tensors change, the tensors `some.*` in a few elements; but the tensor
    `frozen` is only in the base. Returns a reader of the run, and the tensors of each version.
    """
    chance = torch.Generator().manual_seed(5)
    # Odd numbers of elements, so that tensors of one-byte elements end amid a word of the file.
    shapes = [(f"some.{dtype}", (7, 3)) for dtype in DTYPES] + [(f"one.{dtype}", ()) for dtype in DTYPES]
    # Large enough for modes of their own.
    shapes += [(f"all.{dtype}", (3, 71)) for dtype in ("F32", "I64", "U8", "BOOL")]
    raw = {name: _random((*shape, DTYPES[_dtype(name)][1]), name, chance) for name, shape in shapes}
    embed = 0.02 * torch.randn(300, 240, generator=chance)
    frozen = torch.tensor([1.5, -0.0])
    states = []
    for version in range(11):
        for name, old in raw.items() if version else ():
            chosen = torch.rand((*old.shape[:-1], 1), generator=chance) < (0.2 if "some" in name else 1.0)
            raw[name] = torch.where(chosen, _random(old.shape, name, chance), old)
        embed += 1e-6 * torch.randn(embed.shape, generator=chance)
        counted = torch.arange(-5, 6) + version  # a step from -1 to 0 changes all words of an element
        state = {"embed.weight": embed.bfloat16(), "counted": counted, "frozen": frozen}
        states.append(state | {name: _typed(some, name) for name, some in raw.items()})
    (folder / "base").mkdir(parents=True)
    save_file(states[0], folder / "base" / "model.safetensors")
    for name, text in {"config.json": "{}", **ASSETS}.items():
        (folder / "base" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "base" / name).write_text(text)
    url = f"{(folder / 'bucket').as_uri()}#{MIXED}"
    # Random bytes are NaN now and then.
    with Publisher(url, folder / "base", encoding=encoding, allow_nonfinite=True) as publisher:
        for state in states:
            publisher.publish((name, tensor) for name, tensor in state.items() if name != "frozen")
            publisher.flush()
            assert publisher._outbox.shortcuts.idle(PATIENCE_S)
        return publisher.reader, states


def _random(shape: tuple[int, ...], name: str, chance: torch.Generator) -> torch.Tensor:
    """Bytes of a tensor's elements, each element in the last dimension."""
    limit = 2 if _dtype(name) == "BOOL" else 256
    return torch.randint(0, limit, shape, dtype=torch.uint8, generator=chance)


def _typed(raw: torch.Tensor, name: str) -> torch.Tensor:
    return raw.reshape(-1).view(getattr(torch, DTYPES[_dtype(name)][0])).reshape(raw.shape[:-1])


def _dtype(name: str) -> str:
    return name.split(".")[1]


_PART = "x" * 99
# Names of an anchor's files besides its weights, and whether a run may have them. Those that begin with "../"
# lie in the folder of another anchor.
NAMES = {
    ("config.json", "a/config.json", "a/b/config.json"): True,
    ("config.json", "config.json.d/config.json", "-a/_b/c"): True,
    ("config.json", "../config.json"): False,
    ("config.json", "a/b", "../a/b"): False,
    ("config.json", "a/b", "../a/c"): True,
    ("config.json", "../config.json/more.json"): False,
    ("config.json", "a/b/c.json", "../a"): False,
    ("config.json", "a/b/c.json", "../a/b"): False,
    ("config.json", "a/.hidden"): False,
    ("config.json", "a//b"): False,
    ("config.json", "a/"): False,
    ("config.json", "a/../b"): False,
    ("config.json", f"{_PART}/{_PART}/{_PART}/{_PART}"): True,
    ("config.json", f"{_PART}/{_PART}/{_PART}/{_PART}/{_PART}"): False,
}


def _with_names(names: tuple[str, ...]) -> Files:
    """A run whose newest manifest names these files beside the anchor's weights; all hashes fit."""
    files = dict(intact_run())
    key = newest(files, "manifests")
    tree = json.loads(files[key])
    del tree["seal"]
    rows = tree["anchor"]["files"]
    (config,) = (row for row in rows if row[0] == "config.json")
    kept = [row for row in rows if row != config]
    folder = f"runs/{RUN}/anchors/"
    usual = f"00000000.t{tree['writer_term']}-{tree['writer'][:8]}"
    content = files[f"{folder}{usual}/config.json"]
    for name in names:
        place = usual.replace("00000000.", "00000009.") if name.startswith("../") else usual
        name = name.removeprefix("../")
        files[f"{folder}{place}/{name}"] = content
        kept.append([name, *config[1:3], place])
    tree["anchor"]["files"] = kept
    files[key] = json.dumps(tree).encode()
    name_in_head(files, key)
    return files


def _taken(files: Files) -> int | None:
    """The version that the project's own reader builds; None if it refuses the run."""
    with tempfile.TemporaryDirectory() as folder:
        reader = RunReader(open_bucket(write_files(files, Path(folder) / "bucket")), RUN)
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
