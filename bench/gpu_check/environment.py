"""Describes this machine: versions, driver, card, bus, clocks, processor and memory."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.gpu_check.report import Row, Rows
from delta_weight_sync import gpu_build

_ASKED = {
    "driver": "driver_version",
    "PCIe, now": "pcie.link.gen.current,pcie.link.width.current",
    "PCIe, at most": "pcie.link.gen.max,pcie.link.width.max",
    "clocks, now": "clocks.sm,clocks.mem",
    "clocks, at most": "clocks.max.sm,clocks.max.memory",
    "power limit": "power.limit",
    "ECC, MIG": "ecc.mode.current,mig.mode.current",
}


def rows(device: torch.device) -> Rows:
    """One row for each fact, and one for each thing that this machine lacks."""
    names = ("torch", "triton", "numba", "vllm", "trl")
    yield Row(
        "versions", ", ".join(f"{name} {_version(name)}" for name in names) + f", CUDA {torch.version.cuda}"
    )
    if device.type == "cuda" and torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        size = f"{card.total_memory / 2**30:.1f} GiB, {card.multi_processor_count} multiprocessors"
        yield Row("GPU", f"{card.name}, sm_{card.major}{card.minor}, {size}")
        for what, fields in _ASKED.items():
            yield Row(what, _driver(fields))
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Row(
        "host", f"{_processor()}, {cores} cores, {memory / 2**30:.0f} GiB, Python {platform.python_version()}"
    )
    for sentence in filter(None, (gpu_build.problem(), *gpu_build.missing())):
        yield Row(sentence)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _driver(fields: str) -> str:
    """What the driver's command nvidia-smi says about the first GPU."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.strip() or "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )
