"""The views of a delta file and of a listing show their contents."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from delta_weight_sync import codec
from delta_weight_sync.codec import Patch
from delta_weight_sync.store import ObjectInfo
from inference_space.dashboard.views import FAR, PAGE, inside, listing, open_delta, tensor_map

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.experts.3.up_proj.weight",
    "model.layers.11.input_layernorm.weight",
)


def test_counts_by_layer_and_kind_and_distances(tmp_path: Path) -> None:
    patches = []
    for name, ulps in zip(NAMES, ([1, -1, 1, 9], [-2, -300], [1]), strict=True):
        positions, moves = np.arange(len(ulps), dtype=np.int64) * 3, np.array(ulps, np.int16)
        patches.append(Patch(name, (8, 64), positions, moves.view(np.uint16)))
    path = tmp_path / "delta.safetensors"
    old = np.full((8, 64), 0x3C00, np.uint16)
    path.write_bytes(codec.encode(patches, lambda _: old, base=6, version=7))
    delta = open_delta(path)
    assert (delta.base, delta.version, delta.encoding, delta.changes) == (6, 7, "fast", 7)
    assert tensor_map(delta.tensors) == {
        ("embed_tokens", None): (4, 512),
        ("mlp.experts.*.up_proj", 0): (2, 512),
        ("input_layernorm", 11): (1, 512),
    }
    assert delta.ulps == {1: 3, -1: 1, FAR: 1, -FAR: 1, -2: 1}
    assert "57.1 %</b> moved to a neighbouring number" in inside(delta)


def test_distances_that_need_the_old_weights_are_explained(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, (200, 200)).astype(np.float32)
    old = (weights.view(np.uint32) >> 16).astype(np.uint16)
    small = np.flatnonzero(np.abs(weights) < 0.001)  # as in training: the smaller, the likelier to change
    patch = Patch(NAMES[1], old.shape, small, np.ones(small.size, np.uint16))
    path = tmp_path / "delta.safetensors"
    path.write_bytes(codec.encode([patch], lambda _: old, base=6, version=7, encoding="small"))
    delta = open_delta(path)
    assert (delta.ulps, delta.encoding, delta.changes) == (None, "small", small.size)
    assert "(mode bands)" in delta.why
    assert delta.why in inside(delta)


def test_a_long_run_is_listed_page_by_page() -> None:
    objects = [
        ObjectInfo(f"runs/wordle/{kind}/{version:08d}.t1-5ad0b5d1{end}", 1000, "")
        for kind, end in (("deltas", ".safetensors"), ("manifests", ".json"))
        for version in range(1, 10_001)
    ]
    newest = listing(objects, "wordle", 0, served=True)
    oldest = listing(objects, "wordle", 10_000 // PAGE - 1, served=True)
    assert len(newest) < 40_000
    assert "<b>20 MB</b> in 20000 objects" in newest
    assert "00010000.t1-5ad0b5d1.safetensors" in newest
    assert "00000001.t1-5ad0b5d1.safetensors" in oldest
