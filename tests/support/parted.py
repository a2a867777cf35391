"""A run as two ranks publish it, made from a run of one process: the same versions, each file as two."""

import json
import tempfile
from itertools import chain
from pathlib import Path

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import INDEX, WEIGHTS, Bits, write_bits
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import (
    AnchorRef,
    DeltaRef,
    Head,
    Manifest,
    Writer,
    joined,
    reference,
    version_key,
)
from tests.support.written_run import file_ref


def parted(reader: RunReader) -> dict[str, bytes]:
    """Key -> content of an unsigned run; the tensors are dealt out to the two ranks in turn."""
    there = {info.key: reader.bucket.get(info.key) for info in reader.bucket.list(reader.keys.folder)}
    files = {key: data for key, data in there.items() if version_key(key) is None}
    states = dict[int, dict[str, Bits]]()
    parent = None
    for old in [*reader.versions()][::-1]:
        with tempfile.TemporaryDirectory() as folder:
            states[old.version] = reader.checkout(old, Path(folder))
        writer = Writer(old.writer_term, old.writer)
        found = list[tuple[DeltaRef, ...]]()
        for refs in (old.deltas, old.jumps):
            parts = [_parts(ref, states[ref.base], states[ref.version]) for ref in refs]
            files |= {ref.key: data for part in parts for ref, data in part}
            found.append(tuple(chain.from_iterable(joined([ref for ref, _ in part]) for part in parts)))
        small = {ref.key: there[ref.key] for ref in old.anchor.files if ref not in old.anchor.weights}
        prefix = old.anchor.weights[0].key.removesuffix(WEIGHTS)
        anchor = small | {prefix + name: data for name, data in _shards(states[old.anchor.version]).items()}
        files |= anchor
        refs = tuple(file_ref(key, data) for key, data in anchor.items())
        changes = {"anchor": AnchorRef(version=old.anchor.version, files=refs), "parent": parent}
        changes |= {"deltas": found[0], "jumps": found[1], "seal": ""}
        manifest = Manifest(**(dict(old) | changes))
        parent = reference(reader.keys.manifest(manifest.version, writer), manifest)
        files[parent.key] = manifest.to_bytes()
    head = reader.keys.head(writer)
    files[head] = Head(**dict(reader.head_of(writer)) | {"manifest": parent, "seal": ""}).to_bytes()
    return files


def _parts(ref: DeltaRef, old: dict[str, Bits], new: dict[str, Bits]) -> list[tuple[DeltaRef, bytes]]:
    found = []
    for rank, names in enumerate((sorted(old)[::2], sorted(old)[1::2])):
        patches = [codec.diff(name, old[name], new[name]) for name in names]
        changed = sum(patch.index.size for patch in patches)
        if rank and not changed:
            continue
        data = codec.encode(patches, old.__getitem__, base=ref.base, version=ref.version)
        file = file_ref(ref.key.replace(".safetensors", f".r{rank}.safetensors"), data)
        numbers = {"base": ref.base, "version": ref.version, "changed": changed}
        found.append((DeltaRef(**file.model_dump(), **numbers), data))
    return found


def _shards(state: dict[str, Bits]) -> dict[str, bytes]:
    files = dict[str, bytes]()
    index = dict[str, str]()
    shapes = {n: bits.shape for n, bits in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        for rank, names in enumerate((sorted(state)[::2], sorted(state)[1::2])):
            path = Path(folder) / f"model-{rank + 1:05d}-of-00002.safetensors"
            write_bits({name: shapes[name] for name in names}, state.__getitem__, path)
            files[path.name] = path.read_bytes()
            index |= dict.fromkeys(names, path.name)
    return files | {INDEX: json.dumps({"metadata": {}, "weight_map": index}).encode()}
