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

from delta_weight_sync import Publisher, util

MIRROR = 80 * 800 * 800 * 2  # bytes of a model that takes 205 MB in float32
# The C library then gives every block of this size to the program by itself, and counts the bytes of these.
COUNTED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}


@pytest.mark.full
@pytest.mark.parametrize(("versions", "most"), [(3, 1.25), (10, 1.8)], ids=["deltas", "and a jump"])
def test_publishing_takes_one_bf16_copy_of_the_model(tmp_path, versions, most):
    """In a process of its own: what is counted is the most that the whole process ever had at once.

    Of a jump the changes of 33 M weights are in memory at a time: here that is two thirds of the model.
    """
    command = [sys.executable, "-m", "tests.publish.test_memory", str(tmp_path), str(versions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | COUNTED)
    assert MIRROR <= int(done.stdout) < most * MIRROR, "one copy, and no second one"


def publish(folder: Path, versions: int) -> int:
    """So many versions, 0.5 % changed in each; what large blocks of memory grew by, at most.

    The copies that jumps are made from are files, whose pages are not counted.
    """
    torch.set_num_threads(1)
    util.THREADS = 1  # each codes a group of tensors, in memory of its own
    (folder / "config.json").write_text("{}")
    weights = {f"layer.{i}": torch.randn(800, 800) for i in range(80)}
    publisher = Publisher((folder / "bucket").as_uri(), base=folder)
    before = most_so_far()
    for sync in range(versions):
        publisher.publish(weights.items(), sync)
        newest = publisher.flush()
        assert publisher._outbox
        assert publisher._outbox.shortcuts.idle(600)
        for tensor in weights.values():
            tensor.view(-1)[sync::200] *= 1.01
    assert len(newest.jumps) == (versions - 2) // 8
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
    print(publish(Path(sys.argv[1]), int(sys.argv[2])))
