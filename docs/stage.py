"""Where the commands run: a copy of the checkout with a run in it, and a Hub and an S3 on loopback.

The Hub's Spaces run no containers: those that the pages deploy are at the URLs of the two apps, started here.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.hubsim import HubSim
from trainer.demo.processes import Processes, free_port

ROOT = Path(__file__).parents[1]
OWNER = "me"
HUB_BUCKET = "hf://buckets/me/wordle"
S3_BUCKET = "s3://wordle/policies"
TUTORIAL = "file:///tmp/bucket"  # on the pages; here, a bucket in the copy
_SECRET_PARTS = ("TOKEN", "SECRET", "HF_", "AWS_")


@dataclass(frozen=True)
class Stage:
    folder: Path
    environment: dict[str, str]

    @property
    def tutorial(self) -> str:
        return (self.folder / "runs/tutorial").as_uri()


@contextmanager
def staged(temporary: Path) -> Iterator[Stage]:
    """Everything that the pages take for granted; `temporary` is a new folder."""
    with ExitStack() as stack:
        hub = stack.enter_context(HubSim(temporary / "hub"))
        hub.add_account(OWNER)
        hub.add_token("hf_me", user=OWNER)
        hub.add_token("hf_me_read", user=OWNER, role="read")
        folder = temporary / "checkout"
        home = temporary / "home"
        _copy(folder)
        home.mkdir()
        environment = _clean() | hub.env(home, "hf_me") | stack.enter_context(_s3()) | _own(folder, home)
        stage = Stage(folder, environment)
        _start_apps_of_spaces(stage, hub, temporary, stack)
        urls = [(folder / "runs/demo/bucket").as_uri(), HUB_BUCKET, S3_BUCKET]
        _seed(stage, *((url, "demo", 9) for url in urls), (stage.tutorial, "first", 21))
        yield stage


def _copy(folder: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    names = filter(None, listed.stdout.decode().split("\0"))
    for path in (*(ROOT / name for name in names), *(ROOT / "shared").rglob("__pycache__/*.nb[ic]")):
        if path.is_file():
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
            if path.name in ("requirements.txt", "pyproject.toml"):
                os.utime(copy, (0, 0))  # `make` finds .venv ready, and does not install into it from here
    for command in (["init", "--quiet"], ["add", "."]):  # deploy uploads what git tracks
        subprocess.run(["git", "-C", folder, *command], check=True)
    (folder / ".venv").symlink_to(Path(sys.prefix))


_SEED = """
import sys, tempfile, torch
from pathlib import Path
from tests.support.published_run import write_run

with tempfile.TemporaryDirectory() as folder:
    for each in sys.argv[1:]:
        url, run, versions = each.split()
        torch.manual_seed(0)
        write_run(url, Path(folder), versions=int(versions), run=run)
"""


def _seed(stage: Stage, *runs: tuple[str, str, int]) -> None:
    """Write runs of a tiny policy: each with a bucket, a name and a number of versions."""
    command = [sys.executable, "-c", _SEED, *(" ".join(map(str, run)) for run in runs)]
    done = subprocess.run(
        command, cwd=stage.folder, env=stage.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise RuntimeError(f"no run could be written for the pages' commands:\n{done.stdout.decode()}")


def _clean() -> dict[str, str]:
    """This process's environment without credentials, and without the settings of the tests around it."""
    return {
        key: value for key, value in os.environ.items() if not any(p in key.upper() for p in _SECRET_PARTS)
    }


def _own(folder: Path, home: Path) -> dict[str, str]:
    path = f"{folder}/.venv/bin:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(home), "SPACE_HF_TOKEN": "hf_me_read", "PYTHONUNBUFFERED": "1"}


def _start_apps_of_spaces(stage: Stage, hub: HubSim, temporary: Path, stack: ExitStack) -> None:
    ports = {"wordle-env": free_port(), "wordle-replica-1": free_port()}
    settings = {
        "env_space.app": {"WORDLE_HOST": "127.0.0.1", "WORDLE_PORT": str(ports["wordle-env"])},
        "inference_space.app": {
            "REPLICA_BUCKET": HUB_BUCKET,
            "REPLICA_RUN": "not-begun",  # so it waits, and starts no vLLM
            "REPLICA_HOST": "127.0.0.1",
            "REPLICA_PORT": str(ports["wordle-replica-1"]),
            "REPLICA_FOLDER": str(temporary / "replica"),
        },
    }
    processes = stack.enter_context(Processes(temporary))
    for module, variables in settings.items():
        processes.start(module, [module], stage.environment | variables)
    for name, port in ports.items():  # the Hub names the app's own address once the Space is made
        hub.set_space(f"{OWNER}/{name}", host=f"http://127.0.0.1:{port}")


@contextmanager
def _s3() -> Iterator[dict[str, str]]:
    from moto.server import ThreadedMotoServer  # slow to import

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield {
            "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()
