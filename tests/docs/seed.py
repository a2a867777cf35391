"""`python -m tests.docs.seed URL...`: a run of a tiny policy in each bucket, as `make demo` leaves one."""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync import Publisher
from examples import tiny_policy as tiny

RUN, VERSIONS = "demo", 9


@torch.no_grad()
def write(url: str, base: Path) -> None:
    """Publish `VERSIONS` versions of a policy that drifts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with Publisher(f"{url}#{RUN}", base) as publisher:
        for _ in range(VERSIONS):
            publisher.publish(model.named_parameters())
            publisher.flush()
            for parameter in model.parameters():
                parameter += 1e-4 * torch.randn_like(parameter)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(Path(folder), tie=True, seed=0)
        for url in sys.argv[1:]:
            write(url, Path(folder))


if __name__ == "__main__":
    main()
