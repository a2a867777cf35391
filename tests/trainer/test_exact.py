"""Exact old policies, bit for bit those of the versions that are checked out, for each token its own."""

import queue
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trl.experimental.async_grpo import packing
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    FixedCountBatcher,
    RolloutQueueDataset,
    _reduce_metric,
)

from delta_weight_sync.publish import trl_patches
from tests.policies import tiny
from tests.trainer.exact_scene import Published, Query, from_checkout, queries
from trainer import exact, past_policy
from trainer.token_syncs import UNKNOWN, TracedSample

SYNCS, KEEP = 6, 4
ENGINE = -3.0  # what the engine is said to have said of each token


@pytest.fixture(autouse=True)
def _trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_flash_attn", packing._flash_attn)  # as it was, after this test
    trl_patches._attention_without_download()
    packing.register_tree_attention()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.build(folder, tie=True, seed=0)
    return folder


def published(base: Path, tmp_path: Path, dtype: str = "float32", budget: int = 0) -> tuple[Published, str]:
    url = f"{(tmp_path / 'bucket').as_uri()}#run"
    return Published(url, base, SYNCS, KEEP, dtype, budget), url


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_past_policy_is_the_checked_out_one_bit_for_bit(base, tmp_path, dtype):
    """Forwards and backwards, though nothing was asked of it for longer than what is kept."""
    scene, url = published(base, tmp_path, dtype)
    kept = range(SYNCS - KEEP, SYNCS + 1)
    expected = {sync: from_checkout(url, sync, tmp_path, dtype, queries()) for sync in kept}
    for sync in (4, 6, 2, 5, 3):
        scene.past.roll(sync)
        np.testing.assert_array_equal(scene.past.log_probs(queries()), expected[sync])
    assert all((expected[2] != expected[sync]).mean() > 0.9 for sync in kept if sync != 2)
    assert not scene.past.knows(1)


def test_a_row_of_tokens_is_never_longer_than_the_budget(base, tmp_path, monkeypatch):
    """And each answer is that of all samples in one row, but for the order of sums."""
    scene, _ = published(base, tmp_path)
    together = scene.past.log_probs(queries())
    packed, forward = [], past_policy.forward

    def seen(model, row):
        packed.append(row["input_ids"].numel())
        return forward(model, row)

    monkeypatch.setattr(past_policy, "forward", seen)
    scene.past._token_budget = 16
    np.testing.assert_allclose(scene.past.log_probs(queries()), together, atol=1e-5)
    assert len(packed) > 1
    assert max(packed) <= 16


def sample(query: Query, syncs: np.ndarray, group: int) -> TracedSample:
    return TracedSample(
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": "!"}],
        input_ids=query.input_ids,
        completion_mask=query.asked.astype(np.int64),
        old_log_probs=np.where(query.asked, ENGINE, 0.0).astype(np.float32),
        advantage=1.0,
        model_version=max(int(syncs[query.asked].min()), 0),
        group_id=group,
        metrics={"reward": 1.0},
        token_syncs=np.where(query.asked, syncs, UNKNOWN),
    )


def taken(scene: Published, samples: list[TracedSample]) -> tuple[list[dict[str, torch.Tensor]], dict]:
    """What TRL trains on, a batch of one sample each, and its metrics."""
    waiting: queue.Queue[Any] = queue.Queue()
    for each in samples:
        waiting.put(each)
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(_metrics=metrics, accelerator=SimpleNamespace(autocast=nullcontext))
    dataset = RolloutQueueDataset(
        exact.ExactSamples(waiting, scene.past, trainer, len(samples)),
        model_version_fn=lambda: SYNCS,
        check_health_fn=lambda _: None,
        stale_after_s=1.0,
        metrics=metrics["train"],
        max_staleness=100,
    )
    collate, batches = DataCollatorForRollout(0), iter(FixedCountBatcher(dataset, 1, 1))
    found = [collate.torch_call([next(batches)]) for _ in samples]
    return found, {name: _reduce_metric(name, values) for name, values in metrics["train"].items()}


def test_a_sample_that_spans_versions_gets_the_log_probabilities_of_each(base, tmp_path):
    """Through TRL's own data set and packing, several samples at once."""
    scene, url = published(base, tmp_path)
    asked = queries()
    syncs = [np.full(len(query.asked), 5) for query in asked]
    syncs[1][-4:] = 6  # a commit within the answer
    syncs[2][:] = 3
    batches, metrics = taken(scene, [sample(q, s, 7) for q, s in zip(asked, syncs, strict=True)])
    for query, made, batch in zip(asked, syncs, batches, strict=True):
        for sync in set(made.tolist()):
            alone = from_checkout(url, sync, tmp_path, "float32", [query])
            there = made[query.asked] == sync
            np.testing.assert_allclose(batch["old_log_probs"][0][there], alone[there], atol=1e-5)
    exacts = np.concatenate([batch["old_log_probs"][0] for batch in batches])
    # After the commit comes what the engine made with keys and values of two versions: it is counted apart.
    mixed = [np.zeros(len(query.asked), bool) for query in asked]
    mixed[1][-4:] = True
    mixed[1][-1] = False  # what TRL would not train on lies between: another answer
    pure = ~np.concatenate([late[query.asked] for query, late in zip(asked, mixed, strict=True)])
    assert (~pure).sum() == 2
    off = exacts.astype(np.float64) - ENGINE
    np.testing.assert_allclose(metrics["exact/mismatch_mean"], np.abs(off[pure]).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["exact/mismatch_max"], np.abs(off[pure]).max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["exact/mismatch_ratio"], np.exp(off)[pure].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["exact/mismatch_kl"], (np.exp(off) - 1 - off)[pure].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["exact/mixed_mean"], np.abs(off[~pure]).mean(), rtol=1e-5)
    assert metrics["exact/samples_left_total"] == 0


@pytest.mark.parametrize("strange", [UNKNOWN, 1], ids=["unnamed", "older than what is kept"])
def test_a_sample_whose_weights_are_not_kept_stays_as_it_was_and_is_counted(base, tmp_path, strange):
    scene, _ = published(base, tmp_path)
    syncs = [np.full(len(query.asked), 5) for query in queries()]
    syncs[0][-1] = strange
    batches, metrics = taken(scene, [sample(q, s, 7) for q, s in zip(queries(), syncs, strict=True)])
    assert (batches[0]["old_log_probs"] == ENGINE).all()
    assert all((batch["old_log_probs"] != ENGINE).all() for batch in batches[1:])
    assert metrics["exact/samples_left_total"] == 1


def test_rolling_writes_what_changed_and_no_more(base, tmp_path):
    """A batch of the syncs 4 to 6 is visited from the nearer end."""
    scene, _ = published(base, tmp_path)
    total = sum(weights.numel() for weights in scene.past._weights.values())
    scene.past.roll(6)
    syncs = [np.full(len(query.asked), sync) for query, sync in zip(queries(), (4, 6, 5), strict=True)]
    _, metrics = taken(scene, [sample(q, s, 7) for q, s in zip(queries(), syncs, strict=True)])
    assert scene.past.sync == 4
    assert 0 < metrics["exact/weights_written_total"] < 0.25 * total, "two syncs, a tenth each"


def test_what_cannot_be_exact_is_refused_with_what_to_change():
    ranks = SimpleNamespace(args=SimpleNamespace(world_size=2))
    with pytest.raises(SystemExit, match=r"--exact_old_policy needs a trainer of one process"):
        exact.use(ranks, None)
    half = SimpleNamespace(
        args=SimpleNamespace(world_size=1, token_budget=0), model=torch.nn.Linear(2, 2).half()
    )
    with pytest.raises(SystemExit, match=r"float16 do not hold every bf16: .*; set --dtype"):
        exact.use(half, None)
