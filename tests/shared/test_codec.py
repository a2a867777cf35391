"""The delta codec: exact for every bit pattern, readable by anyone, and deaf to what is not a delta."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open

from shared import codec

bits = hnp.arrays(np.uint16, st.integers(0, 2000))


def delta_file(tmp: Path, patches: list[codec.Patch]) -> Path:
    path = tmp / "delta.safetensors"
    path.write_bytes(codec.encode(patches, base=3, version=4))
    return path


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    return tmp_path_factory.mktemp("codec")


@given(old=bits, seed=st.integers(0, 2**32), share=st.sampled_from([0, 1e-3, 0.01, 0.3, 1.0]))
def test_round_trip_is_exact_for_every_bit_pattern(tmp, old, seed, share):
    rng = np.random.default_rng(seed)
    new = np.where(rng.random(old.shape) < share, rng.integers(0, 65536, old.shape), old).astype(np.uint16)
    path = delta_file(tmp, [codec.diff("w", old, new)])
    live = old.copy()
    for patch in codec.decode(path).patches:
        codec.apply(patch, live)
    np.testing.assert_array_equal(live, new)


def test_every_bf16_pattern_can_become_every_other_nearby_one(tmp):
    old = np.arange(65536, dtype=np.uint16)
    for step in (1, 2, 32768, 65535):
        new = old + np.uint16(step)
        (patch,) = codec.decode(delta_file(tmp, [codec.diff("w", old, new)])).patches
        live = old.copy()
        codec.apply(patch, live)
        np.testing.assert_array_equal(live, new)


def test_distant_changes_in_a_large_tensor(tmp):
    old = np.zeros((2000, 1000), np.uint16)
    new = old.copy()
    new[0, 0] = new[0, 254] = new[0, 255] = new[1999, 999] = 7
    (patch,) = codec.decode(delta_file(tmp, [codec.diff("w", old, new)])).patches
    assert patch.index.tolist() == [0, 254, 255, 1_999_999]
    assert patch.shape == (2000, 1000)


@given(seed=st.integers(0, 2**32))
def test_merged_patches_do_what_both_do(seed):
    rng = np.random.default_rng(seed)
    states = [rng.integers(0, 3, 400).astype(np.uint16) for _ in range(3)]
    first, second = (codec.diff("w", a, b) for a, b in pairwise(states))
    merged = codec.merge([first], [second])
    expected = codec.diff("w", states[0], states[2])
    assert [p.index.tolist() for p in merged] == ([expected.index.tolist()] if expected.index.size else [])
    live = states[0].copy()
    for patch in merged:
        codec.apply(patch, live)
    np.testing.assert_array_equal(live, states[2])


def test_a_delta_explains_itself_to_safe_open(tmp):
    old = np.zeros((4, 4), np.uint16)
    new = old.copy()
    new[2] = 1
    with safe_open(delta_file(tmp, [codec.diff("layer.weight", old, new)]), framework="numpy") as file:
        metadata = file.metadata()
    assert (metadata["base"], metadata["version"]) == ("3", "4")
    assert json.loads(metadata["tensors"]) == [["layer.weight", [4, 4], 4]]


def test_an_rl_step_costs_about_one_byte_and_a_quarter_per_change(tmp):
    rng = np.random.default_rng(0)
    old = rng.integers(0, 65536, 2_000_000).astype(np.uint16)
    new = old.copy()
    changed = rng.random(old.size) < 0.01
    new[changed] += rng.choice(
        np.array([1, 65535, 2, 65534], np.uint16), changed.sum(), p=[0.45, 0.45, 0.05, 0.05]
    )
    size = delta_file(tmp, [codec.diff("w", old, new)]).stat().st_size
    assert size / changed.sum() < 1.35


def test_a_changed_shape_is_refused():
    with pytest.raises(codec.CodecError, match=r"w: shape changed from \(2,\) to \(3,\)"):
        codec.diff("w", np.zeros(2, np.uint16), np.zeros(3, np.uint16))


@given(data=st.data())
def test_a_damaged_file_is_refused_or_harmless(tmp, data):
    """Any bytes: an error by name, or patches that stay inside the shapes they claim. Never anything else."""
    old = np.arange(600, dtype=np.uint16)
    path = delta_file(tmp, [codec.diff("w", old, old + np.uint16(3))])
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        delta = codec.decode(path)
    except codec.CodecError:
        return
    for patch in delta.patches:
        assert np.all(np.diff(patch.index) > 0)
        assert patch.index[0] >= 0
        assert patch.index[-1] < np.prod(patch.shape)
