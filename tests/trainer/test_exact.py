"""Exact old policies equal those of checked-out versions, bit for bit, and TRL trains on each token's own."""

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
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from delta_weight_sync import Publisher
from delta_weight_sync.reader import open_run
from delta_weight_sync.runlog import RunLogReader, StepEvent
from delta_weight_sync.store import open_bucket
from delta_weight_sync.trl import patches
from delta_weight_sync.trl.trainer import BucketGRPOTrainer, live_weights
from tests.support import tiny_policy as tiny
from tests.support.recorded import Recorded, cpu_config
from tests.support.trainer_lives import one_by_one
from trainer import exact, rollouts, train
from trainer.exact import LogProbs, Mask, PastPolicy, query
from trainer.samples import UNKNOWN, TracedSample
from trainer.settings import Settings

SYNCS = 6
KEEP = 4
BATCH = 4
STEPS = 4
PROMPT = 4
TOKENS = 12
ENGINE = -3.0  # what the engine is said to have said of each token


def trl_model(folder: Path, dtype: str) -> torch.nn.Module:
    """What `AsyncGRPOTrainer` trains."""
    options = {"device_map": None, "attn_implementation": TREE_ATTENTION, "dtype": dtype}
    model = create_model_from_path(str(folder), **options)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@torch.no_grad()
def step(policy: torch.nn.Module, seed: int) -> None:
    """Moves a tenth of the weights, by a hundredth of their size."""
    generator = torch.Generator().manual_seed(seed)
    for weights in policy.parameters():
        moved = torch.rand(weights.shape, generator=generator) < 0.1
        change = 0.01 * torch.randn(weights.shape, generator=generator)
        weights += torch.where(moved, change, torch.zeros(())).to(weights.dtype)


def queries() -> list[dict[str, Any]]:
    """Samples of several lengths, two of which share a prompt."""
    numbers = np.random.default_rng(0)
    prompt = numbers.integers(5, 90, 6)
    found = []
    for length in (4, 9, 6):
        tokens = np.concatenate([prompt, numbers.integers(5, 90, length)])
        asked = np.arange(len(tokens)) >= len(prompt)
        asked[-2] = False
        found.append(query(tokens, asked))
    return found


def mask(query: dict[str, Any]) -> Mask:
    """Which of its tokens are asked for."""
    return query["completion_mask"] == 1


def from_checkout(url: str, sync: int, folder: Path, dtype: str, asked: list[dict[str, Any]]) -> LogProbs:
    """What a model says that is loaded from the checkpoint of that sync's version."""
    reader = open_run(url)
    manifest = next(manifest for manifest in reader.versions() if manifest.sync == sync)
    reader.checkout(manifest, folder / f"v{manifest.version}")
    return PastPolicy(trl_model(folder / f"v{manifest.version}", dtype), 0).log_probs(asked)


def published(url: str, base: Path, dtype: str) -> PastPolicy:
    """The past of a policy that was published at each of the syncs 1 to `SYNCS`."""
    policy = trl_model(base, dtype)
    step(policy, 1)  # so that float32 weights are no bf16, as where a trainer goes on
    past = PastPolicy(policy, 0)
    with Publisher(url, base) as publisher:
        publisher.publish(live_weights(policy))
        past.begin(policy, publisher.keep_undo_log(KEEP))
        for sync in range(2, SYNCS + 1):
            step(policy, sync)
            publisher.publish(live_weights(policy))
            publisher.flush()
            past.keep_up()
    return past


@pytest.fixture(autouse=True)
def _trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_replace", monkeypatch.setattr)  # all is as it was, after this test
    patches.install()
    packing.register_tree_attention()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.build(folder, tie=True, seed=0)
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{(tmp_path / 'bucket').as_uri()}#run"


@pytest.fixture
def past(url: str, base: Path) -> PastPolicy:
    return published(url, base, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_past_policy_is_the_checked_out_one_bit_for_bit(url, base, tmp_path, dtype):
    """Forwards and backwards, though nothing was asked of it for longer than what is kept."""
    past = published(url, base, dtype)
    kept = range(SYNCS - KEEP, SYNCS + 1)
    expected = {sync: from_checkout(url, sync, tmp_path, dtype, queries()) for sync in kept}
    for sync in (4, 6, 2, 5, 3):
        past.roll(sync)
        np.testing.assert_array_equal(past.log_probs(queries()), expected[sync])
    assert all((expected[2] != expected[sync]).mean() > 0.9 for sync in kept if sync != 2)
    assert 1 not in past.log.syncs


def test_a_row_of_tokens_is_never_longer_than_the_budget(past, monkeypatch):
    """And each answer is that of all samples in one row, but for the order of sums."""
    together = past.log_probs(queries())
    packed = []
    forward = exact.forward

    def seen(model, row):
        packed.append(row["input_ids"].numel())
        return forward(model, row)

    monkeypatch.setattr(exact, "forward", seen)
    past._token_budget = 16
    np.testing.assert_allclose(past.log_probs(queries()), together, atol=1e-5)
    assert len(packed) > 1
    assert max(packed) <= 16


def sample(query: dict[str, Any], syncs: np.ndarray, group: int) -> TracedSample:
    asked = mask(query)
    return TracedSample(
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": "!"}],
        input_ids=query["input_ids"],
        completion_mask=query["completion_mask"],
        old_log_probs=np.where(asked, ENGINE, 0.0).astype(np.float32),
        advantage=1.0,
        model_version=max(int(syncs[asked].min()), 0),
        group_id=group,
        metrics={"reward": 1.0},
        token_syncs=np.where(asked, syncs, UNKNOWN),
    )


def taken(past: PastPolicy, samples: list[TracedSample]) -> tuple[list[dict[str, torch.Tensor]], dict]:
    """What TRL trains on, a batch of one sample each, and its metrics."""
    waiting: queue.Queue[Any] = queue.Queue()
    for each in samples:
        waiting.put(each)
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    batch = SimpleNamespace(per_device_train_batch_size=len(samples))
    worker = SimpleNamespace(metrics_queue=queue.Queue())
    accelerator = SimpleNamespace(autocast=nullcontext)
    trainer = SimpleNamespace(rollout_worker=worker, accelerator=accelerator, args=batch)
    dataset = RolloutQueueDataset(
        exact.ExactSamples(waiting, past, trainer, None),
        model_version_fn=lambda: SYNCS,
        check_health_fn=lambda _: None,
        stale_after_s=1.0,
        metrics=metrics["train"],
        max_staleness=100,
    )
    collate = DataCollatorForRollout(0)
    batches = iter(FixedCountBatcher(dataset, 1, 1))
    found = [collate.torch_call([next(batches)]) for _ in samples]
    while not worker.metrics_queue.empty():  # as TRL does when it logs
        for name, value in worker.metrics_queue.get().items():
            metrics["train"][name].append(value)
    return found, {name: _reduce_metric(name, values) for name, values in metrics["train"].items()}


def test_a_sample_that_spans_versions_gets_the_log_probabilities_of_each(past, url, tmp_path):
    """Through TRL's own data set and packing, several samples at once."""
    asked = queries()
    syncs = [np.full(len(query["input_ids"]), 5) for query in asked]
    syncs[1][-4:] = 6  # a commit within the answer
    syncs[2][:] = 3
    batches, metrics = taken(past, [sample(q, s, 7) for q, s in zip(asked, syncs, strict=True)])
    for each, made, batch in zip(asked, syncs, batches, strict=True):
        for sync in set(made.tolist()):
            alone = from_checkout(url, sync, tmp_path, "float32", [each])
            there = made[mask(each)] == sync
            np.testing.assert_allclose(batch["old_log_probs"][0][there], alone[there], atol=1e-5)
    exacts = np.concatenate([batch["old_log_probs"][0] for batch in batches])
    # After the commit comes what the engine made with keys and values of two versions: it is counted apart.
    mixed = [np.zeros(len(query["input_ids"]), bool) for query in asked]
    mixed[1][-4:] = True
    mixed[1][-1] = False  # what TRL would not train on lies between: another answer
    pure = ~np.concatenate([late[mask(query)] for query, late in zip(asked, mixed, strict=True)])
    assert (~pure).sum() == 2
    off = exacts.astype(np.float64) - ENGINE
    expected = {
        "exact/mismatch_mean": np.abs(off[pure]).mean(),
        "exact/mismatch_max": np.abs(off[pure]).max(),
        "exact/mismatch_ratio": np.exp(off)[pure].mean(),
        "exact/mismatch_kl": (np.exp(off) - 1 - off)[pure].mean(),
        "exact/mixed_mean": np.abs(off[~pure]).mean(),
        "exact/samples_left_total": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strange", [UNKNOWN, 1], ids=["unnamed", "older than what is kept"])
def test_a_sample_whose_weights_are_not_kept_stays_as_it_was_and_is_counted(past, strange):
    syncs = [np.full(len(query["input_ids"]), 5) for query in queries()]
    syncs[0][-1] = strange
    batches, metrics = taken(past, [sample(q, s, 7) for q, s in zip(queries(), syncs, strict=True)])
    assert (batches[0]["old_log_probs"] == ENGINE).all()
    assert all((batch["old_log_probs"] != ENGINE).all() for batch in batches[1:])
    assert metrics["exact/samples_left_total"] == 1


def test_rolling_writes_what_changed_and_no_more(past):
    """A batch of the syncs 4 to 6 is visited from the nearer end."""
    total = sum(weights.numel() for weights in past._weights.values())
    past.roll(6)
    syncs = [np.full(len(query["input_ids"]), sync) for query, sync in zip(queries(), (4, 6, 5), strict=True)]
    _, metrics = taken(past, [sample(q, s, 7) for q, s in zip(queries(), syncs, strict=True)])
    assert past.sync == 4
    assert 0 < metrics["exact/weights_written_total"] < 0.25 * total, "two syncs, a tenth each"


def test_what_cannot_be_exact_is_refused_with_what_to_change():
    args = SimpleNamespace(world_size=2, token_budget=0)
    trainer = SimpleNamespace(args=args, model=torch.nn.Linear(2, 2).half())
    with pytest.raises(SystemExit, match=r"--exact_old_policy needs one process: use `python -m`"):
        exact.enable(trainer, None)
    args.world_size = 1
    with pytest.raises(SystemExit, match=r"float16 weights cannot be moved .* or bfloat16 as --dtype"):
        exact.enable(trainer, None)


class Played(Recorded):
    """After each sync, a batch whose later tokens are of that sync."""

    def __init__(self) -> None:
        super().__init__(0, None)
        self.samples: list[TracedSample] = []

    def start(self) -> None:
        self._play(1, 1)
        self._play(1, UNKNOWN)  # TRL looks a batch ahead

    def update_model_version(self, model_version: int) -> None:
        if model_version > 1:
            self._play(model_version - 1, model_version)

    def _play(self, before: int, after: int) -> None:
        syncs = np.where(np.arange(TOKENS) < 8, before, after)
        for _ in range(BATCH):
            number = len(self.samples)
            tokens = np.random.default_rng(number).integers(5, 90, TOKENS)
            self.samples.append(sample(query(tokens, np.arange(TOKENS) >= PROMPT), syncs, number))
            self.rollout_buffer.put(self.samples[-1])


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Per batch, the old log-probabilities in TRL's loss; each hand-over becomes a version."""
    found: list[np.ndarray] = []
    loss = BucketGRPOTrainer.compute_loss

    def seen(trainer, model, inputs, *rest, **options):
        found.append(inputs["old_log_probs"].numpy().reshape(BATCH, TOKENS - PROMPT))
        return loss(trainer, model, inputs, *rest, **options)

    monkeypatch.setattr(BucketGRPOTrainer, "compute_loss", seen)
    monkeypatch.setattr(Publisher, "publish", one_by_one(Publisher.publish))
    return found


@pytest.mark.live
def test_each_token_is_trained_on_with_its_own_versions_log_probability(tmp_path, monkeypatch, trained_on):
    played = Played()
    url = (tmp_path / "bucket").as_uri()
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "max_staleness": 2}
    config = cpu_config(tmp_path / "trl", learning_rate=1e-2, **sizes)
    monkeypatch.setattr(rollouts, "make_worker", lambda *_: played)
    tiny.build(tmp_path / "base", tie=True, seed=0)
    places = {"model": str(tmp_path / "base"), "bucket": url, "run": "run", "replicas": []}
    train.train(Settings(**places, task="brevity", exact_old_policy=True), config)

    assert len(trained_on) == STEPS
    assert (trained_on[1] == ENGINE).all(), "nobody said whose its later tokens are"
    for batch in (0, 2, 3):
        samples = played.samples[batch * BATCH : (batch + 1) * BATCH]
        queries = [query(s.input_ids, s.completion_mask == 1) for s in samples]
        made = samples[0].token_syncs[PROMPT:]
        said = {}
        for sync in set(made.tolist()):
            checkout = from_checkout(f"{url}#run", sync, tmp_path, "float32", queries)
            said[sync] = checkout.reshape(BATCH, -1)
        for sync, expected in said.items():
            own = made == sync
            np.testing.assert_allclose(trained_on[batch][:, own], expected[:, own], atol=1e-5)
            for other in said.keys() - {sync}:
                assert np.abs(said[other] - expected)[:, own].max() > 1e-3

    log = RunLogReader(open_bucket(url), "run").poll()
    steps = [event.metrics for event in log if isinstance(event, StepEvent) and event.step]
    assert len(steps) == STEPS
    assert sum(step.get("exact/samples_left_total", 0) for step in steps) == BATCH
    assert all(step["exact/mismatch_max"] > 1 for step in steps[-2:]), "the engine is said to have said -3"
    assert all("exact/mixed_mean" in step for step in steps[-2:])
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=0.01), "the policy has not moved yet"
