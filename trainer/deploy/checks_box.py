"""Doctor's checks of machines: what is installed here, free disk, and whether the model fits the GPUs."""

from __future__ import annotations

import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from huggingface_hub.constants import HF_HOME
from packaging.requirements import Requirement

from delta_weight_sync import gpu_build
from delta_weight_sync.plan.prices import HARDWARE
from trainer.deploy.checks_scene import Problem, Scene
from trainer.deploy.stage import CHECKOUT

_GB = 10**9
_ON_DISK = 4.4  # bytes per weight: two copies in bf16, the download and an anchor on its way, and some room
_TRAINER_BYTES = 16  # per weight, in fp32: itself, its gradient and AdamW's two moments
_TRAINER_ROOM = 5 * _GB  # activations at the run files' token budget: computed, not measured
_REPLICA_ROOM = 4 * _GB  # CUDA graphs and a cache for 20 000 tokens of Qwen3-1.7B
_VLLM_SHARE = 0.9  # of a GPU's memory, by its default


def versions(scene: Scene) -> str:
    """What is installed is what requirements.txt asks for."""
    lines = [line.split("#")[0].strip() for line in (CHECKOUT / "requirements.txt").read_text().splitlines()]
    named = [line for line in lines if line and not line.startswith("-")]  # the rest is the library itself
    wanted = [Requirement(line) for line in (*named, *(metadata.requires("delta-weight-sync") or ()))]
    wrong = [fault for requirement in wanted if (fault := _fault(requirement))]
    if wrong:
        raise Problem(f"{'; '.join(wrong)}; run `pip install -r requirements.txt`")
    return f"{len(wanted)} packages as in requirements.txt"


def _fault(requirement: Requirement) -> str:
    if requirement.marker and not requirement.marker.evaluate():
        return ""
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    wanted = requirement.specifier
    return "" if wanted.contains(found, prereleases=True) else f"{requirement.name} is {found}, not {wanted}"


def disk(scene: Scene) -> str:
    """There is room for the model's download, and for an anchor on its way to the bucket."""
    need = _ON_DISK * scene.weights
    for folder, variable in ((_existing(Path(HF_HOME)), "HF_HOME"), (Path(tempfile.gettempdir()), "TMPDIR")):
        free = shutil.disk_usage(folder).free
        if free < need:
            raise Problem(
                f"{folder} has {free / _GB:.1f} GB free and {scene.model} needs {need / _GB:.1f} GB; delete"
                f" something, or set {variable} to a larger disk"
            )
    return f"room for the {need / _GB:.1f} GB that {scene.model} needs"


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def replica_gpu(scene: Scene) -> str:
    """The weights and a cache fit the replicas' GPUs."""
    hardware = HARDWARE[scene.hardware]
    room, need = _VLLM_SHARE * hardware.gpus * hardware.gpu_gb * _GB, 2 * scene.weights + _REPLICA_ROOM
    if need > room:
        fitting = [n for n, h in HARDWARE.items() if _VLLM_SHARE * h.gpus * h.gpu_gb * _GB >= need]
        cheapest = min(fitting, key=lambda n: HARDWARE[n].usd_per_hour, default="")
        advice = f"--hardware {cheapest}" if cheapest else "a smaller model"
        raise Problem(
            f"{scene.model} needs {need / _GB:.0f} GB and vLLM takes {room / _GB:.0f} GB of {scene.hardware};"
            f" use {advice}"
        )
    return f"{scene.model} needs {need / _GB:.1f} of {room / _GB:.0f} GB on {scene.hardware}"


def trainer_gpu(scene: Scene) -> str:
    """The trainer's state fits this machine's GPUs, if it has any."""
    need, room = _TRAINER_BYTES * scene.weights + _TRAINER_ROOM, _gpu_bytes()
    if not room:
        return f"there is none here: deploy from here, train where {need / _GB:.0f} GB of GPU memory are"
    if need > room:
        raise Problem(
            f"to train {scene.model} takes {need / _GB:.0f} GB and the GPUs here have {room / _GB:.0f} GB;"
            " use a smaller --model, a larger GPU, or more of them with `accelerate launch --use_fsdp`"
        )
    return f"{scene.model} needs {need / _GB:.0f} of {room / _GB:.0f} GB"


def gpu_software(scene: Scene) -> str:
    """Driver, compiler and shared memory do for a build for GPUs; nothing is said where there are none."""
    if not gpu_build.gpus():
        return ""
    if found := [sentence for sentence in (gpu_build.problem(), *gpu_build.lacks()) if sentence]:
        raise Problem("; ".join(found))
    return "the driver, a C compiler, Python's headers and shared memory are there"


def _gpu_bytes() -> int:
    """Memory of all GPUs of this machine that its driver can use, 0 without one."""
    import torch  # the other checks and commands do without it, and it is slow to import

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return sum(torch.cuda.get_device_properties(index).total_memory for index in range(count))
