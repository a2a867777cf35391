"""What the figures belong to."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from delta_weight_sync import gpu_build


def lines() -> Iterator[str]:
    """Versions, the GPU, and what this machine lacks for it."""
    names = ("torch", "triton", "numba", "vllm")
    yield "      " + ", ".join(f"{name} {_version(name)}" for name in names) + f", CUDA {torch.version.cuda}"
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        memory = f"{card.total_memory / 2**30:.0f} GiB, {card.multi_processor_count} multiprocessors"
        yield f"      {card.name}, {memory}, driver {_driver()}"
    for sentence in filter(None, (gpu_build.problem(), *gpu_build.missing())):
        yield f"      {sentence}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _driver() -> str:
    """As the kernel's module says it."""
    place = Path("/proc/driver/nvidia/version")
    words = place.read_text().splitlines()[0].split() if place.exists() else []
    return next((word for word in words if word[:1].isdigit()), "unknown")
