"""Checks everything that a deployment and a trainer need, and names the fix for each problem.

The checks also work before the first `up`: what `up` will make may be missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from huggingface_hub import HfApi, get_session, parse_local_safetensors_file_metadata
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import GatedRepoError
from huggingface_hub.hf_api import ModelInfo

from delta_weight_sync import cli, compat, gpu_build, signing
from delta_weight_sync.cost import HARDWARE
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.records import FORMAT
from delta_weight_sync.store import open_bucket
from trainer.deploy import DeployError, hub, keys
from trainer.deploy.hub import explained

_GB = 10**9
_CLOCK_LIMIT_S = 30.0  # lags in the run's log are differences between the clocks of two machines
_DISK_BYTES = 4.4  # per weight: the download and an anchor before its upload, both bf16, and a margin
_REPLICA_MARGIN = 4 * _GB  # CUDA graphs and a cache for 20 000 tokens of Qwen3-1.7B
_VLLM_SHARE = 0.92  # of a GPU's memory, vLLM's default
_WRONG = re.compile(r" *(wrong|error) ")  # how lines of `delta-weight-sync doctor` begin that need a cure


@dataclass(frozen=True)
class Setup:
    """What the checks examine. Each fact is requested once, because the Hub limits requests."""

    api: HfApi
    given_owner: str  # may be empty
    name: str
    model: str  # a Hub id or the folder of a checkpoint
    hardware: str  # of each replica
    space_token: str  # SPACE_HF_TOKEN; may be empty
    config: dict[str, Any]  # the trainer's

    @cached_property
    def account(self) -> hub.Account:
        return hub.Account(self.api)

    @property
    def owner(self) -> str:
        """The owner of bucket and Spaces, by default the token's account."""
        return self.given_owner or self.account.name

    @cached_property
    def spaces(self) -> list[hub.Space]:
        """The Spaces of the deployment; empty before the first `up`."""
        return hub.spaces_of(self.api, self.owner, self.name)

    @property
    def replicas(self) -> list[hub.Space]:
        return [space for space in self.spaces if "-replica-" in space.repo_id]

    @cached_property
    def model_info(self) -> ModelInfo | None:
        """The Hub's description of the model; None for a local folder."""
        if Path(self.model).is_dir():
            return None
        with explained(f"looking for --model {self.model}"):
            return self.api.model_info(self.model)

    @cached_property
    def weights(self) -> int:
        if info := self.model_info:
            total = info.safetensors.total if info.safetensors else 0
        else:
            files = Path(self.model).glob("*.safetensors")
            counts = (parse_local_safetensors_file_metadata(file).parameter_count for file in files)
            total = sum(sum(count.values()) for count in counts)
        if not total:
            raise DeployError(f"{self.model} has no safetensors files: choose a --model that has them")
        return total


def examine(setup: Setup) -> bool:
    """Run all checks and print the result of each. Returns True if there is no problem."""
    problems = 0
    for name, check in CHECKS.items():
        try:
            label, text = "ok     ", check(setup)
        except (DeployError, DeltaWeightSyncError) as error:
            label, text, problems = "PROBLEM", hub.masked(str(error), (setup.space_token,)), problems + 1
        if text:
            print(f"{label}  {name}: {text}", flush=True)
    print(f"{problems} of {len(CHECKS)} checks found a problem" if problems else "no problem found")
    return not problems


def _token(setup: Setup) -> str:
    setup.account.require_write(setup.owner)
    return f"the token of {setup.account.name} ({setup.account.role}) may write for {setup.owner}"


def _space_token(setup: Setup) -> str:
    if not setup.space_token and setup.spaces and not any(space.private for space in setup.spaces):
        return "not set here; only a trainer that uses private Spaces needs it"
    hub.require_read_only(setup.api, setup.space_token)
    return "SPACE_HF_TOKEN is read-only"


def _plan(setup: Setup) -> str:
    setup.account.require_plan(setup.owner)
    return f"{setup.owner} may run Docker Spaces"


def _licence(setup: Setup) -> str:
    info, model = setup.model_info, setup.model
    if info is None or not info.gated:
        return f"{model} is not gated"
    with explained(f"asking for access to {model}"):
        try:
            setup.api.auth_check(model)
        except GatedRepoError:
            page = f"{setup.api.endpoint}/{model} as {setup.account.name}"
            raise DeployError(f"{model} is gated: accept its licence at {page}") from None
    return f"the licence of {model} was accepted"


def _clock(setup: Setup) -> str:
    with explained("asking the Hub for the time"):
        date = get_session().head(setup.api.endpoint).headers["date"]
    skew = time.time() - parsedate_to_datetime(date).timestamp()
    if abs(skew) > _CLOCK_LIMIT_S:
        relation = "ahead of" if skew > 0 else "behind"
        problem = f"this machine's clock is {abs(skew):.0f} s {relation} the Hub's"
        effect = "signed links fail, and all lags in the run's log are wrong"
        raise DeployError(f"{problem}, so {effect}: set it, for example with `timedatectl set-ntp true`")
    return f"this machine's clock is within {_CLOCK_LIMIT_S:.0f} s of the Hub's"


def _awake(setup: Setup) -> str:
    idle = [space for space in setup.spaces if space.runtime.stage != "RUNNING"]
    if not idle:
        return f"all {len(setup.spaces)} run" if setup.spaces else "there are none yet; `up` makes them"
    states = ", ".join(f"{space.repo_id} is {space.runtime.stage}" for space in idle)
    asleep = all(space.runtime.stage in hub.ASLEEP for space in idle)
    fix = "run `resume` (a trainer also wakes sleeping ones)" if asleep else "see `logs`, then run `up`"
    raise DeployError(f"{states}: {fix}")


def _protocol(setup: Setup) -> str:
    running = [space for space in setup.replicas if space.runtime.stage == "RUNNING"]
    for space in running:
        if (spoken := hub.served(space)[0]) != FORMAT:
            fix = "run `up` to update the Space"
            raise DeployError(f"{space.repo_id} reads {spoken}, but this trainer writes {FORMAT}: {fix}")
    return f"{len(running)} replicas read {FORMAT}" if running else "no replica is running"


def _signatures(setup: Setup) -> str:
    file = keys.signing_file(setup.owner, setup.name)
    in_environment, _ = signing.keys_in(os.environ)
    in_file = keys.read_signing_keys(setup.owner, setup.name)
    signs = in_environment.public if in_environment else in_file[0] if in_file else None
    trusted = {space.repo_id: space.variables.get(signing.PUBLIC_KEY) for space in setup.replicas}
    if not trusted:
        return "there are no replicas yet; `up` makes the keys"
    if all(public is None for public in trusted.values()):
        return "replicas do not check signatures; to change that, run `up` without --unsigned"
    if not signs:
        raise DeployError(f"the signing key is missing: copy {file} from the machine where `up` made it")
    for repo_id, public in trusted.items():
        if signs not in (public or "").split(","):
            problem = f"{repo_id} trusts {public or 'every version'}, but this machine signs with {signs}"
            raise DeployError(f"{problem}: run `up`, and start the trainer with the keys in {file}")
    return f"replicas trust {signing.fingerprint(signs)}, with which this machine signs"


def _versions(setup: Setup) -> str:
    release = compat.require("trl", "every_rank", "replicas")  # as the trainer does
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            cli.main(["doctor"])
    except SystemExit:
        wrong = [line.strip() for line in said.getvalue().splitlines() if _WRONG.match(line)]
        fix = "run `pip install -r requirements.txt`; `delta-weight-sync doctor` shows more"
        raise DeployError(f"{'; '.join(wrong or ['a package is missing'])}: {fix}") from None
    return f"trl {release.version} and the packages of the library can be used"


def _disk(setup: Setup) -> str:
    need = f"{setup.model} needs {_DISK_BYTES * setup.weights / _GB:.1f} GB"
    for folder, variable in ((Path(HF_HOME), "HF_HOME"), (Path(tempfile.gettempdir()), "TMPDIR")):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if free < _DISK_BYTES * setup.weights:
            fix = f"free some space, or set {variable} to a folder on a larger disk"
            raise DeployError(f"{existing} has {free / _GB:.1f} GB free, but {need}: {fix}")
    return f"{need}, and there is enough space"


def _replica_gpu(setup: Setup) -> str:
    room = {name: _VLLM_SHARE * spec.gpus * spec.gpu_gb * _GB for name, spec in HARDWARE.items()}
    need, here = 2 * setup.weights + _REPLICA_MARGIN, room[setup.hardware]
    if need > here:
        fitting = [name for name in room if room[name] >= need]
        cheapest = min(fitting, key=lambda name: HARDWARE[name].usd_per_hour, default="")
        fix = f"use --hardware {cheapest}" if cheapest else "use a smaller model"
        problem = f"but vLLM can use only {here / _GB:.0f} GB of {setup.hardware}"
        raise DeployError(f"{setup.model} needs {need / _GB:.0f} GB, {problem}: {fix}")
    return f"{setup.model} needs {need / _GB:.1f} of {here / _GB:.0f} GB on {setup.hardware}"


def _trainer_gpu(setup: Setup) -> str:
    from trainer import memory  # slow, and no other check needs it

    if not (needs := memory.parts(setup.model, setup.config)):
        return f"{setup.model} has no config from which its memory can be computed"
    room = _gpu_bytes()
    if not room:
        return f"this machine has none; train on one with {memory.words(needs)}"
    if problem := memory.problem(needs, room):
        raise DeployError(problem)
    return f"{setup.model} needs {memory.words(needs)} of {room / _GB:.0f} GB"


def _gpu_bytes() -> int:
    import torch  # slow, and no other check needs it

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return sum(torch.cuda.get_device_properties(index).total_memory for index in range(count))


def _gpu_software(setup: Setup) -> str:
    if not gpu_build.gpu_count():
        return ""
    if found := [sentence for sentence in (gpu_build.problem(), *gpu_build.missing()) if sentence]:
        raise DeployError("; ".join(found))
    return "driver, C compiler, Python's headers and shared memory are in order"


def _bucket(setup: Setup) -> str:
    name = f"{setup.owner}/{setup.name}"
    if (private := hub.bucket_is_private(setup.api, name)) is None:
        return f"{name} does not exist yet; `up` makes it"
    bucket, key, content = open_bucket(f"hf://buckets/{name}"), f"doctor/{uuid4().hex}", uuid4().bytes
    bucket.put(key, content)
    try:
        if bucket.get(key) != content:
            raise DeployError(f"{name} did not return the bytes that were written: try again, then report it")
    finally:
        bucket.delete([key])
    return f"{name} can be written and read{'' if private else '; it is public: anyone can read the weights'}"


# A check returns what it found in order ("": it does not apply here), or raises an error with the fix.
CHECKS: dict[str, Callable[[Setup], str]] = {
    "token": _token,
    "Space's token": _space_token,
    "plan": _plan,
    "model licence": _licence,
    "clock": _clock,
    "Spaces awake": _awake,
    "protocol": _protocol,
    "signatures": _signatures,
    "versions": _versions,
    "disk": _disk,
    "GPU of the replicas": _replica_gpu,
    "GPU of the trainer": _trainer_gpu,
    "software for GPUs": _gpu_software,
    "bucket": _bucket,  # last, because opening a bucket changes the time limits of the Hub's client
}
