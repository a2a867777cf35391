"""`Publisher.log_metrics`: what reaches the run's log, and what never stops a loop."""

import math

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync import Publisher
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import LARGEST
from delta_weight_sync.runlog import METRICS, RunLogReader, StepEvent
from tests.support import tiny_policy as tiny


def steps(url):
    reader = open_run(url)
    return [e for e in RunLogReader(reader.bucket, reader.keys.run).poll() if isinstance(e, StepEvent)]


def test_finite_numbers_are_logged_with_the_step(tmp_path):
    url = f"{(tmp_path / 'bucket').as_uri()}#first"
    tiny.build(tmp_path / "base", tie=True, seed=0)
    with Publisher(url, tmp_path / "base") as publisher:
        publisher.publish(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), 7)
        publisher.log_metrics(
            {
                "reward": torch.tensor(0.5),
                "loss": np.float32(2.0),
                "kl": 1,
                "nan": math.nan,
                "large": 10 * LARGEST,
                "text": "0.5",
                "several": torch.ones(2),
                "none": None,
            }
        )
        publisher.log_metrics({f"m{n}": n for n in range(2 * METRICS)}, step=9)
        publisher.log_metrics(None)  # type: ignore[arg-type]
    first, second = steps(url)
    assert (first.step, first.reward) == (7, 0.5)
    assert first.metrics == {"reward": 0.5, "loss": 2.0, "kl": 1.0}
    assert (second.step, len(second.metrics)) == (9, METRICS)


def test_a_loop_that_logs_more_than_its_share_is_sampled(tmp_path):
    url = f"{(tmp_path / 'bucket').as_uri()}#first"
    tiny.build(tmp_path / "base", tie=True, seed=0)
    with Publisher(url, tmp_path / "base") as publisher:
        publisher.publish(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
        publisher.flush()
        for step in range(20_000):
            publisher.log_metrics({"loss": step / 7}, step)
    assert 10 < len(steps(url)) < 10_000
