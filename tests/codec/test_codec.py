"""The delta codec: exact for every bit pattern, small, deaf to what is no delta."""

import threading
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from delta_weight_sync import codec
from delta_weight_sync.errors import CodecError
from tests.support.entropy import limits

ENCODINGS = ("fast", "small")
State = dict[str, np.ndarray]


def delta_file(tmp: Path, old: State, new: State, encoding: str = "fast", base: int = 3) -> Path:
    patches = [codec.diff(name, old[name], new[name]) for name in old]
    path = tmp / "delta.safetensors"
    path.write_bytes(codec.encode(patches, old.__getitem__, base=base, version=base + 1, encoding=encoding))
    return path


def shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: bits.shape for name, bits in state.items()}


def applied(path: Path, old: State) -> State:
    live = {name: bits.copy() for name, bits in old.items()}
    for patch in codec.Delta(path).patches(shapes(old), old.__getitem__):
        codec.apply(patch, live[patch.name])
    return live


def weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bf16 bits of weights as a network has them: normal, in many magnitudes."""
    return torch.from_numpy(rng.normal(0, 0.02, shape)).to(torch.bfloat16).view(torch.uint16).numpy()


def stepped(rng: np.random.Generator, old: np.ndarray, lr: float) -> np.ndarray:
    """A step of size `lr` of an fp32-master trainer: the smaller a weight, the likelier it moves."""
    as_float = torch.from_numpy(old).view(torch.bfloat16).double().numpy()
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(as_float), 1e-30))) - 7)
    master = as_float + rng.uniform(-0.5, 0.5, old.shape) * ulp + lr * rng.normal(0, 1, old.shape)
    return torch.from_numpy(master).to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    return tmp_path_factory.mktemp("codec")


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0, 1e-3, 0.01, 0.3, 0.7, 1.0]),
    small=st.booleans(),
    sizes=st.lists(st.sampled_from([0, 1, 3, 63, 64, 65, 500, 4096, 4100, 9000]), min_size=1, max_size=5),
)
def test_round_trip_is_exact_for_every_bit_pattern(tmp, encoding, seed, share, small, sizes):
    rng = np.random.default_rng(seed)
    old = {str(i): rng.integers(0, 65536, size).astype(np.uint16) for i, size in enumerate(sizes)}
    moves = [1, 2, 65535] if small else np.arange(1, 65536)
    new = {
        name: bits
        + np.where(rng.random(bits.shape) < share, rng.choice(moves, bits.shape), 0).astype(np.uint16)
        for name, bits in old.items()
    }
    np.testing.assert_equal(applied(delta_file(tmp, old, new, encoding), old), new)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_bf16_pattern_can_become_every_other_nearby_one(tmp, encoding):
    old = {"w": np.arange(65536, dtype=np.uint16)}
    for step in (1, 2, 32768, 65535):
        new = {"w": old["w"] + np.uint16(step)}
        np.testing.assert_array_equal(applied(delta_file(tmp, old, new, encoding), old)["w"], new["w"])


def test_each_kind_of_change_gets_the_mode_that_is_cheapest_for_it(tmp):
    rng = np.random.default_rng(0)
    sparse = {"w": weights(rng, 400, 500)}
    nudged = {"w": stepped(rng, sparse["w"], 3e-7)}
    rows = {"w": sparse["w"].copy()}
    rows["w"][[3, 77, 300]] += np.uint16(1)
    everything = {"w": sparse["w"] + rng.choice(np.array([1, 65535], np.uint16), (400, 500))}
    other = {"w": weights(rng, 400, 500)}
    for encoding, new, expected in (
        ("fast", nudged, {"gaps"}),
        ("small", nudged, {"bands"}),
        ("fast", rows, {"mask"}),
        ("fast", everything, {"gaps"}),
        ("fast", other, {"raw"}),
        ("fast", sparse, set()),
    ):
        delta = codec.Delta(delta_file(tmp, sparse, new, encoding))
        assert {group.mode for group in delta.groups} == expected


@pytest.mark.long
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_positions_beyond_31_bits(tmp, encoding):
    """A tensor of more than 2^31 elements; its zero pages cost no memory."""
    old = {"w": np.zeros(2**31 + 100, np.uint16)}
    index = np.sort(np.random.default_rng(4).choice(2**31 + 100, 1000, replace=False))
    patch = codec.Patch("w", old["w"].shape, index, np.full(1000, 65535, np.uint16))
    path = tmp / "large.safetensors"
    path.write_bytes(codec.encode([patch], old.__getitem__, base=0, version=1, encoding=encoding))
    (back,) = codec.Delta(path).patches(shapes(old), old.__getitem__)
    np.testing.assert_array_equal(back.index, index)
    np.testing.assert_array_equal(back.ulps, patch.ulps)


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
    for patch in merged:
        codec.apply(codec.inverse(patch), live)
    np.testing.assert_array_equal(live, states[0])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_chain_of_deltas_is_one_patch_per_tensor(tmp, encoding):
    """The reader of a later delta needs the weights as the earlier ones left them."""
    rng = np.random.default_rng(1)
    states = [{"a": weights(rng, 300, 100), "b": weights(rng, 77)}]
    for _ in range(3):
        states.append({name: stepped(rng, bits, 1e-6) for name, bits in states[-1].items()})
    deltas = []
    for number, (old, new) in enumerate(pairwise(states)):
        path = delta_file(tmp, old, new, encoding, base=number)
        deltas.append(codec.Delta(path.rename(tmp / f"{number}.{encoding}.safetensors")))
    live = states[0]
    (merged,) = codec.merged(deltas, shapes(live), live.__getitem__)
    for patch in merged.patches(shapes(live)):
        codec.apply(patch, live[patch.name])
    np.testing.assert_equal(live, states[-1])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_threads_write_the_same_bytes_and_read_the_same_changes(tmp, encoding, monkeypatch):
    rng = np.random.default_rng(0)
    askers = set()
    old = {f"{i}.weight": weights(rng, 40, 50) for i in range(30)}
    new = {name: stepped(rng, bits, 1e-5) for name, bits in old.items()}
    new["7.weight"] = old["7.weight"] ^ 1  # of another mode than its neighbours

    def bits(name: str) -> np.ndarray:
        askers.add(threading.current_thread())
        return old[name]

    def coded() -> tuple[bytes, list[codec.Patch]]:
        patches = [codec.diff(name, old[name], new[name]) for name in old]
        path = tmp / "threads.safetensors"
        path.write_bytes(codec.encode(patches, bits, base=3, version=4, encoding=encoding))
        assert len(codec.Delta(path).groups) > 10
        return path.read_bytes(), list(codec.Delta(path).patches(shapes(old), bits))

    monkeypatch.setattr("delta_weight_sync.codec.groups.GROUP_ELEMENTS", 4000)
    found = []
    for threads in (1, 4):
        monkeypatch.setattr("delta_weight_sync.util.THREADS", threads)
        found.append(coded())
    (alone, changes), (together, same) = found
    assert together == alone
    np.testing.assert_equal([*map(astuple, changes)], [*map(astuple, same)])
    assert askers == {threading.current_thread()}, "it may hold a lock, and workers must ask in one order"


def test_sizes_are_near_the_entropy_of_the_changes(tmp):
    """`fast` within 3 % of the limit of independent changes, `small` within 6 % of that given exponents."""
    rng = np.random.default_rng(3)
    old = {"w": weights(rng, 4_000_000)}
    new = {"w": stepped(rng, old["w"], 2.2e-7)}
    patch = codec.diff("w", old["w"], new["w"])
    assert 0.009 < patch.index.size / old["w"].size < 0.013
    bound = limits(old, [patch])
    for encoding, most in (("fast", 1.03 * bound.independent), ("small", 1.06 * bound.by_exponent)):
        assert delta_file(tmp, old, new, encoding).stat().st_size < most * patch.index.size


def test_encoding_looks_at_each_of_many_tensors_a_few_times(monkeypatch):
    """A mixture of experts has 20,000 of them."""
    looked = []
    numel = codec.Patch.numel.fget
    monkeypatch.setattr(codec.Patch, "numel", property(lambda patch: looked.append(patch) or numel(patch)))
    old = {f"expert {i}": np.zeros(8, np.uint16) for i in range(2000)}
    patches = [codec.Patch(name, (8,), np.array([3]), np.array([1], np.uint16)) for name in old]
    codec.encode(patches, old.__getitem__, base=0, version=1, encoding="fast")
    assert len(looked) <= 10 * len(patches)


def test_a_changed_shape_is_refused():
    with pytest.raises(CodecError, match=r"w: shape changed from \(2,\) to \(3,\)"):
        codec.diff("w", np.zeros(2, np.uint16), np.zeros(3, np.uint16))


def test_a_delta_of_another_model_is_refused_before_anything_is_read(tmp):
    old = {"w": np.zeros((4, 4), np.uint16)}
    delta = codec.Delta(delta_file(tmp, old, {"w": old["w"] + np.uint16(1)}))
    for model in ({}, {"w": (16,)}, {"v": (4, 4)}):
        with pytest.raises(CodecError, match=r"changes w \[4, 4\], which this model does not have"):
            next(delta.patches(model, old.__getitem__))


def test_strided_arrays_are_compared_where_their_elements_are():
    old = np.arange(400, dtype=np.uint16)
    new = old.copy()
    new[[3, 250]] += 1
    wide = np.zeros(800, np.uint16)
    wide[::2] = new
    index, ulps = codec.diff_flat(old, wide[::2])
    assert (index.tolist(), ulps.tolist()) == ([3, 250], [1, 1])
