"""docs/wire-format.md is enough: a reader written from it alone gets what the project's own reader gets."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests.library import wire_examples, wire_reader
from tests.support.published_run import write_run
from tests.support.real_run import RUN, Drifting

LEVELS = ("fast", "small")
WHERE = ("anywhere", "small", "rows", "replaced")
State = dict[str, np.ndarray]


def encoded(old: State, new: State, encoding: str) -> bytes:
    patches = [codec.diff(name, old[name], new[name]) for name in old]
    return codec.encode(patches, old.__getitem__, base=3, version=4, encoding=encoding)


def by_the_page(data: bytes, old: State) -> State:
    weights = {name: bits.reshape(-1).tolist() for name, bits in old.items()}
    wire_reader.apply_delta(data, weights)
    return {name: np.array(bits, np.uint16).reshape(old[name].shape) for name, bits in weights.items()}


def by_the_project(data: bytes, old: State, folder: Path) -> State:
    path, live = folder / "delta", {name: bits.copy() for name, bits in old.items()}
    path.write_bytes(data)
    shapes = {name: bits.shape for name, bits in old.items()}
    for patch in codec.Delta(path).patches(shapes, old.__getitem__):
        codec.apply(patch, live[patch.name])
    return live


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wire")


tensors = st.lists(st.sampled_from([1, 3, 63, 64, 65, 130, 400]), min_size=1, max_size=4)


@pytest.mark.parametrize("encoding", LEVELS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    sizes=tensors,
    share=st.sampled_from([0.01, 0.1, 0.4, 0.6, 0.9, 1.0]),
    steps=st.sampled_from(["up", "one", "few", "any"]),
    where=st.sampled_from(WHERE),
)
def test_the_page_reads_what_the_project_writes(folder, encoding, seed, sizes, share, steps, where):
    rng = np.random.default_rng(seed)
    old = {f"layer.{i}": _weights(rng, size) for i, size in enumerate(sizes)}
    new = {name: _stepped(rng, bits, share, steps, where) for name, bits in old.items()}
    data = encoded(old, new, encoding)
    for read in (by_the_page(data, old), by_the_project(data, old, folder)):
        for name, bits in new.items():
            np.testing.assert_array_equal(read[name], bits)


def _weights(rng: np.random.Generator, size: int) -> np.ndarray:
    """Any bits, or such as a network has: then the smaller ones change more often."""
    if rng.random() < 0.5:
        return rng.integers(0, 65536, size).astype(np.uint16)
    return _network(rng, size)


def _network(rng: np.random.Generator, size: int) -> np.ndarray:
    return (rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _stepped(rng: np.random.Generator, bits: np.ndarray, share: float, steps: str, where: str) -> np.ndarray:
    if where == "replaced":
        return _network(rng, bits.size)
    if where == "rows":
        hit = np.arange(bits.size) // 32 % 3 == rng.integers(0, 3)
    else:
        rare = (where == "small") & ((bits >> 7 & 0xFF) >= 0x78)
        hit = rng.random(bits.size) < np.where(rare, share / 20, share)
    moves = {"up": [1], "one": [1, 65535], "few": [1, 1, 1, 65535, 2, 65530], "any": np.arange(1, 65536)}
    return bits + np.where(hit, rng.choice(moves[steps], bits.size), 0).astype(np.uint16)


def test_such_deltas_are_in_every_mode():
    """The test above means what it says only if it meets all of them."""
    rng, found = np.random.default_rng(0), set()
    for encoding in ("fast", "small"):
        for share, steps, where in itertools.product((0.1, 1.0), ("up", "one", "any"), WHERE):
            old = {"w": _weights(rng, 400)}
            data = encoded(old, {"w": _stepped(rng, old["w"], share, steps, where)}, encoding)
            header, _ = wire_reader.safetensors(data)
            found |= set(re.findall(r'"mode": "(\w+)"', header["__metadata__"]["groups"]))
    assert found == {"gaps", "bands", "mask", "dense", "raw"}


def test_the_page_reads_a_run_from_head_to_weights(tmp_path):
    """HEAD, its seal, manifest, anchor, deltas, digest: as a reader in another language would."""
    digests = write_run((tmp_path / "bucket").as_uri(), tmp_path / "base", 4)
    manifest, weights = wire_reader.newest(tmp_path / "bucket", "test")
    assert (manifest["version"], manifest["digest"]) == (3, digests[-1])
    reader = RunReader(open_bucket((tmp_path / "bucket").as_uri()), "test")
    reader.checkout(reader.manifest(), tmp_path / "checkout")
    expected = {name: bits.reshape(-1).tolist() for name, bits in read_bits(tmp_path / "checkout")}
    assert weights == expected


def test_the_page_is_enough_to_take_jumps(tmp_path):
    run = Drifting(tmp_path / "bucket", drift=1e-6)
    for _ in range(10):
        run.step()
        run.settle()
    run.close()
    manifest, _ = wire_reader.newest(run.folder, RUN)
    assert [(ref["base"], ref["version"]) for ref in wire_reader.way(manifest)] == [(0, 8), (8, 9), (9, 10)]


def test_the_page_and_its_examples_name_the_formats_that_the_reader_checks():
    page = wire_examples.PAGE.read_text()
    formats = [wire_reader.RECORD_FORMAT, wire_reader.DELTA_FORMAT]
    assert re.findall(r"^\| `format` \|.*`(delta-weight-sync\S+)` \|$", page, re.MULTILINE) == formats
    unwrapped = page.replace("\n  ", "")
    assert set(re.findall(r'"format":"([^"]+)"', unwrapped)) == set(formats)


def test_the_examples_of_the_page_are_up_to_date():
    """`python -m tests.library.wire_examples` writes them anew."""
    page = wire_examples.PAGE.read_text()
    assert set(re.findall(r"<!-- wire:(\w+) -->", page)) == set(wire_examples.EXAMPLES)
    assert wire_examples.filled(page) == page


def test_the_reader_of_the_page_uses_nothing_of_the_project():
    source = Path(wire_reader.__file__).read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert imported <= {"hashlib", "json", "math", "collections", "itertools", "pathlib", "zstandard"}
