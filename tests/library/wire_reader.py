"""A reader of the wire format, written from docs/wire-format.md alone: standard library and zstandard.

One bit and one word at a time, so it is slow; it is there to show that the page is enough. It trusts what
it reads: a real reader checks lengths and places before it uses them.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import zstandard

MASK = 2**64 - 1
RECORD_FORMAT = "delta-weight-sync/3"  # of HEAD and manifest
DELTA_FORMAT = "delta-weight-sync-delta/2"
Weights = dict[str, list[int]]  # name -> row-major words
# dtype -> bytes of an element
BYTES = {"BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}
BYTES |= {"I8": 1, "U8": 1, "BOOL": 1}


def safetensors(data: bytes) -> tuple[dict, dict[str, bytes]]:
    """(header, content of each tensor)."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return header, {name: data[end:][slice(*entry["data_offsets"])] for name, entry in entries.items()}


def words_of(dtype: str, content: bytes) -> list[int]:
    """The words of a tensor, from its bytes."""
    size = min(BYTES[dtype], 2)
    return [int.from_bytes(content[i : i + size], "little") for i in range(0, len(content), size)]


def bit(stream: bytes, at: int) -> int:
    return stream[at // 8] >> at % 8 & 1


def number(stream: bytes, at: int, width: int) -> int:
    return sum(bit(stream, at + j) << j for j in range(width))


def zeros(stream: bytes, at: int) -> int:
    """Zeros at `at` before the next one."""
    count = 0
    while not bit(stream, at + count):
        count += 1
    return count


def bands(rows: list[list], length: int) -> list[tuple[int, list]]:
    """Where each row's section begins in its stream; `length` is the row's item with the bits."""
    starts = [sum(row[length] for row in rows[:i]) for i in range(len(rows))]
    return list(zip(starts, rows, strict=True))


def marks(stream: bytes, at: int, row: list) -> Iterator[bool]:
    """For each item of a band, without end: is it marked?"""
    events, k, flipped, _ = row
    quotient = at + events * k
    runs = []
    for event in range(events):
        count = zeros(stream, quotient)
        quotient += count + 1
        runs.append((count << k) + number(stream, at + event * k, k))
    others = chain.from_iterable(chain(repeat(flipped, run), [not flipped]) for run in runs)
    return chain(others, repeat(flipped))


def magnitudes(stream: bytes, at: int, row: list) -> Iterator[int]:
    """The magnitudes of a band's large changes."""
    k, length = row
    end = at + length
    while at < end:
        count = zeros(stream, at)
        width = count + k
        yield number(stream, at + count + 1, width) + (1 << width) - (1 << k) + 2
        at += count + 1 + width


def unpacked(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


def band_of(old: int, limits: list[int]) -> int:
    exponent = old >> 7 & 0xFF
    return sum(limit <= exponent for limit in limits)


def places(group: dict, streams: dict[str, bytes], words: list[int]) -> list[int]:
    """The changed ones of a group's words, all tensors one after the other."""
    if group["mode"] == "mask":
        mask = unpacked(streams["mask"])
        return [at for at in range(len(words)) if bit(mask, at)]
    changed = [marks(streams["gaps"], *section) for section in bands(group["gaps"], 3)]
    limits = group.get("limits", [])
    return [at for at, old in enumerate(words) if next(changed[band_of(old, limits)])]


def moves(group: dict, streams: dict[str, bytes], olds: list[int]) -> Iterator[int]:
    """What to add to each changed word."""
    large = [marks(streams["large"], *section) for section in bands(group["large"], 3)]
    sizes = [magnitudes(streams["sizes"], *section) for section in bands(group["sizes"], 1)]
    for change, old in enumerate(olds):
        band = band_of(old, group.get("limits", []))
        size = next(sizes[band]) if next(large[band]) else 1
        yield -size if bit(streams["signs"], change) else size


def planes(group: dict, streams: dict[str, bytes], words: list[int]) -> list[int]:
    """The new words of a group in which every word is stored."""
    pairs = zip(unpacked(streams["low"]), unpacked(streams["high"]), strict=True)
    values = [low | high << 8 for low, high in pairs]
    if group["mode"] == "raw":
        return values
    steps = [(value >> 1) ^ -(value & 1) for value in values]
    return [(old + step) & 0xFFFF for old, step in zip(words, steps, strict=True)]


def decode_group(group: dict, streams: dict[str, bytes], words: list[int]) -> list[int]:
    """The new words of a group, all its tensors one after the other."""
    if group["mode"] in ("dense", "raw"):
        return planes(group, streams, words)
    new = list(words)
    found = places(group, streams, words)
    for at, move in zip(found, moves(group, streams, [words[at] for at in found]), strict=True):
        new[at] = (words[at] + move) & 0xFFFF
    return new


def apply_delta(data: bytes, weights: Weights) -> None:
    """Take `weights` from the delta file's base to its version, in place."""
    header, content = safetensors(data)
    metadata = header["__metadata__"]
    assert metadata["format"] == DELTA_FORMAT
    assert int(metadata["base"]) < int(metadata["version"])
    table = json.loads(metadata["tensors"])
    groups = json.loads(metadata["groups"])
    for order, group in enumerate(groups):
        names = [name for name, _, _, member in table if member == order]
        streams = {key.split(".")[1]: c for key, c in content.items() if key.split(".")[0] == str(order)}
        new = decode_group(group, streams, [w for name in names for w in weights[name]])
        for name in names:
            size = len(weights[name])
            weights[name] = new[:size]
            new = new[size:]


def mix(i: int) -> int:
    z = i * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def digest(weights: Weights) -> str:
    """The state digest, as manifests carry it."""
    total = 0
    for name, values in weights.items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        for i, value in enumerate(values):
            total += (mix(seed + i // 4096 & MASK) | 1) * (mix(i % 4096) & 0xFFFFFFFF | 1) * value
    return f"{total & MASK:016x}"


def pinned(bucket: Path, ref: dict) -> bytes:
    """An object that another one names by content."""
    data = (bucket / ref["key"]).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (ref["size"], ref["sha256"])
    return data


def sealed(kind: str, text: str) -> dict:
    """A record that holds a hash of itself."""
    record = json.loads(text)
    assert record["format"] == RECORD_FORMAT
    content = text.replace(f'"seal":"{record["seal"]}","signature":"{record["signature"]}",', "")
    assert hashlib.sha256(f"{kind}\n{content}".encode()).hexdigest() == record["seal"]
    return record


def writer_of(manifest: dict) -> str:
    return f"t{manifest['writer_term']}-{manifest['writer'][:8]}"


def steps(manifest: dict) -> dict[tuple[int, int], dict]:
    """(base, version) of each delta and jump -> its files (key -> size) and their hash."""
    found = {}
    for kind in ("deltas", "jumps"):
        for base, version, changed, size, sha256, *other in manifest[kind]:
            start = f"{base:08d}-" if kind == "jumps" else ""
            key = f"runs/{manifest['run']}/{kind}/{start}{version:08d}.{(*other, writer_of(manifest))[0]}"
            parts = {f".{part}": one for part, one in size.items()} if isinstance(size, dict) else {"": size}
            files = {f"{key}{part}.safetensors": one for part, one in parts.items()}
            versions = {"base": base, "version": version}
            found[base, version] = {**versions, "files": files, "sha256": sha256, "changed": changed}
    return found


def step_files(bucket: Path, step: dict) -> list[bytes]:
    """The files of a delta or a jump. If there are several, they have one hash together."""
    files = [(bucket / key).read_bytes() for key in step["files"]]
    assert [len(file) for file in files] == [*step["files"].values()]
    hashes = [hashlib.sha256(file) for file in files]
    together = hashlib.sha256(b"".join(one.digest() for one in hashes)) if len(files) > 1 else hashes[0]
    assert together.hexdigest() == step["sha256"]
    return files


def way(manifest: dict) -> list[dict]:
    """The deltas and jumps of the fewest bytes, then files, from the anchor to the version."""
    ways: dict[int, list[dict]] = {manifest["anchor"]["version"]: []}

    def cost(way: list[dict]) -> tuple[int, int]:
        sizes = [size for step in way for size in step["files"].values()]
        return sum(sizes), len(sizes)

    for (base, version), step in sorted(steps(manifest).items(), key=lambda item: item[0]):
        if base in ways:
            found = [*ways[base], step]
            ways[version] = min(ways.get(version, found), found, key=cost)
    return ways[manifest["version"]]


def anchor_files(manifest: dict) -> dict[str, dict]:
    """The anchor's files by their paths in the checkpoint's folder."""
    anchor = manifest["anchor"]
    usual = f"{anchor['version']:08d}.{writer_of(manifest)}"
    files = {}
    for name, size, sha256, *other in anchor["files"]:
        key = f"runs/{manifest['run']}/anchors/{(*other, usual)[0]}/{name}"
        files[name] = {"key": key, "size": size, "sha256": sha256}
    assert len(files) == len(anchor["files"])
    assert not any(str(folder) in files for name in files for folder in Path(name).parents)
    return files


def built(bucket: Path, manifest: dict) -> Weights:
    """The weights of a version."""
    weights: Weights = {}
    for file, ref in anchor_files(manifest).items():
        if file.endswith(".safetensors"):
            header, content = safetensors(pinned(bucket, ref))
            for name, raw in content.items():
                dtype = header[name]["dtype"]
                shape = header[name]["shape"]
                assert len(raw) == BYTES[dtype] * math.prod(shape)
                weights[name] = words_of(dtype, raw)
    for step in way(manifest):
        for file in step_files(bucket, step):
            apply_delta(file, weights)
    assert digest(weights) == manifest["digest"]
    return weights


def versions(bucket: Path, run: str) -> Iterator[dict]:
    """The manifests of a run, newest first."""
    text = max((bucket / f"runs/{run}/heads").iterdir()).read_text()
    ref = sealed("Head", text)["manifest"]
    while ref:
        manifest = sealed("Manifest", pinned(bucket, ref).decode())
        yield manifest
        ref = manifest["parent"]
