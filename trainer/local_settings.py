"""What each program of `make demo` is started with: one configuration a policy, all on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from delta_weight_sync import gpu_build

RUN = "demo"
# Trainer and replica share the machine: a core each, or a part of the one GPU.
TRAINER_SHARE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_GPU_SHARE = "--gpu-memory-utilization 0.3"
_CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Policy:
    """A local policy: how its training is configured and what its replica needs."""

    config: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_mib: int  # on a CPU, where filling it is a good part of the start
    learned: str  # what is measured on tasks that training leaves out
    plays: bool  # the environment's games


POLICIES = {
    "wordle-tiny": Policy(
        "wordle_tiny.yaml",
        max_model_len=256,
        max_num_seqs=64,
        kv_cache_mib=64,
        learned="games solved on held-out words",
        plays=True,
    ),
    "smollm2": Policy(
        "smollm2.yaml",
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_mib=1024,
        learned="letters right on held-out words",
        plays=False,
    ),
}


def env_settings(port: int) -> dict[str, str]:
    """Variables of the environment's Space."""
    return {"WORDLE_HOST": "127.0.0.1", "WORDLE_PORT": str(port)}


def replica_settings(policy: Policy, bucket_url: str, port: int, folder: Path) -> dict[str, str]:
    """Variables of the replica's Space."""
    cpu_share = f"--kv-cache-memory-bytes {policy.kv_cache_mib << 20}"
    return {
        "REPLICA_BUCKET": bucket_url,
        "REPLICA_RUN": RUN,
        "REPLICA_NAME": "replica-1",
        "REPLICA_HOST": "127.0.0.1",
        "REPLICA_PORT": str(port),
        "REPLICA_POLL_S": "0.1",
        "REPLICA_MAX_MODEL_LEN": str(policy.max_model_len),
        "REPLICA_MAX_NUM_SEQS": str(policy.max_num_seqs),
        "REPLICA_FOLDER": str(folder),
        "REPLICA_VLLM_ARGS": _GPU_SHARE if gpu_build.installed() else cpu_share,
        "OMP_NUM_THREADS": "1",
    }


def trainer_command(
    policy: Policy, model: Path, bucket_url: str, replica_url: str, env_url: str
) -> list[str]:
    """Module and arguments of the trainer, without its time."""
    command = ["trainer.train", "--config", str(_CONFIGS / policy.config), "--model", str(model)]
    command += ["--bucket", bucket_url, "--run", RUN, "--replicas", replica_url, "--env_url", env_url]
    return [*command, *([] if gpu_build.installed() else ["--use_cpu", "true"])]
