"""The benchmark's arithmetic: limits, sizes of competitors, percentiles, and the marked places of pages."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load

from bench import competitors, deltas, original, readme, results, tables, timing
from bench.change import Change
from bench.shapes import qwen_shapes
from delta_weight_sync import codec
from docs.run import pages
from tests.support.entropy import limits as entropy_limits


def change(share: float, numel: int = 1 << 18, seed: int = 0) -> Change:
    """Independent changes by one unit up or down."""
    rng = np.random.default_rng(seed)
    old = torch.from_numpy(rng.normal(0, 0.02, (64, numel // 64))).bfloat16().view(torch.uint16).numpy()
    moves = rng.choice(np.array([1, 65535], np.uint16), old.shape) * (rng.random(old.shape) < share)
    return Change("model", "trainer", 1e-5, {"w": old}, [codec.diff("w", old, old + moves.astype(np.uint16))])


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_limit_of_independent_changes_is_the_entropy_of_a_coin_and_a_sign(share):
    measured = change(share)
    p = measured.changed / measured.elements
    per_change = (-(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p + 1) / 8
    limits = entropy_limits(measured.old, measured.patches)
    assert limits.independent == pytest.approx(per_change, rel=1e-3)
    assert limits.by_exponent <= limits.independent
    assert limits.by_exponent == pytest.approx(per_change, rel=0.02), "the exponent tells nothing here"


def test_the_limit_by_exponent_uses_what_the_exponent_tells():
    rng = np.random.default_rng(1)
    old = rng.choice(np.array([0x3C00, 0x3E00], np.uint16), 1 << 18)  # two octaves, of which one moves
    new = old + ((old == 0x3C00) & (rng.random(old.size) < 0.5)).astype(np.uint16)
    limits = entropy_limits({"w": old}, [codec.diff("w", old, new)])
    assert limits.by_exponent == pytest.approx(2 / 8, rel=1e-2), "half of one octave: a bit for each of it"
    assert limits.independent == pytest.approx(4 * 0.8113 / 8, rel=1e-2), "a quarter of all"


@pytest.mark.full
def test_no_coder_is_below_its_limit_and_all_hold_the_same_changes():
    measured = change(0.01)
    limits = entropy_limits(measured.old, measured.patches)
    sizes = {encoding: len(measured.encode(encoding)) / measured.changed for encoding in ("fast", "small")}
    assert limits.independent < sizes["fast"] < competitors.gap_zstd(measured) / measured.changed
    assert sizes["fast"] < competitors.bitmask_zstd(measured) / measured.changed
    assert limits.by_exponent < sizes["small"]


def test_gaps_beyond_16_bits_are_there_in_full():
    gaps = np.array([0, 65534, 65535, 65536, 400_000, 0, 131_070])
    codes = competitors.gap_codes(gaps)
    whole = np.flatnonzero(codes < competitors.FAR)
    assert np.diff(np.cumsum(codes.astype(np.int64))[whole], prepend=0).tolist() == gaps.tolist()


def test_an_adapter_has_two_matrices_per_layer():
    shapes = {"model.layers.0.self_attn.q_proj.weight": (2048, 1024), "model.norm.weight": (1024,)}
    whole = competitors.adapter(shapes, 16, ["q_proj"])
    assert whole == pytest.approx(4 * 16 * (2048 + 1024), rel=0.01)
    assert competitors.adapter(shapes, 16, ["q_proj"], torch.bfloat16) < whole


def test_the_shapes_of_qwen3():
    shapes = qwen_shapes()
    assert len(shapes) == 310
    assert sum(math.prod(shape) for shape in shapes.values()) == 596_049_920


def test_the_learning_rate_that_changes_a_given_share():
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(1 << 16)).bfloat16()
    update = deltas.Update(torch.randn(1 << 16), torch.randn(1 << 16))
    for step in (deltas.late, deltas.grid, deltas.bf16):
        lr = deltas.rate_for(0.05, step, weights, update)
        assert deltas.share_of_changes(step, weights, update, lr) == pytest.approx(0.05, rel=0.1)


def test_master_weights_of_a_late_step_round_to_bf16_weights_of_the_same_octave():
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(1 << 16)).bfloat16()
    old, new = deltas.late(weights, deltas.Update(torch.zeros(1 << 16), torch.zeros(1 << 16)), 1.0)
    assert torch.equal(old, new), "no update, no change"
    assert (old.view(torch.int16) - weights.view(torch.int16)).abs().max() <= 1


def test_competitors_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []
    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    rounds = timing.take_turns(works, 2, before_round=lambda: order.append("|"))
    assert "".join(order) == "|ab|ab|ab"
    assert {name: len(seconds) for name, seconds in rounds.items()} == {"a": 2, "b": 2}
    assert timing.ratio([4.0, 9.0], [2.0, 3.0]) == {"best": 2.0, "median": 2.5}
    assert timing.summary([2.0, 4.0], int(8e9))["best_gb_s"] == 4.0


def test_percentiles_are_values_that_were_measured():
    from bench.live import percentiles

    assert percentiles([n / 1000 for n in range(1, 101)]) == {"p50": 50.0, "p99": 99.0}
    assert percentiles([0.007]) == {"p50": 7.0, "p99": 7.0}


def test_a_rival_that_was_not_measured_has_no_figures():
    assert tables.rival({}) == "Beside ModelExpress: unmeasured (not yet)."
    speeds = {way: {"median_gb_s": speed} for way, speed in (("modelexpress", 1), ("fast", 4), ("small", 2))}
    row = {"model": "m", "trainer": "t", "share": 0.01, "out": speeds, "in": speeds}
    sets = [row | {"per_change": {"modelexpress": 2.65, "fast": 1.21, "small": 0.86}}]
    text = tables.rival({"rival": {"sets": sets}})
    assert "| **2.650** | 1.00 | 1.00 | **1.210** | 4.00 | 4.00 | **0.860** | 2.00 | 2.00 |" in text


def test_marked_places_of_the_readme_are_written_and_nothing_else():
    old, empty, new = map("<!-- bench:size -->\n{}<!-- /bench -->\n".format, ("old\n", "", "new\n"))
    text = f"before\n{old}between\n{empty}"
    filled = readme.fill(text, {}, {"size": lambda results: "new"})
    assert filled == f"before\n{new}between\n{new}"
    assert readme.fill(filled, {}, {"size": lambda results: "new"}) == filled
    with pytest.raises(ValueError, match="no table 'size'"):
        readme.fill(text, {}, {})


def test_measured_figures_are_those_of_the_benchmark():
    """`python -m bench.readme` writes the marked places again."""
    for path, name in pages():
        assert readme.fill(path.read_text(), results.read()) == path.read_text(), f"{name} has older figures"


def test_patches_survive_the_file(tmp_path):
    measured = change(0.02)
    (tmp_path / "delta").write_bytes(original.write(measured.patches, measured.old.__getitem__))
    (read,) = original.read(tmp_path / "delta", measured.shapes, measured.old.__getitem__)
    np.testing.assert_array_equal(read.index, measured.patches[0].index)
    np.testing.assert_array_equal(read.ulps, measured.patches[0].ulps)


def test_tensors_arrive_on_the_other_side(tmp_path):
    measured = change(0.02)
    before = {"w": torch.from_numpy(measured.old["w"].copy()).view(torch.bfloat16)}
    snapshot = {"w": before["w"].clone()}
    replica = {"w": before["w"].clone()}
    measured.taken()
    live = torch.from_numpy(measured.old["w"]).view(torch.bfloat16)
    file = original.publish(snapshot, [("w", live.float())])
    assert set(load(file)) == {"w.indices", "w.values"}
    (tmp_path / "delta").write_bytes(file)
    original.receive(tmp_path / "delta", replica)
    for tensor in (snapshot["w"], replica["w"]):
        assert torch.equal(tensor.view(torch.int16), live.view(torch.int16))
