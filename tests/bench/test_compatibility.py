"""The command that fills the page on compatibility notices each difference, and counts it."""

import copy

import pytest
import torch

from bench import compatibility, published
from bench.published import WAYS, different, same
from bench.reloaded import Difference, compare
from tests.support import tiny

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"  # a buffer in float32
MODEL, _, _, MASTERS, FROZEN = (way.column for way in WAYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    tiny.write_base(tiny.ARCHITECTURES["deepseek_v3"], folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """A tiny mixture of experts, published in each way."""
    return {way.column: published.Run(way, folder / "base", folder / f"{n}") for n, way in enumerate(WAYS)}


@pytest.fixture
def base(folder):
    return tiny.load(folder / "base")


def test_each_way_leads_to_a_new_version_that_is_the_trainers(runs, base):
    for run in runs.values():
        assert not run.wrong
        assert different(base, tiny.load(run.newest))


def test_frozen_tensors_stay_and_all_others_change(runs, base):
    pairs = zip(base.parameters(), tiny.load(runs[FROZEN].newest).parameters(), strict=True)
    assert [same(*pair) for pair in pairs] == [number % 3 == 0 for number in range(len([*base.parameters()]))]


def test_only_the_model_itself_gives_its_buffers(runs, base):
    bias = base.state_dict()[BIAS]
    assert bias.dtype == torch.float32
    assert len(bias.unique()) == len(bias)
    moved = [way for way, run in runs.items() if not same(bias, tiny.load(run.newest).state_dict()[BIAS])]
    assert moved == [MODEL]


def test_changes_of_float32_masters_are_no_whole_steps_of_bf16(runs, base):
    masters = base.float().state_dict()
    loaded = tiny.load(runs[MASTERS].newest)
    changed = sum(int((masters[name] != tensor).sum()) for name, tensor in loaded.state_dict().items())
    whole = sum(tensor.numel() for tensor in base.parameters())
    assert 0.15 * whole < changed < 0.2 * whole


def test_one_bit_of_one_element_is_a_difference(folder, base):
    trained = tiny.load(folder / "base")
    assert not different(trained, base)
    trained.state_dict()[BIAS].view(torch.int32)[0] ^= 1
    assert different(trained, base) == BIAS


def test_different_elements_are_counted_wherever_a_module_keeps_them():
    one = torch.nn.Linear(4, 3)
    one.kept = [torch.zeros(5)]
    other = copy.deepcopy(one)
    assert compare(one, other) == Difference()
    other.weight.data[1, 2] += 1
    other.kept[0] += 1
    assert compare(one, other) == Difference(2, 6, "weight")


def test_the_command_replaces_only_what_is_between_its_marks():
    page = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert compatibility._filled(page, {"x": "new\nlines"}) == "a\n<!-- x -->\nnew\nlines\n<!-- /x -->\nb\n"
