"""`python -m trainer.deploy COMMAND`: `--help` lists the commands."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from huggingface_hub import HfApi, get_token

from delta_weight_sync.cost import GPUS, HARDWARE, PRICES_READ_ON, PRICES_SOURCE
from delta_weight_sync.signing import PUBLIC_KEY, PublicKeys, make_keys
from trainer.deploy import DeployError, hub, keys
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
    text = "Deploy a bucket and Spaces to the Hugging Face Hub."
    parser = argparse.ArgumentParser(prog="python -m trainer.deploy", description=text)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[HfApi, Arguments], None], text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        added.add_argument("--owner", required=run is not _doctor, default="", help="user or organization")
        added.add_argument("--name", default="wordle", help="name of the bucket, and prefix of the Spaces")
        added.set_defaults(run_command=run)
        return added

    up = command("up", _up, "create the bucket and the Spaces, or update them")
    up.add_argument("--run", default="first", help="the run that the replicas follow (default: first)")
    up.add_argument("--hardware", choices=GPUS, default="l4x1", help="GPUs of a replica (default: l4x1)")
    up.add_argument("--replicas", type=int, default=1, help="number of replicas (default: 1)")
    up.add_argument("--public", action="store_true", help="make the Spaces public; the bucket stays private")
    up.add_argument("--unsigned", action="store_true", help="let replicas serve versions without a signature")
    only = up.add_mutually_exclusive_group()
    only.add_argument("--dry-run", type=Path, metavar="DIR", help="only write to DIR what `up` would upload")
    only.add_argument("--static", type=Path, metavar="FOLDER", help="only upload a page, to a static Space")
    command("status", _status, "show state, version and cost of each Space")
    logs = command("logs", _logs, "show the log of a Space")
    logs.add_argument("space", help="env, replica-1, ...")
    command("pause", _pause, "stop all Spaces until `resume`; a paused Space costs nothing")
    command("resume", _resume, "start paused Spaces again")
    down = command("down", _down, "delete the Spaces and keep the bucket")
    down.add_argument("--bucket", action="store_true", help="also delete the bucket, with all its runs")
    doctor = command("doctor", _doctor, "check everything that a deployment needs")
    doctor.add_argument("--config", type=Path, default=_CONFIG, help="trainer config (default: Qwen3-0.6B's)")
    doctor.add_argument("--model", help="a Hub id, or the folder of a checkpoint; by default the config's")
    doctor.add_argument("--hardware", choices=GPUS, default="l4x1", help="GPUs of a replica (default: l4x1)")
    return parser


def _up(api: HfApi, arguments: Arguments) -> None:
    owner, name, private = arguments.owner, arguments.name, not arguments.public
    if arguments.static:
        page = SpacePlan(f"{owner}/{name}{hub.PAGE}", arguments.static, MARK, (), "", None, private)
        hub.Account(api).require_write(owner)
        (space,) = hub.apply(api, owner, name, [page], {})
        reach = ", which only accounts with access can open" if private else f", {space.url}"
        print(f"\npage         {api.endpoint}/spaces/{space.repo_id}{reach}")
        return
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
    token = hub.require_read_only(api, os.environ.get("SPACE_HF_TOKEN", ""))
    key = os.environ["SPACE_KEY"] = keys.space_key(owner)  # this process sends the key to the Spaces
    if trusted == NO_KEY_YET:
        plans = make_plan(owner, name, **options, trusted=_new_signing_key(api, owner, name))
    made = hub.apply(api, owner, name, plans, {"HF_TOKEN": token, "REPLICA_KEY": key, "WORDLE_KEY": key})
    wait_until_healthy(api, made, (key, token))
    print(_summary(arguments, plans, [space.url for space in made]))


def _new_signing_key(api: HfApi, owner: str, name: str) -> str:
    file = keys.signing_file(owner, name)
    for space in spaces_of(api, owner, name):
        if trusted := space.variables.get(PUBLIC_KEY):
            problem = f"{space.repo_id} trusts {PublicKeys(trusted)}, but the key's file {file} is missing"
            fix = "copy it to this machine; if it is lost, run `up --unsigned` and then `up` for a new key"
            raise DeployError(f"{problem}: {fix}")
    public = make_keys(file)
    print(f"made a new signing key in {file}; replicas will serve only versions that it signed")
    return public


def _summary(arguments: Arguments, plans: Sequence[SpacePlan], urls: Sequence[str]) -> str:
    env, replicas, variables = urls[0], " ".join(urls[1:]), plans[-1].variables
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
    print(hub.table(_own_spaces(api, arguments, page=None)))


def _logs(api: HfApi, arguments: Arguments) -> None:
    prefix = f"{arguments.owner}/{arguments.name}-"
    found = {space.repo_id.removeprefix(prefix): space for space in _own_spaces(api, arguments)}
    if arguments.space not in found:
        raise DeployError(f"there is no Space {prefix}{arguments.space}: choose {', '.join(found)}")
    space = found[arguments.space]
    build = "BUILD" in space.runtime.stage or space.runtime.stage == "CONFIG_ERROR"
    for line in hub.log_lines(api, space.repo_id, build=build):
        print(hub.masked(line, _known_secrets(arguments.owner)))


def _pause(api: HfApi, arguments: Arguments) -> None:
    for space in _own_spaces(api, arguments):
        make_change(f"pause {space.repo_id}", api.pause_space, space.repo_id)


def _resume(api: HfApi, arguments: Arguments) -> None:
    spaces = _own_spaces(api, arguments)
    for space in spaces:
        if space.runtime.stage != "RUNNING":
            make_change(f"resume {space.repo_id}", api.restart_space, space.repo_id)
    wait_until_healthy(api, spaces, _known_secrets(arguments.owner))


def _down(api: HfApi, arguments: Arguments) -> None:
    bucket = f"{arguments.owner}/{arguments.name}"
    for space in spaces_of(api, arguments.owner, arguments.name, page=None):
        make_change(f"delete {space.repo_id}", api.delete_repo, space.repo_id, repo_type="space")
    if arguments.bucket:
        make_change(f"delete the bucket {bucket}", api.delete_bucket, bucket, missing_ok=True)
    else:
        print(f"kept the bucket {bucket}; `down --bucket` deletes it, with all its runs")


def _doctor(api: HfApi, arguments: Arguments) -> None:
    token = os.environ.get("SPACE_HF_TOKEN", "")
    config = yaml.safe_load(arguments.config.read_text())
    if not (model := arguments.model or config.get("model")):
        raise DeployError(f"{arguments.config} names no model: add --model")
    owner = arguments.owner or hub.Account(api).name
    if not examine(Setup(api, owner, arguments.name, model, arguments.hardware, token, config)):
        sys.exit(1)


def _own_spaces(api: HfApi, arguments: Arguments, *, page: bool | None = False) -> list[Space]:
    """Like `spaces_of`, but raises `DeployError` if there are no Spaces."""
    if not (spaces := spaces_of(api, arguments.owner, arguments.name, page=page)):
        raise DeployError(f"{arguments.owner} has no Spaces called {arguments.name}-*: run `up` to make them")
    return spaces


def _known_secrets(owner: str) -> tuple[str, ...]:
    return tuple(filter(None, (keys.read_space_key(owner), os.environ.get("SPACE_HF_TOKEN"), get_token())))


if __name__ == "__main__":
    main()
