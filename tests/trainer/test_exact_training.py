"""`--exact_old_policy true` in TRL's own trainer: what it trains on, and what the run's log says."""

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from delta_weight_sync import Publisher, open_bucket
from delta_weight_sync.publish import trl_patches
from delta_weight_sync.publish.trl_trainer import BucketGRPOTrainer
from delta_weight_sync.runlog import RunLogReader, StepEvent
from tests.policies import tiny
from tests.trainer.exact_scene import Query, from_checkout
from tests.trainer.test_exact import ENGINE, sample
from trainer import rollouts, train
from trainer.arguments import ScriptArguments
from trainer.token_syncs import UNKNOWN, TracedSample

pytestmark = pytest.mark.live
BATCH, STEPS, PROMPT, TOKENS = 4, 4, 4, 12


class Played:
    """TRL's `RolloutWorkerProtocol`: after each sync a batch whose later tokens are of that sync."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
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
            self.samples.append(sample(Query(tokens, np.arange(TOKENS) >= PROMPT), syncs, number))
            self.rollout_buffer.put(self.samples[-1])

    def inherit(self, sync: int) -> None: ...
    def stop(self) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Per batch, the old log-probabilities in TRL's loss; each hand-over becomes a version."""
    for module, name in (
        ("async_rollout_worker", "is_vllm_available"),
        ("async_rollout_worker", "_child_main"),
        ("packing", "_flash_attn"),
        ("async_grpo_trainer", "get_peak_flops_per_device"),
    ):
        place = getattr(trl_patches, module)
        monkeypatch.setattr(place, name, getattr(place, name))  # as it was, after this test
    found: list[np.ndarray] = []
    loss, publish = BucketGRPOTrainer.compute_loss, Publisher.publish

    def seen(trainer, model, inputs, *rest, **options):
        found.append(inputs["old_log_probs"].numpy().reshape(BATCH, TOKENS - PROMPT))
        return loss(trainer, model, inputs, *rest, **options)

    def one_by_one(publisher, *arguments):
        publish(publisher, *arguments)
        publisher._outbox.flush()

    monkeypatch.setattr(BucketGRPOTrainer, "compute_loss", seen)
    monkeypatch.setattr(Publisher, "publish", one_by_one)
    return found


def settings(folder: Path) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        token_budget=0,
        dtype="float32",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_staleness=2,
    )


def test_each_token_is_trained_on_with_the_log_probability_of_its_own_version(
    tmp_path, monkeypatch, trained_on
):
    played, url = Played(), (tmp_path / "bucket").as_uri()
    monkeypatch.setattr(rollouts, "make_worker", lambda *_, **__: played)
    tiny.build(tmp_path / "base", tie=True, seed=0)
    places = {"model": str(tmp_path / "base"), "bucket": url, "run": "run", "replicas": []}
    train.train(ScriptArguments(**places, task="shorter", exact_old_policy=True), settings(tmp_path / "trl"))

    assert len(trained_on) == STEPS
    assert (trained_on[1] == ENGINE).all(), "nobody said whose its later tokens are"
    for batch in (0, 2, 3):
        samples = played.samples[batch * BATCH : (batch + 1) * BATCH]
        queries = [Query(s.input_ids, s.completion_mask == 1) for s in samples]
        said = {
            sync: from_checkout(f"{url}#run", sync, tmp_path, "float32", queries).reshape(BATCH, -1)
            for sync in set(samples[0].token_syncs[PROMPT:].tolist())
        }
        made = samples[0].token_syncs[PROMPT:]
        for sync, exact in said.items():
            np.testing.assert_allclose(trained_on[batch][:, made == sync], exact[:, made == sync], atol=1e-5)
            for other in said.keys() - {sync}:
                assert np.abs(said[other] - exact)[:, made == sync].max() > 1e-3

    log = RunLogReader(open_bucket(url), "run").poll()
    steps = [event.metrics for event in log if isinstance(event, StepEvent)]
    assert len(steps) == STEPS
    assert sum(step.get("exact/samples_left_total", 0) for step in steps) == BATCH
    assert all(step["exact/mismatch_max"] > 1 for step in steps[-2:]), "the engine is said to have said -3"
    assert all("exact/mixed_mean" in step for step in steps[-2:])
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=0.01), "the policy has not moved yet"
