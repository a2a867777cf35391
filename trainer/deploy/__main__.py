"""`python -m trainer.deploy COMMAND`: `--help` lists the commands."""

import argparse
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, get_token

from delta_weight_sync.cost import GPUS, HARDWARE, PRICES_READ_ON, PRICES_SOURCE
from delta_weight_sync.ending import die_with_parent
from delta_weight_sync.signing import PUBLIC_KEY, PublicKeys, make_keys
from trainer.deploy import DeployError, hub, jobs, keys, page
from trainer.deploy.doctor import Setup, examine
from trainer.deploy.hub import Space, connect, make_change, spaces_of, wait_until_healthy
from trainer.deploy.plan import CHECKOUT, MARK, NO_KEY_YET, SLEEP_S, SpacePlan, make_plan, write

Arguments = argparse.Namespace
_CONFIG = CHECKOUT / "trainer" / "configs" / "qwen3_0_6b.yaml"


def main(argv: list[str] | None = None) -> None:
    """Run one command. After an error, print one sentence and exit with status 1."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run_command(connect(), arguments)
    except (DeployError, OSError) as error:
        sys.exit(f"deploy: {error}")
    except KeyboardInterrupt:
        print("deploy: stopped; to continue, run the same command again", file=sys.stderr)
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    text = "Deploy a bucket, and Spaces or Jobs, to the Hugging Face Hub."
    parser = argparse.ArgumentParser(prog="python -m trainer.deploy", description=text)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[HfApi, Arguments], None], text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        added.add_argument("--owner", required=run is not _doctor, default="", help="user or organization")
        added.add_argument("--name", default="wordle", help="name of the bucket, and prefix of the Spaces")
        added.set_defaults(run_command=run)
        return added

    def on(added: argparse.ArgumentParser) -> argparse.ArgumentParser:
        text = (
            "what runs the apps: Docker Spaces, which need PRO, or Jobs, which need credits (default: spaces)"
        )
        added.add_argument("--on", choices=("spaces", "jobs"), default="spaces", help=text)
        return added

    up = on(command("up", _up, "create the bucket and the Spaces or Jobs, or update them"))
    up.add_argument("--run", default="first", help="the run that the replicas follow (default: first)")
    hardware = "GPUs of a replica, or on Jobs cpu-basic for the tiny policy (default: l4x1)"
    up.add_argument("--hardware", default="l4x1", help=hardware)
    up.add_argument("--replicas", type=int, default=1, help="number of replicas (default: 1)")
    up.add_argument("--public", action="store_true", help="make the Spaces public; the bucket stays private")
    up.add_argument("--unsigned", action="store_true", help="let replicas serve versions without a signature")
    train = "on Jobs, also start the trainer, with these arguments; without --config, for Wordle"
    up.add_argument("--train", nargs="?", const="", metavar="ARGUMENTS", help=train)
    up.add_argument("--trainer-hardware", help="the trainer's hardware on Jobs (default: --hardware)")
    up.add_argument("--timeout", default="6h", help="of a Job, which is then started again (default: 6h)")
    up.add_argument("--hours", type=float, default=12.0, help="after these, all Jobs end (default: 12)")
    only = up.add_mutually_exclusive_group()
    only.add_argument("--dry-run", type=Path, metavar="DIR", help="only write to DIR what `up` would upload")
    text = "only make a static Space: of a page in a folder, or of a run (URL of the bucket, #run)"
    only.add_argument("--static", metavar="FOLDER|RUN", help=text)
    on(command("status", _status, "show state, version and cost of each Space or Job"))
    logs = on(command("logs", _logs, "show the log of a Space or Job"))
    logs.add_argument("space", help="env, replica-1, ..., and on Jobs trainer or keeper")
    command("pause", _pause, "stop all Spaces until `resume`; a paused Space costs nothing")
    command("resume", _resume, "start paused Spaces again")
    down = on(command("down", _down, "delete the Spaces or cancel the Jobs, and keep the bucket"))
    down.add_argument("--bucket", action="store_true", help="also delete the bucket, with all its runs")
    command("watch", _watch, "start Jobs again that end too early, as the keeper does; end with the training")
    train = "run the trainer here, with the addresses of the deployment's Jobs"
    training = command("train", _train, train)
    training.add_argument("--run", default="first", help="name of the run (default: first)")
    training.add_argument("arguments", nargs="*", help="arguments of trainer.train, after `--`")
    found = command("addresses", _addresses, "write the URLs of the running Jobs to files, again and again")
    found.add_argument("folder", type=Path, help="gets the files env, replicas and all")
    doctor = on(command("doctor", _doctor, "check everything that a deployment needs"))
    doctor.add_argument("--config", type=Path, default=_CONFIG, help="trainer config (default: Qwen3-0.6B's)")
    doctor.add_argument("--model", help="a Hub id, or the folder of a checkpoint; by default the config's")
    doctor.add_argument("--hardware", choices=HARDWARE, default="l4x1", help=hardware)
    return parser


def _up(api: HfApi, arguments: Arguments) -> None:
    if arguments.static:
        _up_page(api, arguments)
        return
    if arguments.on == "jobs":
        _up_jobs(api, arguments)
        return
    owner = arguments.owner
    name = arguments.name
    _require_gpu(arguments.hardware)
    if arguments.train is not None:
        raise DeployError("--train: a Space cannot run the trainer: add --on jobs, or start it by hand")
    options = {option: getattr(arguments, option) for option in ("run", "hardware", "replicas", "public")}
    trusted = ""  # replicas check no signatures
    if not arguments.unsigned:
        known = keys.read_signing_keys(owner, name)
        trusted = known[1] if known else NO_KEY_YET
    plans = make_plan(owner, name, **options, trusted=trusted)
    if folder := arguments.dry_run:
        write(plans, folder)
        print(f"{folder} holds the files that `up` would upload, and plan.json; nothing was changed")
        return
    hub.Account(api).require_write(owner)
    token = os.environ.get("SPACE_HF_TOKEN", "")
    hub.require_read_only(api, token)
    existing = spaces_of(api, owner, name)
    key = keys.ensure_space_key(owner)
    if trusted == NO_KEY_YET:
        trusting = {space.repo_id: space.variables for space in existing}
        plans = make_plan(owner, name, **options, trusted=_new_signing_key(trusting, owner, name))
    _put_all(api, plans, {"HF_TOKEN": token, "REPLICA_KEY": key, "WORDLE_KEY": key})
    planned = {plan.repo_id for plan in plans}
    for space in existing:
        if not space.is_page and space.repo_id not in planned:
            what = f"delete {space.repo_id}, which is not in the plan"
            make_change(what, api.delete_repo, space.repo_id, repo_type="space")
    apps = [hub.read_space(api, plan.repo_id) for plan in plans]
    for app in apps:
        if (stage := app.runtime.stage) in (*hub.PAUSED, *hub.BROKEN):
            make_change(f"restart {app.repo_id} ({stage})", api.restart_space, app.repo_id)
    os.environ["SPACE_KEY"] = key
    hub.send_key_to(apps)
    wait_until_healthy(api, apps, (key, token))
    print(_summary(arguments, plans, [app.url for app in apps]))


def _up_jobs(api: HfApi, arguments: Arguments) -> None:
    owner = arguments.owner
    name = arguments.name
    hours = arguments.hours
    jobs.require_client(api)
    timeout_s = jobs.seconds(arguments.timeout)
    known = jobs.prices(api)
    trains_on = arguments.trainer_hardware or arguments.hardware
    jobs.require_hardware("--hardware", arguments.hardware, known)
    jobs.require_hardware("--trainer-hardware", trains_on, known)
    train = None if arguments.train is None else shlex.split(arguments.train)
    if train is not None and HARDWARE[trains_on].gpus > 1:
        raise DeployError(f"--trainer-hardware {trains_on}: a Job trains on one GPU: choose one of those")
    if train is not None and "--config" not in train:
        train = [*_policy(arguments.hardware, trains_on), *train]

    def planned(trusted: str) -> list[jobs.JobPlan]:
        options = {option: getattr(arguments, option) for option in ("run", "hardware", "replicas", "public")}
        plans = make_plan(owner, name, **options, trusted=trusted)
        limits = {"timeout_s": timeout_s, "hours": hours}
        return jobs.make_jobs(plans, **limits, train=train, trainer_hardware=trains_on)

    trusted = ""
    if not arguments.unsigned:
        signing_keys = keys.read_signing_keys(owner, name)
        trusted = signing_keys[1] if signing_keys else NO_KEY_YET
    plans = planned(trusted)
    print(jobs.offer(plans, known, hours))
    if folder := arguments.dry_run:
        jobs.write(plans, folder)
        print(f"{folder} holds the files that `up` would upload, and jobs.json; nothing was changed")
        return
    account = hub.Account(api)
    account.require_write(owner)
    account.require_jobs(owner)
    token = os.environ.get("SPACE_HF_TOKEN", "")
    hub.require_read_only(api, token)
    key = keys.ensure_space_key(owner)
    if trusted == NO_KEY_YET:
        running = jobs.latest(jobs.jobs_of(api, owner, name))
        trusting = {f"the Job {job.id}": job.environment or {} for *_, job in running.values()}
        plans = planned(_new_signing_key(trusting, owner, name))
    os.environ["SPACE_KEY"] = key
    reader = {"HF_TOKEN": token, "REPLICA_KEY": key, "WORDLE_KEY": key}
    writer = {"HF_TOKEN": get_token() or "", "SPACE_HF_TOKEN": token, "SPACE_KEY": key}
    writer |= keys.signing_key(owner, name)
    secrets = {plan.app: writer if plan.app in (jobs.TRAINER, jobs.KEEPER) else reader for plan in plans}
    bucket = f"{owner}/{name}"
    with tempfile.TemporaryDirectory() as staged:
        jobs.write(plans, Path(staged))  # before the first change, because this refuses untracked files
        what = f"create the bucket {bucket} (private), unless it exists"
        make_change(what, api.create_bucket, bucket, private=True, exist_ok=True)
        jobs.cancel(api, owner, name)
        jobs.start(api, bucket, plans, Path(staged), secrets, hours)
    still = f"all Jobs still run, and cost: `down --on jobs --owner {owner} --name {name}` ends them"
    try:
        urls = jobs.wait_until_healthy(api, owner, name, (*_known_secrets(owner), token))
    except DeployError as error:
        raise DeployError(f"{error}\n{still}") from None
    except KeyboardInterrupt:
        print(still, file=sys.stderr)
        raise
    print(_jobs_summary(arguments, urls))


def _policy(replica: str, trainer: str) -> list[str]:
    """The trainer's arguments for the policy that a replica on this hardware can serve."""
    cpu = [] if HARDWARE[trainer].gpus else ["--use_cpu", "true"]
    if HARDWARE[replica].gpus:
        return ["--config", "trainer/configs/qwen3_0_6b.yaml", *cpu]
    return ["--config", "trainer/configs/wordle_tiny.yaml", "--model", "trainer/policies/wordle-tiny", *cpu]


def _jobs_summary(arguments: Arguments, urls: dict[str, str]) -> str:
    which = f"--owner {arguments.owner} --name {arguments.name}"
    lines = [f"{app:12} {url}" for app, url in urls.items()]
    lines.append(f"bucket       hf://buckets/{arguments.owner}/{arguments.name}")
    if arguments.train is None:
        run = f"python -m trainer.deploy train {which} --run {arguments.run}"
        policy = shlex.join(_policy(arguments.hardware, arguments.hardware))
        lines += ["", "to train, on this machine:", "", f"    {run} -- {policy}"]
        lines += ["", f"the Jobs run for {arguments.hours:g} hours, also after the training"]
    else:
        lines += ["", f"the trainer's log: python -m trainer.deploy logs trainer --on jobs {which}"]
    return "\n".join(["", *lines, f"to end it all: python -m trainer.deploy down --on jobs {which}"])


def _put_all(api: HfApi, plans: list[SpacePlan], secrets: hub.Secrets) -> None:
    bucket = plans[-1].variables["REPLICA_BUCKET"].removeprefix("hf://buckets/")
    with tempfile.TemporaryDirectory() as staged:
        # Before the first change, because this refuses files that git does not track.
        write(plans, Path(staged))
        what = f"create the bucket {bucket} (private), unless it exists"
        make_change(what, api.create_bucket, bucket, private=True, exist_ok=True)
        for plan in plans:
            hub.put_space(api, plan, Path(staged, plan.folder), secrets)


def _up_page(api: HfApi, arguments: Arguments) -> None:
    owner = arguments.owner
    name = arguments.name
    private = not arguments.public
    plan = SpacePlan(f"{owner}/{name}{hub.PAGE}", "page", MARK, (), "", None, private)
    hub.Account(api).require_write(owner)
    spaces_of(api, owner, name)  # raises if the Space is not ours
    with tempfile.TemporaryDirectory() as staged:
        source = Path(arguments.static)
        if "://" in arguments.static:  # a run
            source = Path(staged, "exported")
            page.export(arguments.static, source)
        folder = Path(staged, plan.folder)
        page.stage(source, folder)
        page.name_card(folder, f"{api.endpoint}/spaces/{plan.repo_id}")
        hub.put_space(api, plan, folder, {})
    url = hub.read_space(api, plan.repo_id).url
    reach = ", which only accounts with access can open" if private else f", {url}"
    print(f"\npage         {api.endpoint}/spaces/{plan.repo_id}{reach}")


def _new_signing_key(existing: Mapping[str, Mapping[str, str]], owner: str, name: str) -> str:
    """Make a key. `existing`: Space or Job -> its variables."""
    file = keys.signing_file(owner, name)
    for app, variables in existing.items():
        if trusted := variables.get(PUBLIC_KEY):
            problem = f"{app} trusts {PublicKeys(trusted)}, but the key's file {file} is missing"
            fix = "copy it to this machine; if it is lost, run `up --unsigned` and then `up` for a new key"
            raise DeployError(f"{problem}: {fix}")
    public = make_keys(file)
    print(f"made a new signing key in {file}; replicas will serve only versions that it signed")
    return public


def _summary(arguments: Arguments, plans: Sequence[SpacePlan], urls: Sequence[str]) -> str:
    env = urls[0]
    replicas = " ".join(urls[1:])
    variables = plans[-1].variables
    usd = sum(HARDWARE[plan.hardware].usd_per_hour for plan in plans)
    sources = f". {keys.space_key_file(arguments.owner)}"
    signatures = "none: replicas serve every version in the bucket"
    if trusted := PublicKeys(variables.get(PUBLIC_KEY, "")):
        sources += f"; . {keys.signing_file(arguments.owner, arguments.name)}"
        signatures = f"replicas serve only versions that {trusted} has signed"
    bucket = variables["REPLICA_BUCKET"]
    return f"""
environment  {env}
replicas     {replicas}
bucket       {bucket}
signatures   {signatures}

costs        ${usd:.2f} per hour while all Spaces run, $0.00 while they sleep or are paused (prices of
             {PRICES_READ_ON}, {PRICES_SOURCE}); a replica falls asleep after
             {SLEEP_S // 60} minutes without a request, and the next request wakes it

to train, on a machine with a GPU:

    set -a; {sources}; set +a    # the keys; also set HF_TOKEN and SPACE_HF_TOKEN, as on this machine
    export SPACES="{env} {replicas}"    # the only servers that receive the key
    accelerate launch -m trainer.train --config trainer/configs/qwen3_0_6b.yaml \\
        --bucket {bucket} --run {arguments.run} \\
        --replicas {replicas} \\
        --env_url {env}"""


def _status(api: HfApi, arguments: Arguments) -> None:
    if arguments.on == "jobs":
        os.environ.setdefault("SPACE_KEY", keys.read_space_key(arguments.owner) or "")
        print(jobs.table(_own_jobs(api, arguments), jobs.prices(api)))
        return
    spaces = _own(api, arguments, page=True)
    hub.send_key_to(spaces)
    print(hub.table(spaces))


def _logs(api: HfApi, arguments: Arguments) -> None:
    if arguments.on == "jobs":
        apps = _own_jobs(api, arguments)
        if arguments.space not in apps:
            raise DeployError(f"there is no Job of {arguments.space}: choose {', '.join(apps)}")
        for line in jobs.log(api, apps[arguments.space][-1], None):
            print(hub.masked(line, _known_secrets(arguments.owner)))
        return
    prefix = f"{arguments.owner}/{arguments.name}-"
    found = {app.repo_id.removeprefix(prefix): app for app in _own(api, arguments, page=False)}
    if arguments.space not in found:
        raise DeployError(f"there is no Space {prefix}{arguments.space}: choose {', '.join(found)}")
    app = found[arguments.space]
    build = "BUILD" in app.runtime.stage or app.runtime.stage == "CONFIG_ERROR"
    for line in hub.log_lines(api, app.repo_id, build=build):
        print(hub.masked(line, _known_secrets(arguments.owner)))


def _pause(api: HfApi, arguments: Arguments) -> None:
    for app in _own(api, arguments, page=False):
        make_change(f"pause {app.repo_id}", api.pause_space, app.repo_id)


def _resume(api: HfApi, arguments: Arguments) -> None:
    apps = _own(api, arguments, page=False)
    for app in apps:
        if app.runtime.stage != "RUNNING":
            make_change(f"resume {app.repo_id}", api.restart_space, app.repo_id)
    hub.send_key_to(apps)
    wait_until_healthy(api, apps, _known_secrets(arguments.owner))


def _down(api: HfApi, arguments: Arguments) -> None:
    bucket = f"{arguments.owner}/{arguments.name}"
    if arguments.on == "jobs":
        jobs.cancel(api, arguments.owner, arguments.name)
        print(jobs.bill(jobs.jobs_of(api, arguments.owner, arguments.name), jobs.prices(api)))
    else:
        for space in spaces_of(api, arguments.owner, arguments.name):
            make_change(f"delete {space.repo_id}", api.delete_repo, space.repo_id, repo_type="space")
    if arguments.bucket:
        make_change(f"delete the bucket {bucket}", api.delete_bucket, bucket, missing_ok=True)
    else:
        print(f"kept the bucket {bucket}; `down --bucket` deletes it, with all its runs")


def _watch(api: HfApi, arguments: Arguments) -> None:
    jobs.require_client(api)
    for keeper in filter(jobs.is_running, _own_jobs(api, arguments).get(jobs.KEEPER, [])):
        if keeper.id != os.environ.get("JOB_ID"):  # both would start the same Job again
            raise DeployError(f"the Job {keeper.id} watches {arguments.name} already: cancel it first")
    jobs.watch(api, arguments.owner, arguments.name)


def _train(api: HfApi, arguments: Arguments) -> None:
    """Become the trainer. In a Job, secrets hold the keys; here, the files of `up` do."""
    owner = arguments.owner
    name = arguments.name
    folder = keys.FOLDER / owner / f"{name}.jobs"
    if "JOB_ID" not in os.environ:
        os.environ.setdefault("SPACE_KEY", keys.read_space_key(owner) or "")
        for variable, value in keys.signing_key(owner, name).items():
            os.environ.setdefault(variable, value)
    python = [sys.executable, "-m"]
    which = ["--owner", owner, "--name", name]
    while {"env", "replica-1"} - (found := jobs.addresses(apps := _own_jobs(api, arguments))).keys():
        jobs.require_reachable(apps)
        print("waiting for the Jobs of environment and replica", flush=True)
        time.sleep(jobs.POLL_S)
    jobs.write_addresses(folder, found)
    end = functools.partial(die_with_parent, os.getpid())  # also after this process has become the trainer
    subprocess.Popen([*python, "trainer.deploy", "addresses", *which, str(folder)], preexec_fn=end)
    os.environ["SPACES"] = str(folder / "all")
    places = ["--bucket", f"hf://buckets/{owner}/{name}", "--run", arguments.run]
    places += ["--replicas", str(folder / "replicas"), "--env_url", str(folder / "env")]
    os.execv(sys.executable, [*python, "trainer.train", *arguments.arguments, *places])


def _addresses(api: HfApi, arguments: Arguments) -> None:
    said = ""
    while True:
        try:
            jobs.write_addresses(arguments.folder, jobs.addresses(_own_jobs(api, arguments)))
        except DeployError as error:  # the Hub gives no answer, for example
            if said != (said := hub.masked(str(error))):
                print(f"addresses: {said}", file=sys.stderr, flush=True)
        time.sleep(jobs.POLL_S)


def _own_jobs(api: HfApi, arguments: Arguments) -> dict[str, list[Any]]:
    """The Jobs of the last `up`, by their apps. Raises `DeployError` if there are none."""
    if not (apps := jobs.latest(jobs.jobs_of(api, arguments.owner, arguments.name))):
        raise DeployError(
            f"{arguments.owner} has no Jobs of {arguments.name}: run `up --on jobs` to start them"
        )
    return apps


def _doctor(api: HfApi, arguments: Arguments) -> None:
    token = os.environ.get("SPACE_HF_TOKEN", "")
    config = yaml.safe_load(arguments.config.read_text())
    if not (model := arguments.model or config.get("model")):
        raise DeployError(f"{arguments.config} names no model: add --model")
    on_jobs = arguments.on == "jobs"
    if not on_jobs:
        _require_gpu(arguments.hardware)
    deployment = arguments.owner, arguments.name
    if not examine(Setup(api, *deployment, model, arguments.hardware, token, config, on_jobs)):
        sys.exit(1)


def _require_gpu(hardware: str) -> None:
    """Raise `DeployError` unless it is hardware of Spaces with a GPU."""
    if hardware not in GPUS:
        raise DeployError(f"--hardware {hardware!r} is no GPU of Spaces: choose {', '.join(GPUS)}")


def _own(api: HfApi, arguments: Arguments, *, page: bool) -> list[Space]:
    """The deployment's apps; with `page`, also the static Space. Raises `DeployError` if there is none."""
    spaces = [space for space in spaces_of(api, arguments.owner, arguments.name) if page or not space.is_page]
    if not spaces:
        raise DeployError(f"{arguments.owner} has no Spaces called {arguments.name}-*: run `up` to make them")
    return spaces


def _known_secrets(owner: str) -> tuple[str, ...]:
    return tuple(filter(None, (keys.read_space_key(owner), os.environ.get("SPACE_HF_TOKEN"), get_token())))


if __name__ == "__main__":
    main()
