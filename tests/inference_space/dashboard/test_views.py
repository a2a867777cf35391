"""The views of a delta file and of a listing: their contents, and what a hostile delta may cost."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save

from delta_weight_sync import codec
from delta_weight_sync.codec import Patch
from delta_weight_sync.codec._file import DELTA_FORMAT, MAX_HEADER
from delta_weight_sync.errors import CodecError
from delta_weight_sync.store import ObjectInfo
from inference_space.dashboard.views import (
    FAR,
    MAX_TENSORS,
    PAGE,
    OpenedDelta,
    inside,
    listing,
    open_delta,
    opened,
    tensor_map,
)
from tests.support.records import manifest_of

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.experts.3.up_proj.weight",
    "model.layers.11.input_layernorm.weight",
)


def test_counts_by_layer_and_kind_and_distances(tmp_path: Path) -> None:
    patches = []
    for name, ulps in zip(NAMES, ([1, -1, 1, 9], [-2, -300], [1]), strict=True):
        positions = np.arange(len(ulps), dtype=np.int64) * 3
        moves = np.array(ulps, np.int16)
        patches.append(Patch(name, (8, 64), positions, moves.view(np.uint16)))
    path = tmp_path / "delta.safetensors"
    old = np.full((8, 64), 0x3C00, np.uint16)
    path.write_bytes(codec.encode(patches, lambda _: old, base=6, version=7))
    delta = open_delta([path])
    assert (delta.base, delta.version, delta.encoding, delta.changes) == (6, 7, "fast", 7)
    assert tensor_map(delta.tensors) == {
        ("embed_tokens", None): (4, 512),
        ("mlp.experts.*.up_proj", 0): (2, 512),
        ("input_layernorm", 11): (1, 512),
    }
    assert delta.ulps == {1: 3, -1: 1, FAR: 1, -FAR: 1, -2: 1}
    assert "57.1 %</b> moved to a neighbouring number" in inside(delta)


def test_a_version_without_changes_says_so(tmp_path: Path) -> None:
    path = tmp_path / "delta.safetensors"
    path.write_bytes(codec.encode([], lambda _: np.empty(0, np.uint16), base=6, version=7))
    shown = inside(open_delta([path]))
    assert "This version changed no weight." in shown
    assert "How far weights moved" not in shown


def test_distances_that_need_the_old_weights_are_explained(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, (200, 200)).astype(np.float32)
    old = (weights.view(np.uint32) >> 16).astype(np.uint16)
    small = np.flatnonzero(np.abs(weights) < 0.001)  # as in training: the smaller, the likelier to change
    patch = Patch(NAMES[1], old.shape, small, np.ones(small.size, np.uint16))
    path = tmp_path / "delta.safetensors"
    path.write_bytes(codec.encode([patch], lambda _: old, base=6, version=7, encoding="small"))
    delta = open_delta([path])
    assert (delta.ulps, delta.encoding, delta.changes) == (None, "small", small.size)
    assert replace(delta, modes=("raw", "mask")).encoding == "fast or small", "both use these modes"
    assert "(mode bands)" in delta.why
    assert delta.why in inside(delta)


def test_a_long_run_is_listed_page_by_page() -> None:
    objects = [
        ObjectInfo(f"runs/wordle/{kind}/{version:08d}.t1-5ad0b5d1{end}", 1000, "")
        for kind, end in (("deltas", ".safetensors"), ("manifests", ".json"))
        for version in range(1, 10_001)
    ]
    newest = listing(objects, "wordle", 0)
    oldest = listing(objects, "wordle", 10_000 // PAGE - 1)
    assert len(newest) < 40_000
    assert "<b>20 MB</b> in 20000 objects" in newest
    assert "00010000.t1-5ad0b5d1.safetensors" in newest
    assert "00000001.t1-5ad0b5d1.safetensors" in oldest
    assert "page 400 of 400" in oldest


MEMORY = 64 << 20  # bytes that a look at a delta may take
ELEMENTS = 1 << 25


def frame(byte: int, count: int) -> np.ndarray:
    """A byte repeated, through zstd, without all of it ever being there."""
    out = zstandard.ZstdCompressor().compressobj(size=count)
    parts = [out.compress(bytes([byte]) * (1 << 20)) for _ in range(count >> 20)]
    return np.frombuffer(b"".join([*parts, out.flush()]), np.uint8)


def claiming(folder: Path, tensors: list[object], mode: str = "bands", **streams: np.ndarray) -> Path:
    """A delta that lists `tensors`, all in one group; nothing need be behind them."""
    metadata = {"tensors": json.dumps(tensors), "groups": json.dumps([{"mode": mode}])}
    metadata |= {"format": DELTA_FORMAT, "base": "0", "version": "1"}
    path = folder / "delta"
    path.write_bytes(save(streams or {"x": np.zeros(1, np.uint8)}, metadata))
    return path


def peak(path: Path) -> tuple[OpenedDelta, int]:
    tracemalloc.start()
    try:
        return open_delta([path]), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.finding(3)
def test_a_bomb_is_listed_and_not_unpacked(tmp_path: Path) -> None:
    streams = {"0.low": frame(2, ELEMENTS), "0.high": frame(0, ELEMENTS)}
    path = claiming(tmp_path, [["w", [ELEMENTS], ELEMENTS, 0]], "dense", **streams)
    assert path.stat().st_size < 1 << 20
    delta, allocated = peak(path)
    assert delta.changes == ELEMENTS
    assert allocated < MEMORY
    assert "too large to be decoded" in inside(delta)


@pytest.mark.full
@pytest.mark.finding(3)
def test_a_table_alone_is_bounded(tmp_path: Path) -> None:
    names = (f"model.layers.{layer}.kind{kind}" for layer in range(300) for kind in range(200))
    path = claiming(tmp_path, [[n, [1], 1, 0] for n in names])
    delta, allocated = peak(path)
    assert allocated < MEMORY
    assert len(inside(delta)) < 10_000, "no map of 60,000 cells"
    page = opened(manifest_of(1, 0), delta, served=True)
    assert page.count("<tr>") == MAX_TENSORS + 1
    assert "and 58000 more tensors" in page


@pytest.mark.finding(3)
def test_a_longer_table_is_not_read_at_all(tmp_path: Path) -> None:
    """It takes twenty times its bytes."""
    path = claiming(tmp_path, [["w" * 2200 + str(n), [1], 1, 0] for n in range(8000)], "dense")
    assert path.stat().st_size > MAX_HEADER
    with pytest.raises(CodecError, match="not opened here"):
        open_delta([path])
    with pytest.raises(CodecError, match="its header claims"):
        codec.Delta(path)


@pytest.mark.finding(3)
@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (["w", [4], 1, 7], "groups"),  # a group that is not there
        (["w", [0, 4], 0, 0], "changes"),
        (["w", [4], 5, 0], "changes"),
        (["w", [10**4000] * 200, 1, 0], "less than or equal"),  # hours of arithmetic, and digits to print
        (["w", [1] * 100_000, 1, 0], "at most 32"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, tensor: list[object], complaint: str) -> None:
    path = claiming(tmp_path, [tensor], "dense")
    with pytest.raises(CodecError, match=complaint):
        open_delta([path])


@pytest.mark.finding(3)
def test_a_layer_of_thousands_of_digits_is_a_name_and_names_fill_no_page(tmp_path: Path) -> None:
    names = [f"model.layers.{'9' * 5000}.x", *(f"w{n}" for n in range(60_000))]
    page = inside(open_delta([claiming(tmp_path, [[n, [1], 1, 0] for n in names])]))
    assert "outside the layers" in page
    assert len(page) < 50_000
