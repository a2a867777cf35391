"""`python -m tests.docs.seed URL...`: a run of a tiny policy in each bucket, as `make demo` leaves one."""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync.publish.publisher import Publisher
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket
from trainer.policies import tiny

RUN, VERSIONS = "demo", 9


@torch.no_grad()
def write(url: str, base: Path) -> None:
    """Publish `VERSIONS` versions of a policy that drifts."""
    torch.manual_seed(0)
    bucket = open_bucket(url, create=True)
    log = RunLogWriter(bucket, RUN)
    publisher = Publisher(RunWriter(bucket, RUN, model="tiny", assets=base), log)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for sync in range(1, VERSIONS + 1):
        publisher.publish(model.named_parameters(), sync)
        publisher.flush()
        for parameter in model.parameters():
            parameter += 1e-4 * torch.randn_like(parameter)
    publisher.close()
    log.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(Path(folder), tie=True, seed=0)
        for url in sys.argv[1:]:
            write(url, Path(folder))


if __name__ == "__main__":
    main()
