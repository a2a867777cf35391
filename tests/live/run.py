"""A run "live" for tests: a trainer that takes random steps."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync.codec import Encoding
from delta_weight_sync.publish.outbox import Outbox
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket
from tests.live.replica import Replica
from tests.support import tiny_policy as tiny
from tests.support.held import held
from tests.support.records import WRITER


class Trainer:
    """Takes random steps with a real model and publishes them; what TRL does, without the learning."""

    def __init__(
        self, url: str, base: Path, encoding: Encoding = "fast", keys: Mapping[str, str] | None = None
    ) -> None:
        self.bucket = open_bucket(url, create=True)
        self._keys = keys or {}
        self.log = RunLogWriter(self.bucket, "live", WRITER)
        self.writer = self.take_over(base)
        self.publisher = Outbox(self.writer, self.log, encoding=encoding)
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.syncs = 0

    def take_over(self, base: Path) -> RunWriter:
        with pytest.MonkeyPatch.context() as patch:
            for name, word in self._keys.items():
                patch.setenv(name, word)
            return RunWriter(self.bucket, "live", model="tiny", assets=base)

    def publish(self) -> int:
        self.syncs += 1
        self.publisher.publish(held(self.model.named_parameters()), self.syncs)
        return self.publisher.flush().version

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter += 2e-3 * torch.randn_like(parameter)

    def close(self) -> None:
        self.publisher.close()
        self.log.close()


@contextmanager
def training(folder: Path, template: str = "", **options: Any) -> Iterator[Trainer]:
    """A trainer that has published version 0; `template` replaces its model's chat template."""
    tiny.build(folder / "base", tie=True, seed=0)
    if template:
        (folder / "base" / "chat_template.jinja").write_text(template)
    with closing(Trainer((folder / "bucket").as_uri(), folder / "base", **options)) as trainer:
        trainer.publish()
        yield trainer


def update(trainer: Trainer, replica: Replica) -> int:
    """One step of the trainer; returns the version when the replica serves it."""
    trainer.step()
    version = trainer.publish()
    replica.wait_for(version)
    return version
