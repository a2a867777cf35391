"""Peak memory of the publisher, beside the parameters and the one mirror that it states as its cost.

The real publisher hands over versions of the Qwen3-0.6B-shaped set to a bucket in a folder. (The replica's
memory is in section `live`, where a replica runs.)
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import deltas
from bench.change import Change
from bench.results import SCRATCH, Results
from delta_weight_sync import Publisher
from delta_weight_sync.codec import Encoding


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process, as Linux counts it."""

    pid: int | str = "self"

    def forget_peak(self) -> None:
        """Begin to watch for the peak anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def mib(self, field: str) -> int:
        """`VmRSS` (now) or `VmHWM` (peak since `forget_peak`), in MiB."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(field))


def run(results: Results) -> dict[str, Any]:
    """Peaks of one publish at each encoding."""
    change = deltas.qwen()
    measured = {}
    for encoding in ("fast", "small"):
        measured[encoding], change = measure(change, encoding)
    return measured


def measure(change: Change, encoding: Encoding) -> tuple[dict[str, int], Change]:
    """MiB of the model in bf16, and what publishing a version adds at its peak to parameters and mirror.

    Also the change that leads back, for the next measurement.
    """
    folder = SCRATCH / "memory"
    memory = Memory()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    publisher = Publisher(folder.as_uri(), folder, encoding=encoding)
    live = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in change.old.items()}
    publisher.publish(live.items(), 1)
    before = memory.mib("VmRSS")
    memory.forget_peak()
    back = change.taken()
    publisher.publish(live.items(), 2)
    publisher.flush()
    extra = memory.mib("VmHWM") - before
    publisher.close()
    shutil.rmtree(folder)
    return {"model_mib": change.model_bytes >> 20, "extra_mib": extra}, back
