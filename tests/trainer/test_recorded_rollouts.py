"""From the samples that TRL's trainer takes off its queue to the run's log."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from delta_weight_sync.runlog import RunLogReader, RunLogWriter, StepEvent
from delta_weight_sync.store import open_bucket
from trainer.observe import StepRecorder

pytestmark = pytest.mark.live

CRANE, PLUMB = "c1-r2?a3+n4-e5-", "p1+l2+u3+m4+b5+"


def sample(group: int, reward: float, *turns: tuple[str, str]) -> RolloutSample:
    messages: list[dict] = []
    for word, answer in turns:
        call = {"type": "function", "function": {"name": "guess", "arguments": {"word": word}}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "name": "guess", "content": answer}]
    none = np.zeros(0)
    return RolloutSample(
        prompt=[{"role": "user", "content": "Play <b>Wordle</b>."}],
        completion=messages,
        input_ids=none,
        completion_mask=none,
        old_log_probs=none,
        advantage=0.0,
        model_version=3,
        group_id=group,
        metrics={"reward": reward},
    )


def test_a_group_and_its_rates_reach_the_log(tmp_path: Path) -> None:
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    samples: queue.Queue[RolloutSample] = queue.Queue()
    for one in (
        sample(1, 1.5, ("crane", CRANE), ("plumb", PLUMB)),
        sample(1, 0.2, ("zzzzz", "zzzzz: not a word"), ("crane", CRANE)),
        sample(2, 0.4, ("crane", CRANE)),
    ):
        samples.put(one)
    log = RunLogWriter(bucket, "wordle")
    recorder = StepRecorder(log, samples)
    seen = recorder.samples
    assert [seen.get(timeout=60).group_id for _ in range(3)] == [1, 1, 2]
    assert seen.qsize() == 0, "everything else is the queue's"
    recorder.on_log(None, SimpleNamespace(global_step=7), None, {"reward": 0.7})
    log.close()

    (step,) = RunLogReader(bucket, "wordle").poll()
    assert isinstance(step, StepEvent)
    assert (step.step, step.prompt) == (7, "Play <b>Wordle</b>.")
    assert [(rollout.reward, rollout.sync) for rollout in step.rollouts] == [(1.5, 3), (0.2, 3)]
    assert step.rollouts[0].turns == (("crane", CRANE), ("plumb", PLUMB))
    assert step.metrics == {"reward": 0.7, "games/solve_rate": 1 / 3, "games/invalid_rate": 1 / 5}
