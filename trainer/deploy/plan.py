"""A deployment's plan: bucket, Spaces and files. It depends only on command line, checkout and public keys.

An app's Space gets the tracked files that its Dockerfile needs; a static Space gets a folder's files.
`trainer.deploy.jobs` runs the same apps, with the same settings, as Jobs.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from delta_weight_sync.cost import HARDWARE
from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.records import Keys
from delta_weight_sync.signing import PUBLIC_KEY
from trainer.deploy import DeployError

MARK = {"DEPLOYED_BY": "delta-weight-sync"}  # Spaces without this variable are never changed or deleted
NO_KEY_YET = "made by the first `up`"  # in a dry run, stands for the public key that is not made yet
SLEEP_S = 1800  # a replica sleeps after this time without a request
App = Literal["env", "replica", "trainer"]
APPS: tuple[App, ...] = ("env", "replica")  # those that run on Spaces

CHECKOUT = Path(__file__).parents[2]
_FILES: dict[App, tuple[str, ...]] = {  # git's patterns, in which `*` also matches "/"
    "env": ("LICENSE", "env_space/*", "shared/space_guard/*"),
    "replica": ("LICENSE", "pyproject.toml", "inference_space/*", "shared/*"),
    # On a CPU, a replica runs from these files, too.
    "trainer": (
        *("LICENSE", "README.md", "pyproject.toml", "requirements.txt"),
        *("trainer/*", "inference_space/*", "shared/*"),
    ),
}
# These files move from the folder of the app to the root of the Space.
_AT_THE_ROOT = re.compile(
    r"(env|inference)_space/(README\.md|Dockerfile|requirements\.lock|openenv\.yaml|openenv_probe\.json)"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class SpacePlan:
    """One Space as it should be, with the names of its secrets but without their values."""

    repo_id: str
    folder: App | Literal["page"]  # the name of the folder with its files, among the staged folders
    variables: Mapping[str, str]
    secrets: tuple[str, ...]
    hardware: str  # "" for a static Space
    sleep_s: int | None  # None for a static Space, and on cpu-basic, where the Hub allows only 48 hours
    private: bool


def write(plans: list[SpacePlan], folder: Path) -> None:
    """Write the folders that `up` uploads, and plan.json, to a new or empty folder."""
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"--dry-run {folder} is not empty: name a new folder")
    for app in APPS:
        stage(app, folder / app)
    plan = {"bucket": plans[-1].variables["REPLICA_BUCKET"], "spaces": list(map(asdict, plans))}
    (folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")


def make_plan(
    owner: str, name: str, *, run: str, hardware: str, replicas: int, public: bool, trusted: str
) -> list[SpacePlan]:
    """The environment's Space and the replicas' Spaces. Raises `DeployError` for a wrong option. Replicas
    trust the public keys in `trusted`. If `trusted` is empty, replicas do not check signatures."""
    for option, value in (("--owner", owner), ("--name", name)):
        if not _NAME.fullmatch(value):
            raise DeployError(f"{option} {value!r} is not a name: use only letters, digits, '-' and '_'")
    if replicas < 1:
        raise DeployError(f"--replicas {replicas}: a deployment needs at least one replica")
    try:
        Keys(run)
    except ProtocolError as error:
        raise DeployError(f"--run: {error}") from None
    bucket = f"{owner}/{name}"
    spaces = [SpacePlan(f"{bucket}-env", "env", MARK, ("WORDLE_KEY",), "cpu-basic", None, not public)]
    for number in range(1, replicas + 1):
        variables = {
            **MARK,
            "REPLICA_BUCKET": f"hf://buckets/{bucket}",
            "REPLICA_RUN": run,
            "REPLICA_NAME": f"replica-{number}",
            **_serving(hardware),
            **({PUBLIC_KEY: trusted} if trusted else {}),
        }
        secrets = ("HF_TOKEN", "REPLICA_KEY")
        repo_id = f"{bucket}-replica-{number}"
        spaces.append(SpacePlan(repo_id, "replica", variables, secrets, hardware, SLEEP_S, not public))
    return spaces


def _serving(hardware: str) -> dict[str, str]:
    if gpus := HARDWARE[hardware].gpus:
        return {"REPLICA_VLLM_ARGS": f"--tensor-parallel-size {gpus}"}
    # A CPU serves only the tiny policy, with the sizes that `make demo` gives it.
    sizes = {"REPLICA_MAX_MODEL_LEN": "256", "REPLICA_MAX_NUM_SEQS": "64", "OMP_NUM_THREADS": "1"}
    return {**sizes, "REPLICA_VLLM_ARGS": f"--kv-cache-memory-bytes {64 << 20}"}


def stage(app: App, out: Path) -> None:
    """Write the files of the app's Space to `out`. The files depend only on the checkout."""
    for name, source in files(app).items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def files(app: App) -> dict[str, Path]:
    """Map each path in an app's Space, sorted, to a file of the checkout. Raises `DeployError` if a file of
    the app is missing, a link, or not tracked by git."""
    if untracked := git_files("--others", *_FILES[app]):
        raise DeployError(f"git does not track {', '.join(sorted(untracked))}: `git add` or remove it")
    listed = git_files("--cached", "--error-unmatch", *_FILES[app])
    found = {_place(app, path): path for path in listed}
    for path in found.values():
        if (CHECKOUT / path).resolve() != CHECKOUT.resolve() / path or not (CHECKOUT / path).is_file():
            fix = "`git restore` it, or put the files themselves in its place"
            raise DeployError(f"{path} is missing, a link, or in a linked folder: {fix}")
    return {name: CHECKOUT / path for name, path in sorted(found.items())}


def _place(app: App, path: str) -> str:
    match = _AT_THE_ROOT.fullmatch(path)
    return match[2] if match and app in APPS else path


def git_files(which: str, *patterns: str) -> list[str]:
    """The files of the checkout that git tracks (`--cached`), or does not track (`--others`)."""
    command = ["git", "-C", str(CHECKOUT), "ls-files", "-z", "--exclude-standard", which, *patterns]
    try:
        listed = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise DeployError("git is missing: install it, because deploy uploads what git tracks") from None
    if listed.returncode:
        reason = " ".join(listed.stderr.split())
        raise DeployError(f"git cannot list the files: run deploy from a clone of the repository ({reason})")
    return listed.stdout.split("\0")[:-1]
