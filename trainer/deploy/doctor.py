"""Checks everything that a deployment and a trainer need, and names the fix for each problem.

The checks also work before `python -m trainer.deploy up` has made the bucket, the Spaces and the keys.
"""

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from huggingface_hub import HfApi, get_session, parse_local_safetensors_file_metadata
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import GatedRepoError, SafetensorsParsingError

from delta_weight_sync import compat, gpu_build, signing
from delta_weight_sync.cost import HARDWARE
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.store import open_bucket
from delta_weight_sync.trl import hooks
from trainer.deploy import DeployError, hub, jobs, keys
from trainer.deploy.hub import explained

_GB = 10**9
_CLOCK_LIMIT_S = 30.0  # lags in the run's log are computed from the clocks of two machines
# Bytes per weight, with a margin.
_CACHE_BYTES = 2.2  # in HF_HOME: the bf16 download
_SCRATCH_BYTES = 16.0  # in TMPDIR: a state (12), an anchor (2), and what jumps are made from (0.6)
_REPLICA_MARGIN = 4 * _GB  # CUDA graphs and a cache for 20,000 tokens of Qwen3-1.7B
_VLLM_SHARE = 0.92  # of a GPU's memory, vLLM's default


@dataclass
class Setup:
    """What the checks examine. What several checks need of the Hub is requested once, before the first check.

    `result()` of such a fact returns the fact, or raises the error of its request.
    """

    api: HfApi
    owner: str  # user or organization; if it is empty, the owner of the token
    name: str
    model: str  # a Hub id or the folder of a checkpoint
    hardware: str  # of each replica
    space_token: str  # SPACE_HF_TOKEN; may be empty
    config: dict[str, Any]  # the trainer's settings
    on_jobs: bool = False  # whether the apps run as Jobs, and not on Spaces

    def __post_init__(self) -> None:
        with ThreadPoolExecutor() as pool:
            self.account: Future[hub.Account] = pool.submit(hub.Account, self.api)
            self.weights: Future[int] = pool.submit(_weights, self.api, self.model)
            self.owner = self.owner or self.account.result().name
            deployment = self.api, self.owner, self.name
            # Both are empty before the first `up`, and one of them always.
            self.spaces: Future[list[hub.Space]]
            self.jobs: Future[list[Any]]
            if self.on_jobs:
                self.spaces = pool.submit(list)
                self.jobs = pool.submit(jobs.jobs_of, *deployment)
            else:
                self.spaces = pool.submit(hub.spaces_of, *deployment)
                self.jobs = pool.submit(list)


def _weights(api: HfApi, model: str) -> int:
    """The number of the model's weights."""
    if Path(model).is_dir():
        files = Path(model).glob("*.safetensors")
        counts = (parse_local_safetensors_file_metadata(file).parameter_count for file in files)
        total = sum(sum(count.values()) for count in counts)
    else:
        with explained(f"looking for --model {model}"):
            info = api.model_info(model)
        total = info.safetensors.total if info.safetensors else 0
    if not total:
        raise DeployError(f"{model} has no safetensors files: choose a --model that has them")
    return total


def examine(setup: Setup) -> bool:
    """Run all checks and print the result of each. Returns True if there is no problem."""
    problems = 0
    for name, check in CHECKS.items():
        try:
            label = "ok     "
            text = check(setup)
        except (DeployError, DeltaWeightSyncError, SafetensorsParsingError) as error:
            label = "PROBLEM"
            text = hub.masked(str(error), (setup.space_token,))
            problems += 1
        if text:
            print(f"{label}  {name}: {text}", flush=True)
    print(f"{problems} of {len(CHECKS)} checks found a problem" if problems else "no problem found")
    return not problems


def _token(setup: Setup) -> str:
    account = setup.account.result()
    account.require_write(setup.owner)
    if setup.on_jobs:
        account.require_jobs(setup.owner)
    return f"the token of {account.name} ({account.role}) may write for {setup.owner}"


def _space_token(setup: Setup) -> str:
    apps = [] if setup.space_token else [space for space in setup.spaces.result() if not space.is_page]
    if apps and not any(app.private for app in apps):
        return "not set here; only `up` and trainers that use private Spaces need it"
    hub.require_read_only(setup.api, setup.space_token)
    return "SPACE_HF_TOKEN is read-only"


def _plan(setup: Setup) -> str:
    owner = setup.owner
    if setup.on_jobs:
        jobs.require_client(setup.api)
        known = jobs.prices(setup.api)
        jobs.require_hardware("--hardware", setup.hardware, known)
        cost = f"a replica costs ${known[setup.hardware]:.2f} per hour"
        return f"Jobs need no plan, but credits, which only {hub.BILLING} shows; {cost}"
    account = setup.account.result()
    payer = account.orgs.get(owner, account.who)
    paid = ("isPro",) if payer is account.who else ("plan", "isEnterprise")  # fields that show a paid plan
    if not any(payer.get(field) for field in paid):
        fix = "subscribe at https://huggingface.co/pricing"
        raise DeployError(f"{owner} has no paid plan, but {hub.PLAN}: {fix}")
    if payer.get("canPay") is False:
        fix = f"add a payment method and credits at {hub.BILLING}"
        raise DeployError(f"{owner} cannot pay for a GPU: {fix}")
    return f"{owner} may run Docker Spaces"


def _licence(setup: Setup) -> str:
    if Path(setup.model).is_dir():
        return f"{setup.model} is a local folder"
    with explained(f"asking for access to --model {setup.model}"):
        try:
            setup.api.auth_check(setup.model)
        except GatedRepoError:
            page = f"{setup.api.endpoint}/{setup.model} as {setup.account.result().name}"
            raise DeployError(f"{setup.model} is gated: accept its licence at {page}") from None
    return f"{setup.account.result().name} may read {setup.model}"


def _clock(setup: Setup) -> str:
    with explained("asking the Hub for the time"):
        date = get_session().head(setup.api.endpoint).headers.get("date")
    if not date:
        raise DeployError(f"{setup.api.endpoint} does not say the time: look for a proxy that hides it")
    skew = time.time() - parsedate_to_datetime(date).timestamp()
    if abs(skew) > _CLOCK_LIMIT_S:
        relation = "ahead of" if skew > 0 else "behind"
        problem = f"this machine's clock is {abs(skew):.0f} s {relation} the Hub's"
        raise DeployError(f"{problem}: set it, for example with `timedatectl set-ntp true`")
    return f"this machine's clock is within {_CLOCK_LIMIT_S:.0f} s of the Hub's"


def _signatures(setup: Setup) -> str:
    file = keys.signing_file(setup.owner, setup.name)
    in_environment, _ = signing.keys_in(os.environ)
    in_file = keys.read_signing_keys(setup.owner, setup.name)
    signer = in_file[0] if in_file else ""  # a public key
    if in_environment:
        signer = in_environment.public
    replicas = {space.repo_id: space.variables for space in setup.spaces.result() if space.is_replica}
    for app, (*_, job) in jobs.latest(setup.jobs.result()).items():
        if app.startswith("replica"):
            replicas[f"the Job {job.id}"] = job.environment or {}
    if not replicas:
        return "there is no replica yet; `up` makes them check signatures"
    trusted = {name: variables.get(signing.PUBLIC_KEY) for name, variables in replicas.items()}
    if not any(trusted.values()):
        return "no replica checks signatures; `up` without --unsigned changes that"
    if not signer:
        raise DeployError(f"the signing key is missing: copy {file} from the machine where `up` made it")
    for name, public in trusted.items():
        if signer not in (public or "").split(","):
            problem = f"{name} trusts {public or 'every version'}, but this machine signs with {signer}"
            raise DeployError(f"{problem}: run `up`, and start the trainer with the keys in {file}")
    return f"replicas trust {signing.fingerprint(signer)}, with which this machine signs"


def _versions(setup: Setup) -> str:
    compat.require(hooks.FEATURES, hooks.EVERY_RANK)  # the trainer asks the same
    version = compat.installed(hooks.TRL).version
    return f"trl {version} can be used; `delta-weight-sync doctor` examines all packages"


def _disk(setup: Setup) -> str:
    weights = setup.weights.result()
    download = 0 if Path(setup.model).is_dir() else _CACHE_BYTES * weights
    folders = (
        (Path(HF_HOME), "HF_HOME", download),
        (Path(tempfile.gettempdir()), "TMPDIR", _SCRATCH_BYTES * weights),
    )
    needed = defaultdict[int, float](float)  # by disk: both folders may be on one
    for folder, variable, size in folders:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        needed[existing.stat().st_dev] += size
        need = needed[existing.stat().st_dev]
        free = shutil.disk_usage(existing).free
        if free < need:
            fix = f"free some space, or set {variable} to a folder on a larger disk"
            problem = f"{existing} has {free / _GB:.1f} GB free, but {setup.model} needs {need / _GB:.1f} GB"
            raise DeployError(f"{problem}: {fix}")
    return f"{setup.model} needs {sum(needed.values()) / _GB:.1f} GB, and there is enough space"


def _replica_gpu(setup: Setup) -> str:
    if not HARDWARE[setup.hardware].gpus:
        return f"{setup.hardware} has none: vLLM runs on its CPU, which is enough for the tiny policy only"
    room = {name: _VLLM_SHARE * spec.gpus * spec.gpu_gb * _GB for name, spec in HARDWARE.items()}
    need = 2 * setup.weights.result() + _REPLICA_MARGIN
    here = room[setup.hardware]
    if need > here:
        fitting = [name for name in room if room[name] >= need]
        cheapest = min(fitting, key=lambda name: HARDWARE[name].usd_per_hour, default="")
        fix = f"use --hardware {cheapest}" if cheapest else "use a smaller model"
        problem = f"but vLLM can use only {here / _GB:.0f} GB of {setup.hardware}"
        raise DeployError(f"{setup.model} needs {need / _GB:.0f} GB, {problem}: {fix}")
    return f"{setup.model} needs {need / _GB:.1f} of {here / _GB:.0f} GB on {setup.hardware}"


def _trainer_gpu(setup: Setup) -> str:
    from trainer import memory  # here, because this import is slow and most checks do not need it

    room = _gpu_bytes()  # with several GPUs, FSDP divides the model among them
    if not (needs := memory.parts(setup.model, setup.config, max(1, len(room)))):
        return f"{setup.model} has no config from which its memory can be computed"
    if not room:
        size = memory.words(needs) if sum(needs.values()) >= _GB else "any size"
        return f"this machine has no GPU; train on a machine with a GPU of {size}"
    if problem := memory.problem(needs, min(room)):
        raise DeployError(problem)
    each = f"each of {len(room)} GPUs needs" if len(room) > 1 else "needs"
    return f"{setup.model}: {each} {memory.words(needs)} of {min(room) / _GB:.0f} GB"


def _gpu_bytes() -> list[int]:
    import torch  # here, because this import is slow and most checks do not need it

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_properties(index).total_memory for index in range(count)]


def _gpu_software(setup: Setup) -> str:
    if not gpu_build.gpu_count():
        return ""
    if found := [sentence for sentence in (gpu_build.problem(), *gpu_build.missing()) if sentence]:
        raise DeployError("; ".join(found))
    return "the driver, shared memory and software for the GPU are in order"


def _bucket(setup: Setup) -> str:
    name = f"{setup.owner}/{setup.name}"
    if (private := hub.bucket_is_private(setup.api, name)) is None:
        return f"{name} does not exist yet; `up` makes it"
    bucket = open_bucket(f"hf://buckets/{name}")
    key = f"doctor/{uuid4().hex}"
    bucket.put(key, b"doctor")
    try:
        bucket.get(key)
    finally:
        bucket.delete([key])
    return f"{name} can be written and read{'' if private else '; it is public: anyone can read the weights'}"


# A check returns a sentence that says what is fine, or "" if the check does not apply here. If it finds a
# problem, it raises an error that names the fix.
CHECKS: dict[str, Callable[[Setup], str]] = {
    "token": _token,
    "Space's token": _space_token,
    "plan": _plan,
    "model licence": _licence,
    "clock": _clock,
    "signatures": _signatures,
    "versions": _versions,
    "disk": _disk,
    "GPU of the replicas": _replica_gpu,
    "GPU of the trainer": _trainer_gpu,
    "software for GPUs": _gpu_software,
    "bucket": _bucket,  # last, because it is the only check that writes to the Hub
}
