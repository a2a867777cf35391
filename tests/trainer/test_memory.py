"""What publishing costs in memory: one bf16 copy of the model, and a little."""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from delta_weight_sync import Publisher, parallel

MIRROR = 80 * 800 * 800 * 2  # bytes of a model that takes 205 MB in float32
# The C library then gives every block of this size to the program by itself, and counts the bytes of these.
COUNTED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}


@pytest.mark.full
def test_publishing_takes_one_bf16_copy_of_the_model(tmp_path):
    """In a process of its own: what is counted is the most that the whole process ever had at once."""
    command = [sys.executable, "-m", "tests.trainer.test_memory", str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | COUNTED)
    assert MIRROR <= int(done.stdout) < 1.25 * MIRROR, "one copy, and no second one"


def publish(folder: Path) -> int:
    """Two versions after the base, 0.5 % changed in each; what large blocks of memory grew by, at most."""
    torch.set_num_threads(1)
    parallel.THREADS = 1  # each codes a group of tensors, in memory of its own
    (folder / "config.json").write_text("{}")
    weights = {f"layer.{i}": torch.randn(800, 800) for i in range(80)}
    publisher = Publisher((folder / "bucket").as_uri(), base=folder)
    before = most_so_far()
    for sync in range(3):
        publisher.publish(weights.items(), sync)
        publisher.flush()
        for tensor in weights.values():
            tensor.view(-1)[::200] *= 1.01
    publisher.close()
    return most_so_far() - before


def most_so_far() -> int:
    """The most bytes in large blocks at any moment, which the C library tells on stderr only."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as told:
        os.dup2(told.fileno(), 2)
        ctypes.CDLL(None).malloc_stats()
        os.dup2(stderr, 2)
        os.close(stderr)
        told.seek(0)
        return int(re.search(rb"max mmap bytes\s*=\s*(\d+)", told.read())[1])


if __name__ == "__main__":
    print(publish(Path(sys.argv[1])))
