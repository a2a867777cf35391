"""On Jobs: what `up` starts, what it refuses before it starts anything, and what is started again."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi

from delta_weight_sync import credentials
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY
from tests.support.hubsim import HubSim
from tests.trainer.deploy.conftest import OWNER, POLICY, READ, WRITE, World
from trainer.deploy import DeployError, jobs
from trainer.deploy.plan import CHECKOUT, make_plan

CPU = ("--on", "jobs", "--hardware", "cpu-basic")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `up` starts, without files, programs, and waiting for them; test_jobs_demo.py has them."""
    run_job = HfApi.run_job
    asked: list[dict[str, Any]] = []

    def run_nothing(api: HfApi, **how: Any) -> Any:
        asked.append(how)
        return run_job(api, **how | {"command": ["sleep", "600"], "volumes": None})

    monkeypatch.setattr(HfApi, "run_job", run_nothing)
    monkeypatch.setattr(jobs, "_upload", lambda *_: "code/none")
    monkeypatch.setattr(jobs, "wait_until_healthy", lambda *_: {})
    return asked


def own(world: World) -> dict[str, list[dict[str, Any]]]:
    """The deployment's Jobs on the Hub, by their apps."""
    found: dict[str, list[dict[str, Any]]] = {}
    for job in world.hub.jobs():
        if job["labels"].get("deployment") == world.name:
            found.setdefault(job["labels"]["app"], []).append(job)
    return found


def test_up_starts_what_the_dry_run_wrote_and_only_the_unreachable_may_write(world: World, started):
    options = (*CPU, "--replicas", "2", "--train=--max_steps 5", "--timeout", "90m")
    before = world.changes()
    out = world.up("--dry-run", "dry", *options)
    assert "costs $0.05 per hour, so at most $0.60 in 12 hours" in out
    assert world.changes() == before
    planned = json.loads(Path("dry/jobs.json").read_text())
    world.up(*options)
    assert [how["name"] for how in started] == [f"{world.name}-{plan['app']}" for plan in planned]
    for plan, how in zip(planned, started, strict=True):
        assert (how["image"], how["command"]) == (plan["image"], plan["command"])
        assert how["timeout"] == (5400 if plan["app"] != "keeper" else 12 * 3600 + 600)
        assert how["expose"] == ([7860] if plan["port"] else None)
        assert [*how["secrets"]] == plan["secrets"]
        assert {**how["env"], PUBLIC_KEY: ""} == {**plan["variables"], PUBLIC_KEY: ""}
    made = own(world)
    assert made["env"][0]["secrets"] == {"WORDLE_KEY": world.key()}
    assert made["replica-2"][0]["secrets"] == {"HF_TOKEN": READ, "REPLICA_KEY": world.key()}
    known = {"HF_TOKEN": WRITE, "SPACE_HF_TOKEN": READ, "SPACE_KEY": world.key()}
    signing = made["trainer"][0]["secrets"].pop(SIGNING_KEY)
    assert signing.startswith("ed25519_secret_")
    assert made["trainer"][0]["secrets"] == known
    assert made["keeper"][0]["secrets"] == {"HF_TOKEN": WRITE}
    assert "--max_steps 5" in started[3]["command"][-1]
    assert not any(job["expose"] for app in ("trainer", "keeper") for job in made[app])


def test_a_second_up_ends_the_first_one_s_jobs(world: World, started):
    world.up(*CPU)
    world.up(*CPU)
    stages = {app: [job["status"]["stage"] for job in found] for app, found in own(world).items()}
    assert stages == {app: ["CANCELED", "RUNNING"] for app in ("env", "replica-1", "keeper")}
    out = world.run("down", "--on", "jobs")[1]
    assert re.search(r"replica-1 +2 +2 +cpu-basic +0\.0003", out)
    assert "spent at least $0.001" in out
    assert {job["status"]["stage"] for found in own(world).values() for job in found} == {"CANCELED"}


def test_a_gpu_s_replica_runs_what_its_space_s_dockerfile_says():
    plans = make_plan("me", "w", run="first", hardware="l4x4", replicas=1, public=False, trusted="")
    _, replica, _ = jobs.make_jobs(plans, timeout_s=3600, hours=1)
    assert replica.image == "vllm/vllm-openai:v0.32.0"
    assert "--require-hashes --only-binary=:all: -r requirements.lock\n" in replica.script
    assert replica.script.endswith("exec python3 -m inference_space.app")
    assert replica.variables["REPLICA_VLLM_ARGS"] == "--tensor-parallel-size 4"
    assert replica.variables["HF_HOME"] == "/tmp/hf"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hardware", "l5x1"), "--hardware 'l5x1' is no hardware of Jobs: choose cpu-basic, "),
        (("--trainer-hardware", "t4-small"), "--trainer-hardware 't4-small' is no hardware of Jobs"),
        (("--timeout", "5m"), "a Job would often end before its app has started: give at least 30m"),
        (("--timeout", "2d"), "give at most 24h"),
        (("--timeout", "soon"), "'soon' is not a time: write it as 90m or 6h"),
        (("--hours", "0"), "--hours 0: give a number above 0"),
        (("--hours", "24"), "--hours 24: give a number above 0, and at most 23"),
        (("--train", "--trainer-hardware", "l4x4"), "--trainer-hardware l4x4: a Job trains on one GPU"),
    ],
)
def test_wrong_options_are_refused_before_the_first_change(world: World, options, words):
    before = world.changes()
    assert words in world.fails("up", "--on", "jobs", *options)
    assert world.changes() == before


def test_without_a_token_nothing_starts(world: World, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    before = world.changes()
    assert "HF_TOKEN is not set: create a token of type Write" in world.fails("up", *CPU)
    assert world.changes() == before


def test_a_token_that_may_write_is_not_given_to_a_replica(world: World, monkeypatch):
    monkeypatch.setenv("SPACE_HF_TOKEN", WRITE)
    before = world.changes()
    assert "must be read-only" in world.fails("up", *CPU)
    assert world.changes() == before


def test_a_fine_grained_token_needs_the_right_to_start_jobs(world: World, started, monkeypatch):
    options = (*CPU, "--owner", "team")
    monkeypatch.setenv("HF_TOKEN", "hf_team")
    before = world.changes()
    assert "(fineGrained) may not start Jobs for team: give it the right" in world.fails("up", *options)
    assert world.changes() == before
    rights = ["repo.content.read", "repo.write", "job.write"]
    world.hub.add_token("hf_teamJobs", user=OWNER, role="fineGrained", scopes={"org:team": rights})
    monkeypatch.setenv("HF_TOKEN", "hf_teamJobs")
    world.up(*options)
    assert [how["labels"]["app"] for how in started] == ["env", "replica-1", "keeper"]
    world.run("down", "--on", "jobs", "--owner", "team")


def test_without_credit_the_hub_starts_no_job(world: World, started):
    world.hub.add_account("poor", can_pay=False)
    world.hub.add_token(WRITE, user="poor")
    world.hub.add_token(READ, user="poor", role="read")
    out = world.fails("up", *CPU, "--owner", "poor")
    assert "start a Job for env (cpu-basic): the Hub asks for payment (402)" in out
    assert "Jobs need credits: https://huggingface.co/settings/billing" in out
    assert not own(world)


def test_if_a_job_cannot_be_started_the_others_end(world: World, started, monkeypatch):
    run_job = HfApi.run_job

    def run_no_keeper(api: HfApi, **how: Any) -> Any:
        if how["labels"]["app"] == "keeper":
            raise DeployError("the Hub starts no more")
        return run_job(api, **how)

    monkeypatch.setattr(HfApi, "run_job", run_no_keeper)
    assert "the Hub starts no more" in world.fails("up", *CPU)
    assert {app: found[0]["status"]["stage"] for app, found in own(world).items()} == {
        "env": "CANCELED",
        "replica-1": "CANCELED",
    }


def test_another_machine_makes_no_second_signing_key(world: World, started):
    world.up(*CPU)
    (key,) = Path(".deploy").rglob(f"{world.name}.env")
    key.unlink()
    said = world.fails("up", *CPU)
    assert "trusts" in said
    assert "copy it to this machine" in said
    status, said = world.run("doctor", "--on", "jobs", "--model", str(POLICY))
    assert status == 1
    assert "PROBLEM  signatures: the signing key is missing" in said
    assert not key.exists()
    world.run("down", "--on", "jobs")


@pytest.mark.full
def test_the_keeper_runs_with_the_packages_that_it_installs():
    """Those of the library alone, and aiohttp: all others are hidden."""
    script = """
import sys
from importlib.abc import MetaPathFinder
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
installed, left = set(), ["delta-weight-sync", "aiohttp"]
while left:
    name = canonicalize_name(left.pop())
    if name not in installed:
        installed.add(name)
        needed = map(Requirement, requires(name) or ())
        left += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
owners = packages_distributions()
hidden = {top for top in owners if not {*map(canonicalize_name, owners[top])} & installed}

class Hide(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import trainer.deploy.__main__
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "aiohttp" in jobs.KEEPER_PACKAGES


def test_a_job_whose_port_the_hub_does_not_expose_is_no_address(world: World, started, api):
    world.hub.exposes(ports=False)
    try:
        world.up(*CPU)
    finally:
        world.hub.exposes(ports=True)
    with pytest.raises(DeployError, match="of env exposes no port: cancel it and run `up` again"):
        jobs.require_reachable(jobs.latest(jobs.jobs_of(api, OWNER, world.name)))
    world.run("down", "--on", "jobs")


def test_an_old_client_is_refused():
    with pytest.raises(DeployError, match="cannot start a Job again: pip install --upgrade huggingface_hub"):
        jobs.require_client(SimpleNamespace())


@pytest.fixture
def running(world: World, started, api: HfApi) -> World:
    world.up(*CPU, "--train")
    yield world
    world.run("down", "--on", "jobs")


class Rounds:
    """In place of the pause between two rounds of `watch`: does one thing each time, then ends it."""

    def __init__(self, *steps: Any) -> None:
        self.steps = [*steps]

    def __call__(self, _: float) -> None:
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


def watch(api: HfApi, world: World, *steps: Any) -> None:
    jobs.watch(api, OWNER, world.name, sleep=Rounds(*steps))


def test_watch_starts_jobs_again_that_failed_or_expired_but_not_canceled_ones(running: World, api, capsys):
    env, replica, trainer = (own(running)[app][0] for app in ("env", "replica-1", "trainer"))
    running.hub.end_job(replica["id"], "Job failed with exit code: 137")
    running.hub.end_job(trainer["id"], "Job timeout")
    api.cancel_job(job_id=env["id"], namespace=OWNER)
    with pytest.raises(KeyboardInterrupt):
        watch(api, running, lambda: None)
    said = capsys.readouterr().out
    assert "replica-1 again as" in said
    assert f"{trainer['id']} had ended (ERROR: Job timeout)" in said
    made = own(running)
    assert {app: len(found) for app, found in made.items()} == {
        "env": 1,
        "replica-1": 2,
        "trainer": 2,
        "keeper": 1,
    }
    for app, first in (("replica-1", replica), ("trainer", trainer)):
        for part in ("labels", "secrets", "environment", "expose", "flavor"):
            assert made[app][1][part] == first[part]


def test_a_deployment_has_one_watcher(running: World):
    keeper = own(running)["keeper"][0]["id"]
    assert f"the Job {keeper} watches {running.name} already: cancel it first" in running.fails("watch")


def test_watch_ends_everything_after_the_time_of_up_and_prints_the_bill(
    running: World, api, capsys, monkeypatch
):
    until = int(own(running)["env"][0]["labels"]["until"])
    clock = SimpleNamespace(time=lambda: until + 1.0)
    monkeypatch.setattr(jobs, "time", clock)
    watch(api, running)
    out = capsys.readouterr().out
    assert "the time of `up --hours` is over; ending the deployment" in out
    assert "spent at least $0.00" in out
    stages = {app: found[-1]["status"]["stage"] for app, found in own(running).items()}
    assert stages == {"env": "CANCELED", "replica-1": "CANCELED", "trainer": "CANCELED", "keeper": "RUNNING"}


def test_watch_gives_up_an_app_that_fails_again_and_again(running: World, api):
    def fail() -> None:
        running.hub.end_job(own(running)["replica-1"][-1]["id"], "Job failed with exit code: 1")

    fail()
    with pytest.raises(
        DeployError, match=r"failed again and again: replica-1 \(Job failed with exit code: 1\)"
    ):
        watch(api, running, fail, fail)
    assert len(own(running)["replica-1"]) == 3
    assert own(running)["trainer"][-1]["status"]["stage"] == "CANCELED"


def test_watch_goes_on_after_an_error_of_the_hub(running: World, api, capsys):
    running.hub.fault("POST .*/duplicate", status=500, times=1)
    running.hub.end_job(own(running)["env"][0]["id"], "Job timeout")
    with pytest.raises(KeyboardInterrupt):
        watch(api, running, lambda: None)
    out = capsys.readouterr().out
    assert "watch: start env again: the Hub answered 500" in out
    assert "watch: started env again" in out


def test_a_job_that_lost_its_labels_and_gets_none_is_ended(running: World, api, capsys, monkeypatch):
    rerun_job = HfApi.rerun_job

    def without_labels(api: HfApi, **how: Any) -> Any:
        new = rerun_job(api, **how)
        api.update_job_labels(job_id=new.id, labels={"app": "?"}, namespace=OWNER)
        running.hub.fault("PUT .*labels", status=500, times=1)
        return api.inspect_job(job_id=new.id, namespace=OWNER)

    monkeypatch.setattr(HfApi, "rerun_job", without_labels)
    running.hub.end_job(own(running)["env"][0]["id"], "Job timeout")
    with pytest.raises(KeyboardInterrupt):
        watch(api, running)
    assert "start env again" in capsys.readouterr().out
    lost = [job for job in running.hub.jobs() if job["labels"].get("app") == "?"]
    assert [job["status"]["stage"] for job in lost] == ["CANCELED"]


def test_a_trainer_s_files_follow_the_jobs_and_keep_the_last_url(tmp_path):
    jobs.write_addresses(tmp_path, {"env": "https://a.hf.jobs", "replica-1": "https://b.hf.jobs"})
    jobs.write_addresses(tmp_path, {"replica-1": "https://c.hf.jobs"})
    text = {name: (tmp_path / name).read_text().split() for name in ("env", "replicas", "all")}
    assert text["env"] == ["https://a.hf.jobs"]
    assert text["replicas"] == ["https://c.hf.jobs"]
    assert text["all"] == ["https://a.hf.jobs", "https://b.hf.jobs", "https://c.hf.jobs"]


def test_a_job_s_port_gets_the_token_that_reads_and_only_over_tls(monkeypatch):
    monkeypatch.setenv("SPACE_HF_TOKEN", READ)
    monkeypatch.setenv("HF_TOKEN", WRITE)
    monkeypatch.setenv("SPACES", "https://x--7860.hf.jobs http://y--7860.hf.jobs")
    assert credentials.hub_token("https://x--7860.hf.jobs/ready") == READ
    assert credentials.hub_token("http://y--7860.hf.jobs/ready") == ""
    assert credentials.hub_token("https://z--7860.hf.jobs/ready") == ""


def test_only_a_deployment_s_own_jobs_are_ended(hub: HubSim, running: World, api):
    other = api.run_job(
        image="x", command=["sleep", "600"], namespace=OWNER, labels={"deployment": running.name}
    )
    running.run("down", "--on", "jobs")
    assert api.inspect_job(job_id=other.id, namespace=OWNER).status.stage == "RUNNING"
    api.cancel_job(job_id=other.id, namespace=OWNER)
