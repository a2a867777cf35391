"""Writes runs for tests with the real publisher."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync import Publisher
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.digest import state_digest, to_hex
from tests.support import tiny_policy as tiny


def write_run(url: str, base: Path, versions: int, run: str = "test", drift: float = 1e-4) -> list[str]:
    """Publish that many versions of a tiny policy that drifts; returns the digest of each."""
    if not base.exists() or not any(base.iterdir()):
        tiny.build(base, tie=True, seed=0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    digests = []
    chance = torch.Generator().manual_seed(0)
    with Publisher(f"{url}#{run}", base) as publisher:
        for _ in range(versions):
            publisher.publish(model.named_parameters())
            publisher.flush()
            digests.append(to_hex(state_digest({name: to_bits(p) for name, p in model.named_parameters()})))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += drift * torch.randn(parameter.shape, generator=chance)
    return digests
