"""What a deployment consists of, as a pure function of the command line: nothing is contacted here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from delta_weight_sync.keys import Keys
from delta_weight_sync.plan.prices import GPUS, HARDWARE
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.signing import PUBLIC_KEY
from trainer.deploy.errors import DeployError
from trainer.deploy.stage import APPS, App, stage

MARK = {"DEPLOYED_BY": "delta-weight-sync"}  # a variable: what does not carry it is never changed or deleted
SWITCHED = (PUBLIC_KEY,)  # variables that are taken away from a Space whose plan has them no more
NO_KEY_YET = "made by the first `up`"  # what a dry run has in the place of a key
SLEEP_S = 1800  # a replica that nobody asked anything for so long costs nothing from then on
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class SpacePlan:
    """One Space as it should be. Of secrets only the names are here."""

    repo_id: str
    folder: App  # what is uploaded: see `stage`
    variables: Mapping[str, str]
    secrets: tuple[str, ...]
    hardware: str
    sleep_s: int | None  # None: the Hub decides (after 48 hours on cpu-basic, where nothing else is possible)
    private: bool

    @property
    def usd_per_hour(self) -> float:
        """While it runs."""
        return HARDWARE[self.hardware].usd_per_hour


@dataclass(frozen=True)
class Deployment:
    """A bucket, the environment's Space and the replicas' Spaces; the bucket is always private."""

    owner: str
    name: str
    run: str
    bucket: str
    env: SpacePlan
    replicas: tuple[SpacePlan, ...]

    @property
    def spaces(self) -> tuple[SpacePlan, ...]:
        """All Spaces, the environment's first."""
        return (self.env, *self.replicas)

    @property
    def bucket_url(self) -> str:
        """The bucket as trainer and replicas know it."""
        return f"hf://buckets/{self.bucket}"


def make_plan(owner: str, name: str, *, run: str, hardware: str, replicas: int, public: bool) -> Deployment:
    """The deployment that the command line describes. Raises `DeployError` for what cannot be."""
    _check(owner, name, run, hardware, replicas)
    bucket = f"{owner}/{name}"
    env = SpacePlan(f"{bucket}-env", "env", MARK, ("WORDLE_KEY",), "cpu-basic", None, not public)
    numbers = range(1, replicas + 1)
    spaces = tuple(_replica(bucket, run, hardware, number, public) for number in numbers)
    return Deployment(owner, name, run, bucket, env, spaces)


def signed_by(deployment: Deployment, public_keys: str) -> Deployment:
    """The same deployment, with replicas that believe these keys and nothing else."""
    replicas = tuple(
        replace(plan, variables={**plan.variables, PUBLIC_KEY: public_keys}) for plan in deployment.replicas
    )
    return replace(deployment, replicas=replicas)


def _replica(bucket: str, run: str, hardware: str, number: int, public: bool) -> SpacePlan:
    variables = MARK | {
        "REPLICA_BUCKET": f"hf://buckets/{bucket}",
        "REPLICA_RUN": run,
        "REPLICA_NAME": f"replica-{number}",
        "REPLICA_VLLM_ARGS": f"--tensor-parallel-size {HARDWARE[hardware].gpus}",
    }
    secrets = ("HF_TOKEN", "REPLICA_KEY")
    return SpacePlan(
        f"{bucket}-replica-{number}", "replica", variables, secrets, hardware, SLEEP_S, not public
    )


def _check(owner: str, name: str, run: str, hardware: str, replicas: int) -> None:
    for option, value in (("--owner", owner), ("--name", name)):
        if not _NAME.fullmatch(value):
            raise DeployError(f"{option} {value!r} may hold letters, digits, '-' and '_' only")
    if hardware not in GPUS:
        raise DeployError(
            f"--hardware {hardware!r} cannot serve: a replica needs a GPU with bf16, one of {', '.join(GPUS)}"
        )
    if replicas < 1:
        raise DeployError(f"--replicas {replicas}: at least one replica has to serve")
    try:
        Keys(run)
    except ProtocolError as error:
        raise DeployError(f"--run: {error}") from None


def write_plan(deployment: Deployment, folder: Path) -> None:
    """Write the folders that `up` would upload, and plan.json, into `folder`, which must be new or empty."""
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"--dry-run {folder} is not empty: name a new folder")
    for app in APPS:
        stage(app, folder / app)
    (folder / "plan.json").write_text(json.dumps(asdict(deployment), indent=2) + "\n")
