"""What publishing costs in memory: one bf16 copy of the model, and a little."""

import subprocess
import sys
from pathlib import Path

import torch

from shared.buckets import open_bucket
from shared.runlog import RunLogWriter
from trainer.publisher import Publisher
from trainer.run_writer import RunWriter

MIRROR = 20 * 1600 * 1600 * 2  # bytes of a model that takes 205 MB in float32
MARGIN = 70_000_000  # compiled kernels, a chunk, what changed, the encoder; far less than one more copy


def test_publishing_takes_one_bf16_copy_of_the_model(tmp_path):
    """In a process of its own, because the highest use of memory is that of the whole process."""
    command = [sys.executable, "-m", "tests.trainer.test_memory", str(tmp_path)]
    grown = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert MIRROR < grown < MIRROR + MARGIN


def publish(folder: Path) -> int:
    """Two versions after the base, each with 1 % of the rows changed; bytes that the process grew at most."""
    torch.set_num_threads(1)
    (folder / "config.json").write_text("{}")
    weights = {f"layer.{i}": torch.randn(1600, 1600) for i in range(20)}
    bucket = open_bucket((folder / "bucket").as_uri(), create=True)
    publisher = Publisher(
        RunWriter(bucket, "run", model="policy", assets=folder), RunLogWriter(bucket, "run")
    )
    before = memory("VmRSS")
    for sync in range(3):
        publisher.publish(weights.items(), sync)
        publisher.flush()
        for tensor in weights.values():
            tensor[:16] *= 1.01
    publisher.close()
    return memory("VmHWM") - before


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    print(publish(Path(sys.argv[1])))
