"""Both Spaces from their own Dockerfiles' steps, as UID 1000 on port 7860, run the loop against each other.

No Docker engine runs here, so `dockerfile.py` executes the steps as shell in an image of its own. Not proven:
the FROM images themselves (vLLM here is the CPU build of the same version, in another Python), that Docker's
builder takes the steps, and anything of a GPU. Each Space has a loopback address of its own, because both
listen on port 7860.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import yaml

from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import DoneEvent, RunLogReader, StepEvent
from delta_weight_sync.signing import PUBLIC_KEY, new_pair
from delta_weight_sync.store import open_bucket
from env_space.game import Rules
from env_space.settings import Settings
from tests.live.replica import SMALL_CACHE, Replica, Server
from tests.support.dockerfile import CHECKOUT, Job, parse
from tests.trainer.deploy.conftest import POLICY
from trainer.deploy.plan import App, stage

if TYPE_CHECKING:
    from playwright.sync_api import Page

PORT = 7860
KEY = "planted-key-of-both-spaces"
TOKEN = "hf_plantedReadingToken"
WRITING = "hf_plantedWritingToken"
STEPS = 3
GAMES = 8  # of a step
PATIENCE_S = 1500.0  # on a slow machine that does other things, too; alone it takes less than two minutes


def may_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    mounting = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(mounting, capture_output=True).returncode == 0


class Space(Server):
    """A Space that is built from its staged folder and runs with these variables and secrets."""

    status_path = "/status"

    def __init__(self, app: App, folder: Path, host: str, environ: dict[str, str]) -> None:
        self.log = folder / f"{app}.log"
        command = ["unshare", "--mount", sys.executable, "-m", "tests.support.dockerfile"]
        super().__init__(command, {}, self.log, PORT)
        self.url = f"http://{host}:{PORT}"
        stage(app, folder / app)
        given = {"SPACE_ID": f"me/wordle-{app}", "HF_TOKEN": TOKEN, **environ}
        binds = {"/bucket": str(folder / "bucket")}
        self._job = Job(str(folder / app), str(folder / f"{app}.image"), given, binds)

    def start(self) -> None:
        with self.log.open("ab") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            self.process = self._process = subprocess.Popen(self._command, cwd=CHECKOUT, **pipes)
        assert self.process.stdin is not None
        with self.process.stdin as job:
            job.write(json.dumps(asdict(self._job)).encode())

    def wake(self) -> None:
        """As after a sleep: the same image, and nothing of what ran in it."""
        self.stop()
        self._job = replace(self._job, built=True)
        self.start()

    def family(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]


# What the tiny policy needs instead of what the run file says: its own prompt, seven tokens a guess, a CPU.
TINY = ["--model", str(POLICY), "--prompt", "Play Wordle.", "--max_completion_length", "7"]
TINY += ["--use_cpu", "true"]
SHORT = ["--max_steps", str(STEPS), "--per_device_train_batch_size", str(GAMES), "--num_generations", "8"]


def start_trainer(
    folder: Path, env: Space, replicas: list[str], signs: dict[str, str]
) -> subprocess.Popen[bytes]:
    """The command that `up` prints, with the run file of Qwen3-0.6B."""
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--cpu", "--num_processes", "1"]
    command += ["-m", "trainer.train", "--config", str(CHECKOUT / "trainer/configs/qwen3_0_6b.yaml")]
    command += ["--bucket", (folder / "bucket").as_uri(), "--run", "loop", "--replicas", *replicas]
    command += ["--env_url", env.url, "--output_dir", str(folder / "trainer"), *TINY, *SHORT]
    environ = {**os.environ, **signs, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environ |= {"SPACE_KEY": KEY, "HF_TOKEN": WRITING, "SPACES": " ".join([env.url, *replicas])}
    with (folder / "trainer.log").open("wb") as log:
        options = {"stdout": log, "stderr": log, "start_new_session": True}
        return subprocess.Popen(command, env=environ, cwd=CHECKOUT, **options)


def end(trainer: subprocess.Popen[bytes]) -> None:
    """What `accelerate launch` started, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()


def ended(trainer: subprocess.Popen[bytes], *spaces: Space) -> int | None:
    """The trainer's exit code; None if it takes too long. A Space that ends before it fails the test."""
    deadline = time.monotonic() + PATIENCE_S
    while trainer.poll() is None and time.monotonic() < deadline:
        for space in spaces:
            assert space.process.poll() is None, space.log.read_text()[-3000:]
        time.sleep(0.5)
    return trainer.poll()


@dataclass(frozen=True)
class Deployment:
    """Both Spaces after a whole run, and a second replica that is no Space."""

    folder: Path
    env: Space
    replica: Space
    second: Replica
    trainer: subprocess.Popen[bytes]
    head: Manifest


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The trainer starts first, and waits for the cold replicas; then it trains, loses one, and ends."""
    if not may_mount():
        pytest.skip("only root, with the right to mount, can give each Space a file system of its own")
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "bucket").mkdir()
    url = (folder / "bucket").as_uri()
    env_host = "127.0.0.2"
    replica_host = "127.0.0.3"
    watching = {"WORDLE_REPLICA_URL": f"http://{replica_host}:{PORT}", "WORDLE_REPLICA_KEY": KEY}
    rules = {"WORDLE_HOST": env_host, "WORDLE_KEY": KEY}
    following = {"REPLICA_BUCKET": "file:///bucket", "REPLICA_RUN": "loop"}
    sizes = {"REPLICA_HOST": replica_host, "REPLICA_MAX_MODEL_LEN": "256", "OMP_NUM_THREADS": "1"}
    sizes |= {"REPLICA_VLLM_ARGS": SMALL_CACHE}
    pair = new_pair()  # the page's games are chats, and templates run only where versions are signed
    alike = {"REPLICA_KEY": KEY, PUBLIC_KEY: pair[PUBLIC_KEY]}
    following |= alike
    second = Replica(url, "loop", folder / "second", name="second", max_model_len=256, environ=alike)
    with ExitStack() as stack:
        env = Space("env", folder, env_host, rules | watching)
        replica = Space("replica", folder, replica_host, following | sizes)
        for space in (env, replica):
            space.start()
            stack.callback(space.stop)
        trainer = start_trainer(folder, env, [replica.url, second.url], pair)
        stack.callback(end, trainer)
        stack.callback(second.stop)
        second.start()
        second.wait_for(0)
        second.kill()
        second.start()
        assert ended(trainer, env, replica) == 0, (folder / "trainer.log").read_text()[-3000:]
        head = RunReader(open_bucket(url), "loop").manifest()
        replica.wait_for(head.version)
        yield Deployment(folder, env, replica, second, trainer, head)


@pytest.mark.live
@pytest.mark.long
def test_all_replicas_serve_what_the_trainer_ended_with(deployed: Deployment) -> None:
    bucket = open_bucket((deployed.folder / "bucket").as_uri())
    head = deployed.head
    events = list(RunLogReader(bucket, "loop").poll())
    done = next(event for event in events if isinstance(event, DoneEvent))
    steps = [event for event in events if isinstance(event, StepEvent) and event.step]
    assert (len(steps), head.version) == (STEPS, STEPS)
    staleness = [step.metrics["sample/staleness_mean"] for step in steps]
    assert all(0 <= stale <= STEPS for stale in staleness), "samples name the version that made them"
    assert head.digest == done.digest
    for replica in (deployed.replica, deployed.second):
        assert replica.wait_for(head.version)["digest"] == head.digest
    assert played(deployed.env) >= STEPS * GAMES
    assert "waiting for the Spaces" in (deployed.folder / "trainer.log").read_text()


@pytest.mark.live
@pytest.mark.long
def test_the_spaces_run_as_nobody_and_tell_no_secret(deployed: Deployment) -> None:
    env = deployed.env
    replica = deployed.replica
    for space in (env, replica):
        assert {process.uids().real for process in space.family()} == {1000}
        assert httpx.get(f"{space.url}/").status_code == 200
    assert httpx.post(f"{env.url}/sessions", json={"seed": 1}).status_code == 401
    assert httpx.post(f"{replica.url}/v1/completions", json={}).status_code == 401
    assert leaks(deployed.folder, env) == []


@pytest.mark.live
@pytest.mark.long
def test_the_policy_plays_on_the_page(deployed: Deployment, page: "Page") -> None:
    from playwright.sync_api import expect

    before = sessions(deployed.env)  # of games that the trainer did not wait for at its end
    page.goto(deployed.env.url)
    page.get_by_role("tab", name="Watch the policy").click()
    expect(page.get_by_role("button", name="Watch another")).to_be_enabled()
    said = page.locator("#watch .says").inner_text()
    turns = page.locator("#watch .board li[data-feedback]").count()
    wrote = page.locator("#watch .log code").all_inner_texts()
    assert said.rstrip(".").split()[-1].lower() in Rules(Settings()).train
    assert len(wrote) == turns > 0
    assert all(text.startswith('<tool_call> {"name": "guess"') for text in wrote)
    assert sessions(deployed.env) == before, "neither game takes a place of the API"


@pytest.mark.live
@pytest.mark.long
def test_a_space_wakes_with_the_newest_version(deployed: Deployment) -> None:
    deployed.replica.wake()
    joined = f"starting vLLM with version {deployed.head.version}"  # fetched, rebuilt, its digest checked
    deployed.replica.wait_until(lambda status: status["state"] == joined, joined)


def sessions(env: Space) -> int:
    """Games in play over the API."""
    return int(httpx.get(f"{env.url}/health").json()["sessions"])


def played(env: Space) -> int:
    """Games that ended over the API."""
    text = httpx.get(f"{env.url}/metrics").text
    counts = re.findall(r'^wordle_games_total{.*via="http"} (\S+)$', text, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


def leaks(folder: Path, env: Space) -> list[str]:
    """Where a planted secret can be seen: logs, bucket, and the environment's pages and command lines. For a
    replica's own, see tests/live/test_public_port.py."""
    files = [*folder.glob("*.log"), *(folder / "bucket").rglob("*")]
    texts = {str(path): path.read_bytes().decode("latin-1") for path in files if path.is_file()}
    texts |= {path: httpx.get(f"{env.url}{path}").text for path in ENV_PAGES}
    texts |= {f"{process}": " ".join(process.cmdline()) for process in env.family()}
    return [place for place, text in texts.items() if any(word in text for word in (KEY, TOKEN, WRITING))]


ENV_PAGES = ["/", "/health", "/ready", "/metrics", "/docs", "/openapi.json", "/words", "/sessions", "/no"]


@pytest.mark.finding(21)
@pytest.mark.parametrize("app", ["env", "replica"])
def test_a_dockerfile_pins_its_image_and_serves_where_the_front_matter_says(app: App, tmp_path: Path) -> None:
    stage(app, tmp_path)
    steps = parse((tmp_path / "Dockerfile").read_text())
    front: dict[str, Any] = yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])
    (image,) = (rest for name, rest in steps if name == "FROM")
    # vLLM's image is named by its tag: the digest could not be looked up where this was written.
    optional = "" if app == "env" else "?"
    assert re.fullmatch(rf"[\w/-]+:v?\d+\.\d+\.\d+(-[\w.-]+)?(@sha256:[0-9a-f]{{64}}){optional}", image)
    assert ("EXPOSE", str(front["app_port"])) in steps
    assert (front["app_port"], front["sdk"]) == (PORT, "docker")
    assert [rest for name, rest in steps if name == "USER"] == ["1000"]
    as_user = {name for name, _ in steps[steps.index(("USER", "1000")) :]}
    assert as_user <= {"USER", "ENV", "EXPOSE", "CMD", "ENTRYPOINT"}
    assert len(front["short_description"]) <= 60
    assert front.keys() >= {"title", "suggested_hardware", "startup_duration_timeout", "tags", "license"}
