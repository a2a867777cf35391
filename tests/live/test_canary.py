"""A real vLLM is about as far from the published weights in float32 as bf16 makes it, and no farther."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.reader import RunReader
from delta_weight_sync.runlog import CanaryEvent, RunLogReader
from tests.live.replica import KEY, Replica
from tests.live.run import Trainer, update
from trainer.canary import LIMIT, Canary, Reference, prompts_of
from trainer.tasks import brevity

pytestmark = pytest.mark.live


def test_a_canary_of_a_live_replica(trainer: Trainer, replica: Replica, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SPACE_KEY", KEY)
    monkeypatch.setenv("SPACES", replica.url)
    base = str(trainer.writer.assets)
    reader = RunReader(trainer.bucket, "live")
    prompts = prompts_of(brevity.make_dataset(), AutoTokenizer.from_pretrained(base))
    versions = [update(trainer, replica) for _ in range(2)]
    with CheckpointFolder(reader, tmp_path) as kept:
        expected = Reference(base, reader, kept, prompts).logprobs
        canary = Canary([replica.url], prompts, expected, trainer.log, lambda url: "live", 1e6)
        canary.compare()
        versions.append(update(trainer, replica))
        canary.compare()
        canary.close()
    trainer.log.flush()
    found = [event for event in RunLogReader(trainer.bucket, "live").poll() if isinstance(event, CanaryEvent)]
    assert [event.version for event in found] == versions[1:]
    assert all(0 < event.difference < LIMIT / 2 for event in found), found
