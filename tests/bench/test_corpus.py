"""`python -m bench.research.corpus` measures what happened to the weights of a run."""

import json
import re
import time

import numpy as np
import pytest
import torch

from bench.research import corpus, measure
from delta_weight_sync import open_run
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.codec import ULP_CLASSES, Patch, count_ulps
from delta_weight_sync.runlog import StepEvent
from tests.support.real_run import Drifting

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that logged its learning rate with each step but the first."""
    run = Drifting(tmp_path_factory.mktemp("runs") / "bucket")
    for step in range(1, STEPS + 1):
        if step > 1:
            metrics = {"learning_rate": step * 1e-5}
            run.log.append(StepEvent(t=time.time(), step=step, reward=0.0, metrics=metrics))
        run.step()
    run.close()
    return run


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory):
    """The folder of the data set."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus.main([run.url, "--trainer", "fp32", "--into", str(folder)])
    return folder


def rows(folder):
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(run, version, folder):
    reader = open_run(run.url)
    reader.checkout(reader.manifest(version), folder)
    return {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in read_bits(folder)}


def test_every_version_has_a_row_that_says_what_was_published(run, measured):
    manifests = {manifest.version: manifest for manifest in open_run(run.url).versions()}
    assert [row["version"] for row in rows(measured)] == [*range(1, STEPS + 1)]
    for row in rows(measured):
        manifest = manifests[row["version"]]
        assert (row["changed"], row["weights"]) == (manifest.changed, manifest.total)
        assert sum(row["ulps"].values()) == manifest.changed
        assert sum(kind["changed"] for kind in row["kinds"].values()) == manifest.changed
        assert sum(kind["weights"] for kind in row["kinds"].values()) == manifest.total
        assert sum(row["bytes"]["fast"].values()) == row["published_bytes"] == manifest.deltas[-1].size
        assert 0 < row["limits"]["by_exponent"] <= row["limits"]["independent"]
        assert row["limits"]["by_exponent"] * row["changed"] < sum(row["bytes"]["small"].values())


def test_the_learning_rate_is_the_one_that_was_logged_last(measured):
    rates = [None, *(pytest.approx(step * 1e-5) for step in range(2, STEPS + 1))]
    assert [row["lr"] for row in rows(measured)] == rates


def test_the_share_in_fp8_is_that_of_torchs_own_fp8(run, measured, tmp_path):
    first, before, after = (weights(run, version, tmp_path / str(version)) for version in (0, 1, 2))
    seen = 0
    for name, start in first.items():
        scale = 2.0 ** np.floor(np.log2(448 / start.abs().max().item()))
        old, new = ((part[name].float() * scale).to(torch.float8_e4m3fn) for part in (before, after))
        seen += int((old.view(torch.uint8) != new.view(torch.uint8)).sum())
    row = rows(measured)[1]
    assert 0 < seen < row["changed"]
    assert row["density_fp8"] == pytest.approx(seen / row["weights"], abs=1e-8)


def test_every_number_is_rounded_to_fp8_as_torch_rounds():
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = torch.from_numpy(bits).view(torch.bfloat16).float()
    bits = bits[(numbers.abs() <= 448).numpy()]
    numbers = torch.from_numpy(bits).view(torch.bfloat16).float()
    rounded = torch.from_numpy(measure.to_fp8(bits, 0)).view(torch.float32)
    assert torch.equal(rounded.view(torch.int32), numbers.to(torch.float8_e4m3fn).float().view(torch.int32))


def test_another_run_joins_the_folder_and_the_card_sums_up_both(run, measured, tmp_path):
    for name in ("first", "second"):
        other = Drifting(tmp_path / name, seed=len(name))
        other.step()
        other.close()
        for _ in range(2):  # the second time changes nothing
            corpus.main([other.url, "--trainer", "bf16", "--lr", "1e-6", "--into", str(tmp_path / "all")])
    assert len([*(tmp_path / "all").glob("*.jsonl")]) == 2
    card = (tmp_path / "all" / "README.md").read_text()
    assert card.count("| drifting | m | 0.0153 M | bf16 | 1.0e-06 | 1 |") == 2
    fields = re.findall("^\\| `([^`]+)`", card.split("| field |")[1], re.MULTILINE)
    assert {*fields} <= {*rows(measured)[0]}


def test_a_run_of_one_version_is_refused(tmp_path):
    run = Drifting(tmp_path / "bucket")
    run.close()
    with pytest.raises(SystemExit, match="fewer than two versions"):
        corpus.main([run.url, "--trainer", "bf16", "--into", str(tmp_path / "all")])


def test_distances_are_counted_in_their_classes():
    moved = np.array([1, -1, 2, 3, -4, 5, 16, 17, -256, 257, -32768], np.int16).view(np.uint16)
    patch = Patch("w", (99,), np.arange(moved.size), moved)
    assert dict(zip(ULP_CLASSES, count_ulps(patch).tolist(), strict=True)) == {
        "1": 2, "2": 1, "3-4": 2, "5-16": 2, "17-256": 2, "257+": 2
    }  # fmt: skip


def test_a_weight_that_leaves_fp8s_range_is_cut_off_there():
    old = np.array([0x43E0, 0x43E1], np.uint16)  # 448 and more
    assert measure.fp8_changes(old, Patch("w", (2,), np.array([0, 1]), np.array([1, 9], np.uint16)), 0) == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.layers.3.self_attn.q_proj.weight", "attention"),
        ("model.layers.3.self_attn.q_norm.weight", "norm"),
        ("model.layers.3.post_attention_layernorm.weight", "norm"),
        ("transformer.h.0.ln_1.weight", "norm"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", "mlp"),
        ("model.layers.3.block_sparse_moe.gate.weight", "other"),
    ],
)
def test_the_part_of_the_model_is_inferred_from_the_tensors_name(name, kind):
    assert measure.kind_of(name) == kind
