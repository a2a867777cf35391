"""Writes runs for tests with the real publisher."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.publish.publisher import Publisher
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket
from trainer.policies import tiny


def write_run(url: str, base: Path, versions: int) -> list[str]:
    """Publish that many versions of a tiny policy that drifts; returns the digest of each."""
    if not base.exists() or not any(base.iterdir()):
        tiny.build(base, tie=True, seed=0)
    bucket = open_bucket(url, create=True)
    log = RunLogWriter(bucket, "test")
    publisher = Publisher(RunWriter(bucket, "test", model="tiny", assets=base), log)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    digests = []
    for sync in range(1, versions + 1):
        publisher.publish(model.named_parameters(), sync)
        publisher.flush()
        digests.append(to_hex(state_digest({name: to_bits(p) for name, p in model.named_parameters()})))
        _drift(model)
    publisher.close()
    log.close()
    return digests


@torch.no_grad()
def _drift(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter += 1e-4 * torch.randn_like(parameter)
