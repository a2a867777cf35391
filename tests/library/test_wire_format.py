"""docs/wire-format.md is enough: a reader written from it alone gets what the project's own reader gets.

    python -m tests.library.test_wire_format      writes the worked examples into the page

An example's place is `<!-- wire:NAME -->` up to `<!-- /wire -->`; NAME is one of `EXAMPLES`.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.reader import apply_delta
from delta_weight_sync.records import AnchorRef, DeltaRef, FileRef, Head, Keys, Manifest, Writer, joined
from tests.fuzz.deltas import OLD, seeds
from tests.fuzz.forged import write_files
from tests.library import wire_reader
from tests.support.parted import parted
from tests.support.real_run import RUN, Drifting
from tests.web.vectors import ASSETS, MIXED, mixed

State = dict[str, np.ndarray]


def by_the_page(data: bytes, old: State) -> State:
    weights = {name: bits.reshape(-1).tolist() for name, bits in old.items()}
    wire_reader.apply_delta(data, weights)
    return {name: np.array(bits, np.uint16).reshape(old[name].shape) for name, bits in weights.items()}


def test_the_page_reads_every_mode(tmp_path):
    """The seeds of the fuzzer have all modes; a test beside the codec's says so."""
    for data in seeds().values():
        new = {name: bits.copy() for name, bits in OLD.items()}
        (tmp_path / "delta.safetensors").write_bytes(data)
        apply_delta(new, tmp_path / "delta.safetensors")
        np.testing.assert_equal(by_the_page(data, OLD), new)


@pytest.mark.parametrize("encoding", ["fast", "small"])
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.sampled_from([1, 3, 63, 64, 65, 130, 400]), min_size=1, max_size=4),
    share=st.sampled_from([0.01, 0.1, 0.4, 0.6, 0.9, 1.0]),
    moves=st.sampled_from([[1], [1, 65535], [1, 1, 1, 65535, 2, 65530], [*range(1, 65536)]]),
)
def test_the_page_reads_what_the_project_writes(encoding, seed, sizes, share, moves):
    rng = np.random.default_rng(seed)
    old = {f"layer.{i}": rng.integers(0, 65536, size).astype(np.uint16) for i, size in enumerate(sizes)}
    new = State()
    for name, bits in old.items():
        hit = rng.random(bits.size) < share
        new[name] = bits + np.where(hit, rng.choice(moves, bits.size), 0).astype(np.uint16)
    patches = [codec.diff(name, old[name], new[name]) for name in old]
    data = codec.encode(patches, old.__getitem__, base=3, version=4, encoding=encoding)
    np.testing.assert_equal(by_the_page(data, old), new)


def test_the_page_reads_a_run_from_head_to_weights(tmp_path):
    """HEAD, its seal, manifest, anchor, jump, deltas, digest: as a reader in another language would."""
    run = Drifting(tmp_path / "bucket", drift=1e-6)
    run.steps(10)
    run.close()
    manifest = next(wire_reader.versions(run.folder, RUN))
    weights = wire_reader.built(run.folder, manifest)
    steps = [(0, 8), (8, 9), (9, 10)]
    assert [(ref["base"], ref["version"]) for ref in wire_reader.way(manifest)] == steps
    assert (manifest["version"], manifest["digest"]) == (10, run.digest())
    expected = run.reader.checkout(run.newest, tmp_path / "checkout")
    assert weights == {name: bits.reshape(-1).tolist() for name, bits in expected.items()}
    # The same run as two ranks publish it: parts are taken together, also those of a jump.
    write_files(parted(run.reader), tmp_path / "parted")
    newest, *older = wire_reader.versions(tmp_path / "parted", RUN)
    way = wire_reader.way(newest)
    assert [(step["base"], step["version"], len(step["files"])) for step in way] == [(*s, 2) for s in steps]
    assert len(newest["anchor"]["files"]) == 4, "config.json, the index and the weights of each rank"
    for version in (newest, older[4], older[-1]):
        wire_reader.built(tmp_path / "parted", version)


@pytest.mark.parametrize("encoding", ["fast", "small"])
def test_the_page_reads_a_run_of_every_dtype(tmp_path, encoding):
    """Words, and not elements, are what deltas, digest and counts are about."""
    reader, states = mixed(tmp_path, encoding)
    expected = [{name: in_words(tensor) for name, tensor in state.items()} for state in states]
    bucket = tmp_path / "bucket"
    manifests = [*wire_reader.versions(tmp_path / "bucket", MIXED)][::-1]
    assert [manifest["version"] for manifest in manifests] == [*range(len(states))]
    steps = [(ref["base"], ref["version"]) for ref in wire_reader.way(manifests[10])]
    assert steps == [(0, 8), (8, 9), (9, 10)], "a jump, too"
    for version in (0, 4, 10):
        manifest = manifests[version]
        state = states[version]
        words = expected[version]
        assert wire_reader.built(bucket, manifest) == words
        mapped = reader.checkout(reader.manifest(version), tmp_path / "checkout")
        assert {name: bits.reshape(-1).tolist() for name, bits in mapped.items()} == words
        loaded = load_file(tmp_path / "checkout" / "model.safetensors")
        assert {name: in_words(tensor) for name, tensor in loaded.items()} == words
        dtypes = {name: tensor.dtype for name, tensor in loaded.items()}
        assert dtypes == {name: tensor.dtype for name, tensor in state.items()}
        files = wire_reader.anchor_files(manifest)
        assert {name: wire_reader.pinned(bucket, files[name]).decode() for name in ASSETS} == ASSETS
    for manifest, state, words in zip(manifests, states, expected, strict=True):
        assert manifest["total"] == sum(map(len, words.values()))
        assert manifest["full_bytes"] == sum(tensor.nbytes for tensor in state.values())
    for old, new, manifest in zip(expected, expected[1:], manifests[1:], strict=False):
        moved = {name: sum(a != b for a, b in zip(old[name], new[name], strict=True)) for name in new}
        delta = wire_reader.steps(manifest)[manifest["version"] - 1, manifest["version"]]
        assert manifest["changed"] == delta["changed"] == sum(moved.values())
        (file,) = wire_reader.step_files(bucket, delta)
        header, _ = wire_reader.safetensors(file)
        rows = json.loads(header["__metadata__"]["tensors"])
        table = {name: (shape, changes) for name, shape, changes, _ in rows}
        assert table == {n: (shape_of(states[0][n]), count) for n, count in moved.items() if count}
        assert {states[0][name].dtype for name in table} == {tensor.dtype for tensor in states[0].values()}


def in_words(tensor: torch.Tensor) -> list[int]:
    """As the page says it, and not as `checkpoint` does it."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [*raw] if tensor.itemsize == 1 else memoryview(raw).cast("H").tolist()


def shape_of(tensor: torch.Tensor) -> list[int]:
    """Of the tensor's words."""
    return [*tensor.shape, *([tensor.itemsize // 2] if tensor.itemsize > 2 else [])]


PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"
_PLACE = re.compile(r"(<!-- wire:(\w+) -->\n).*?(<!-- /wire -->)", re.DOTALL)
Bits = np.ndarray
_SHOWN = 24  # changes


def head() -> str:
    writer = Writer(1, "0123456789abcdef" * 2)
    keys = Keys("demo")
    manifest = FileRef(key=keys.manifest(7, writer), size=2, sha256=_sha256(b"{}"))
    version = {"version": 7, "manifest": manifest, "writer_term": writer.term, "writer": writer.id}
    sealed = Head(run="demo", born=1.75e9, **version)
    text = sealed.to_bytes().decode()
    without = "Head\n" + text.replace(f'"seal":"{sealed.seal}","signature":"",', "")
    lines = [keys.head(writer), *_wrapped(text), "its seal is the sha256 of the word Head, a line feed, and"]
    lines += [*_wrapped(without.removeprefix("Head\n")), f"  {_sha256(without.encode())}"]
    return "\n".join(lines)


def manifest() -> str:
    """A manifest of a trainer of two ranks, without the fields that HEAD has, too."""
    writer = Writer(2, "5ad0b5d1" * 4)
    keys = Keys("demo")
    earlier = Writer(1, "0123456789abcdef" * 2)
    content = {"size": 2, "sha256": _sha256(b"{}")}

    def parts(base: int, version: int, suffixes: list[str], owner: Writer) -> tuple[DeltaRef, ...]:
        jump = version - base > 1
        found = [
            DeltaRef(
                key=keys.jump(base, version, owner, suffix) if jump else keys.delta(version, owner, suffix),
                **content,
                base=base,
                version=version,
                changed=9,
            )
            for suffix in suffixes
        ]
        return joined(found)

    files = [keys.anchor(0, earlier, name) for name in ("config.json", "model.safetensors")]
    found = Manifest(
        run="demo",
        born=1.75e9,
        version=8,
        writer_term=writer.term,
        writer=writer.id,
        sync=8,
        created_at=1.75e9,
        digest="0" * 16,
        anchor=AnchorRef(version=0, files=tuple(FileRef(key=key, **content) for key in files)),
        deltas=(*parts(6, 7, [""], earlier), *parts(7, 8, [".r0", ".r1"], writer)),
        jumps=parts(0, 7, [""], earlier),
        parent=FileRef(key=keys.manifest(7, earlier), **content),
        changed=18,
        total=100,
        full_bytes=200,
    )
    tree = json.loads(found.to_bytes())
    lines = []
    for field in ("anchor", "deltas", "jumps"):
        lines += _wrapped(json.dumps({field: tree[field]}, separators=(",", ":"))[1:-1])
    lines.append("the files of these deltas and jumps")
    lines += [f"  {ref.key}" for ref in (*found.deltas, *found.jumps)]
    return "\n".join(lines)


def words() -> str:
    tensors = {
        "BF16": torch.tensor([1.0, -2.5]).bfloat16(),
        "F32": torch.tensor([[1.0, -2.5]]),
        "I64": torch.tensor(-2),
        "I8": torch.tensor([1, -1, 127], dtype=torch.int8),
        "BOOL": torch.tensor([True, False, True]),
    }
    return "\n\n".join(_in_words(dtype, tensor) for dtype, tensor in tensors.items())


def digest() -> str:
    zeros = np.zeros(3, np.uint16)
    small = _numbers(0x3F80, 0, 0x8000)
    long = np.arange(5000, dtype=np.uint16)
    rows = [
        ("w = [0000 0000 0000]", {"w": zeros}),
        ("w = [3f80 0000 8000]", {"w": small}),
        ("v = [3f80 0000 8000]", {"v": small}),
        ("w and v, both [3f80 0000 8000]", {"w": small, "v": small}),
        ("w = [0000 0001 … 1387], 5000 words", {"w": long}),
    ]
    return "\n".join(f"{name:38} {to_hex(state_digest(state))}" for name, state in rows)


def gaps() -> str:
    old = np.full((4, 16), 0x3C00, np.uint16)
    new = _moved(old, {5: 1, 6: -1, 20: 3, 41: 1})
    return _explained(old, new, "fast", "gaps")


def bands() -> str:
    """Every other weight is a thousand times smaller, and those change."""
    old = np.tile(_numbers(0x3F80, 0x3A80), (8, 16))
    new = _moved(old, {at: 1 if at % 16 == 1 else -1 for at in range(1, 256, 8)} | {7: -2, 100: 1})
    return _explained(old, new, "small", "bands")


def planes() -> str:
    """Changes side by side, steps of every size, and words that have nothing to do with the old ones."""
    at = np.arange(512)
    old = np.full(512, 0x3C00, np.uint16)
    uneven = (at * 2654435761 >> 7 & 0xFFFF).astype(np.uint16)
    steps = np.tile([1, -1, 300, 0, 2, -2, -300, 1], 64)
    examples = {
        "mask": (old, old + (at // 32 % 4 == 1).astype(np.uint16)),
        "dense": (old, (old + steps).astype(np.uint16)),
        "raw": (uneven, np.tile(_numbers(0x3F80, 0xBF80, 0x0001, 0x7FC0), 128)),
    }
    return "\n\n".join(_explained(*pair, "fast", mode) for mode, pair in examples.items())


EXAMPLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (words, head, manifest, digest, gaps, bands, planes)
}


def _in_words(dtype: str, tensor: torch.Tensor) -> str:
    bits = to_bits(tensor, dtype)
    _, content = wire_reader.safetensors(save({"w": tensor}))
    assert bits.reshape(-1).tolist() == wire_reader.words_of(dtype, content["w"]) == in_words(tensor)
    elements = " ".join(str(value).lower() for value in tensor.reshape(-1).tolist())
    shapes = f"w is {dtype} {list(tensor.shape)}", f"words {list(bits.shape)}"
    rows = [
        (shapes[0], elements),
        ("  bytes", content["w"].hex(" ")),
        (f"  {shapes[1]}", " ".join(f"{word:04x}" for word in bits.reshape(-1).tolist())),
        ("  digest", to_hex(state_digest({"w": bits}))),
    ]
    return "\n".join(f"{name:19} {value}" for name, value in rows)


def _explained(old: Bits, new: Bits, encoding: str, mode: str) -> str:
    patch = codec.diff("w", old, new)
    data = codec.encode([patch], {"w": old}.__getitem__, base=6, version=7, encoding=encoding)
    header, content = wire_reader.safetensors(data)
    end = 8 + int.from_bytes(data[:8], "little")
    found = re.findall(r'"mode": "(\w+)"', header["__metadata__"].get("groups", ""))
    assert found == [mode], f"this is no example of {mode}, but of {found}"
    pairs = list(zip(patch.index, patch.ulps.astype(np.int16), strict=True))
    steps = " ".join(f"{at}:{step:+d}" for at, step in pairs[:_SHOWN]) + (" …" if pairs[_SHOWN:] else "")
    lines = [
        f"{mode}: w has shape {list(old.shape)}, old words {_few(old)}",
        *_wrapped(f"changes, position:step  {steps}"),
        f"the file, {len(data)} bytes: length of the header {data[:8].hex(' ')}, header",
        *_wrapped(data[8:end].decode().rstrip()),
        f"and {end - 8 - len(data[8:end].rstrip())} spaces; then",
        *(line for name, stream in content.items() for line in _stream(name, stream)),
    ]
    return "\n".join(lines)


def _stream(name: str, stream: bytes) -> list[str]:
    if not stream:
        return [f"  {name:12} (empty)"]
    if stream[:4] == b"\x28\xb5\x2f\xfd":
        inside = zstandard.ZstdDecompressor().decompress(stream)
        unpacked = f"  unpacked   {inside[:24].hex(' ')} … ({len(inside)} bytes)"
        return [*_wrapped(f"{name:12} {stream.hex(' ')}"), *_wrapped(unpacked)]
    bits = " ".join(f"{byte:08b}"[::-1] for byte in stream)
    shown = _wrapped(f"  bits       {bits}") if len(stream) < 32 else []
    return [*_wrapped(f"{name:12} {stream.hex(' ')}"), *shown]


def _few(old: Bits) -> str:
    flat = [f"{value:04x}" for value in old.reshape(-1)[:4].tolist()]
    return " ".join(flat) + (" …" if old.size > 4 else "")


def _moved(old: Bits, steps: dict[int, int]) -> Bits:
    move = np.zeros(old.size, np.int64)
    move[list(steps)] = list(steps.values())
    return (old + move.reshape(old.shape)).astype(np.uint16)


def _numbers(*values: int) -> Bits:
    return np.array(values, np.uint16)


def _wrapped(text: str, width: int = 100) -> list[str]:
    return ["  " + text[at : at + width] for at in range(0, len(text), width)]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def filled(text: str) -> str:
    """The page with every place written anew."""
    return _PLACE.sub(lambda m: f"{m[1]}```text\n{EXAMPLES[m[2]]()}\n```\n{m[3]}", text)


def test_the_page_and_its_examples_name_the_formats_that_the_reader_checks():
    page = PAGE.read_text()
    formats = [wire_reader.RECORD_FORMAT, wire_reader.DELTA_FORMAT]
    assert re.findall(r"^\| `format` \|.*`(delta-weight-sync\S+)` \|$", page, re.MULTILINE) == formats
    unwrapped = page.replace("\n  ", "")
    assert set(re.findall(r'"format":"([^"]+)"', unwrapped)) == set(formats)


def test_the_examples_of_the_page_are_up_to_date():
    """`python -m tests.library.test_wire_format` writes them anew."""
    page = PAGE.read_text()
    assert set(re.findall(r"<!-- wire:(\w+) -->", page)) == set(EXAMPLES)
    assert filled(page) == page


def test_the_reader_of_the_page_uses_nothing_of_the_project():
    source = Path(wire_reader.__file__).read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert imported <= {"hashlib", "json", "math", "collections", "itertools", "pathlib", "zstandard"}


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
