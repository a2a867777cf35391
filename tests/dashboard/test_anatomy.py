"""What a delta file says of itself is what was put into it."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from delta_weight_sync import codec
from delta_weight_sync.codec import Bits, Encoding, Patch
from delta_weight_sync.store import Bucket, open_bucket
from inference_space.dashboard.anatomy import FAR, cells, open_delta
from inference_space.dashboard.inside import inside
from inference_space.dashboard.library import Library
from tests.dashboard.real_run import RealRun
from tests.dashboard.test_long_run import Counted

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.experts.3.up_proj.weight",
    "model.layers.11.input_layernorm.weight",
)


def written(folder: Path, moves: dict[str, list[int]]) -> Path:
    old = {name: np.full((8, 64), 0x3C00, np.uint16) for name in moves}
    patches = [
        Patch(
            name, (8, 64), np.arange(len(ulps), dtype=np.int64) * 3, np.array(ulps, np.int16).view(np.uint16)
        )
        for name, ulps in moves.items()
    ]
    path = folder / "delta.safetensors"
    path.write_bytes(codec.encode(patches, lambda name: old[name], base=6, version=7))
    return path


def test_counts_by_layer_and_kind_and_distances(tmp_path: Path) -> None:
    moves = {NAMES[0]: [1, -1, 1, 9], NAMES[1]: [-2, -300], NAMES[2]: [1]}
    delta = open_delta(written(tmp_path, moves))
    assert (delta.base, delta.version, delta.encoding, delta.changes) == (6, 7, "fast", 7)
    assert cells(delta.tensors) == {
        ("embed_tokens", None): (4, 512),
        ("mlp.experts.*.up_proj", 0): (2, 512),
        ("input_layernorm", 11): (1, 512),
    }
    assert delta.ulps == {1: 3, -1: 1, FAR: 1, -FAR: 1, -2: 1}
    assert "57.1 %</b> moved to a neighbouring number" in inside(delta)


@pytest.mark.parametrize(("encoding", "mode"), [("small", "bands"), ("original", "original")])
def test_distances_that_need_the_old_weights_are_said_to(
    tmp_path: Path, encoding: Encoding, mode: str
) -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, (200, 200)).astype(np.float32)
    old = (weights.view(np.uint32) >> 16).astype(np.uint16)
    small = np.flatnonzero(np.abs(weights) < 0.001)  # as in training: the smaller, the likelier to change
    patch = Patch(NAMES[1], old.shape, small, np.ones(small.size, np.uint16))
    path = tmp_path / "delta.safetensors"
    path.write_bytes(codec.encode([patch], lambda _: old, base=6, version=7, encoding=encoding))
    delta = open_delta(path)
    assert (delta.ulps, delta.encoding, delta.changes) == (None, encoding, small.size)
    assert f"(mode {mode})" in delta.why
    assert delta.why in inside(delta)


def test_fifty_viewers_of_a_delta_cost_one_download(tmp_path: Path) -> None:
    bucket: Bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    run = RealRun(bucket)
    run.step()
    run.close()
    counted = Counted(bucket)
    library = Library(counted, lambda: "real", clock=lambda: 0.0)
    answers: list[object] = []
    viewers = [threading.Thread(target=lambda: answers.append(library.delta(1)[1])) for _ in range(50)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert len(answers) == 50
    assert counted.asked["fetch"] == counted.asked["get"] == counted.asked["list"] == 1
    old, new = (state(run, version) for version in (0, 1))
    moved = sum(int(np.count_nonzero(old[name] != new[name])) for name in old)
    assert library.delta(1)[1].changes == moved


def state(run: RealRun, version: int) -> dict[str, Bits]:
    with tempfile.TemporaryDirectory() as folder:
        return run.reader.checkout(run.reader.at(version), Path(folder))
