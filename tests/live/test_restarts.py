"""What takes a replica's vLLM down: another history under the same name, and a Space that is killed."""

import pytest
import torch

from delta_weight_sync.publish.outbox import Outbox
from tests.live.replica import engine_of
from tests.support.held import held

pytestmark = pytest.mark.live


def test_a_run_that_was_started_over_is_joined_afresh(trainer, replica):
    """The same run name, but another history: only the anchor leads there."""
    replica.wait_for(trainer.publisher.version)
    engine = engine_of(replica).pid
    trainer.bucket.delete([info.key for info in trainer.bucket.list("runs/live/") if "/log/" not in info.key])
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(0.5)
    restarted = trainer.take_over(trainer.writer.assets)
    publisher = Outbox(restarted, trainer.log)
    publisher.publish(held(trainer.model.named_parameters()), 1)
    publisher.close()
    replica.wait_until(lambda status: status["digest"] == restarted.newest.digest, "version of the new run")
    assert engine_of(replica).pid == engine, "in the same vLLM"


def test_nothing_outlives_a_killed_replica(replica):
    """Not even an engine that no longer listens to a request to end; `kill` looks for all processes."""
    engine_of(replica).suspend()
    replica.kill()
