"""A script with TRL's own trainer is killed and started again."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOTrainer

from delta_weight_sync import BucketWeightTransfer, ConfigError, Run, follow
from delta_weight_sync.checkpoint import read_bits, to_bits
from delta_weight_sync.reader import open_run
from delta_weight_sync.trl import hooks, patches
from tests import forked
from tests.support import tiny_policy as tiny
from tests.support.recorded import BATCH, Recorded, cpu_config

KILLED = 4  # the step after which the first trainer is killed
SAVED = 3  # the step of its last checkpoint

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not hooks.ATTENTION.works(), reason="this TRL trains on GPUs only"),
]


class Paced(TrainerCallback):
    """Waits before each step until the sync before is in the bucket, so that each sync is a version."""

    def __init__(self, transfer: BucketWeightTransfer, dies: bool) -> None:
        self._transfer = transfer
        self._dies = dies

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._transfer._publisher.flush()
        if self._dies and state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def script(
    model: Path, url: str, out: Path, steps: int, dies: bool = False, **options: Any
) -> AsyncGRPOTrainer:
    """The trainer of a script."""
    settings = {"per_device_train_batch_size": BATCH, "learning_rate": 1e-3, "max_staleness": 100}
    saving = {"save_strategy": "steps", "save_steps": SAVED}
    transfer = BucketWeightTransfer(url, base=model, **options)
    return AsyncGRPOTrainer(
        str(model),
        args=cpu_config(out, max_steps=steps, **settings, **saving),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "?"}]]}),
        reward_funcs=[],
        rollout_worker=Recorded(steps, None),
        weight_transfer=transfer,
        callbacks=[Paced(transfer, dies)],
    )


def first_life(model: Path, url: str, out: Path) -> None:
    torch.set_num_threads(1)
    script(model, url, out, steps=KILLED + 2, dies=True).train()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with versions 0 to KILLED, and TRL's checkpoint of step SAVED."""
    place = tmp_path_factory.mktemp("killed")
    tiny.build(place / "base", tie=True, seed=0)
    process = forked.start(first_life, place / "base", url_of(place), place / "out")
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert syncs(place) == [*range(1, KILLED + 2)]
    return place


@pytest.fixture
def place(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(patches, "_replace", monkeypatch.setattr)  # after the test, TRL is as it was
    return shutil.copytree(killed, tmp_path, dirs_exist_ok=True)


def url_of(place: Path) -> str:
    return f"{(place / 'bucket').as_uri()}#trl"


def syncs(place: Path) -> list[int]:
    """The sync of every version, oldest first."""
    return [manifest.sync for manifest in open_run(url_of(place)).versions()][::-1]


def require_followed(trainer: AsyncGRPOTrainer, place: Path) -> None:
    """A follower has exactly the trainer's bits."""
    (version,) = follow(url_of(place), place / "followed", once=True)
    held = dict(read_bits(version.path))
    assert held.keys() == {name for name, _ in trainer.model.named_parameters()}
    for name, tensor in trainer.model.named_parameters():
        np.testing.assert_array_equal(held[name], to_bits(tensor))


def test_a_script_that_starts_again_from_the_base_is_refused(place):
    trainer = script(place / "base", url_of(place), place / "out", steps=KILLED + 2)
    with pytest.raises(
        ConfigError, match=r"versions up to 4, .*weights of version 0.*resume_from_checkpoint"
    ):
        trainer.train()
    assert len(syncs(place)) == KILLED + 1
    trainer = script(place / "base", url_of(place), place / "again", steps=1, fresh=True)
    trainer.train()
    assert syncs(place)[KILLED + 1 :] == [KILLED + 2, KILLED + 3]
    require_followed(trainer, place)


def test_a_script_continues_from_trls_checkpoint_though_the_run_is_ahead(place, caplog):
    trainer = script(place / "base", url_of(place), place / "out", steps=KILLED + 2)
    trainer.train(resume_from_checkpoint=True)
    assert "goes back from version 4 (sync 5) to the weights of version 3 (sync 4)" in caplog.text
    reader = open_run(url_of(place))
    assert reader.manifest(KILLED + 1).digest == reader.manifest(SAVED).digest
    steps = KILLED + 2 - SAVED
    assert syncs(place) == [*range(1, KILLED + 2 + 1 + steps)], "the checkpoint's weights, and each step"
    assert trainer.state.global_step == KILLED + 2
    require_followed(trainer, place)


def test_a_script_continues_with_a_checkout_as_its_model(place, caplog):
    Run(url_of(place)).checkout(place / "newest")
    trainer = script(place / "newest", url_of(place), place / "again", steps=1)
    trainer.train()
    assert "goes back" not in caplog.text
    assert "resumed no state" not in caplog.text
    assert open_run(url_of(place)).manifest(KILLED + 1).changed == 0
    assert syncs(place) == [*range(1, KILLED + 4)]
    require_followed(trainer, place)
