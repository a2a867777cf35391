"""A real vLLM is about as far from the published weights in float32 as bf16 makes it, and no farther."""

from pathlib import Path

import pytest

from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.reader import RunReader
from tests.live.replica import KEY, Replica
from tests.live.run import Trainer, update
from trainer.canary import LIMIT, compare

pytestmark = pytest.mark.live


def test_a_canary_of_a_live_replica(trainer: Trainer, replica: Replica, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SPACE_KEY", KEY)
    monkeypatch.setenv("SPACES", replica.url)
    reader = RunReader(trainer.bucket, "live")
    with CheckpointFolder(reader, tmp_path / "kept") as kept:
        for _ in range(2):
            newest = update(trainer, replica)
            version, off = compare(reader, kept, replica.url)
            assert version == newest
            assert 0 < off < LIMIT / 2
