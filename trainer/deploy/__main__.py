"""`python -m trainer.deploy COMMAND`: see `trainer/deploy/__init__.py`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, get_token

from delta_weight_sync.plan.prices import GPUS
from delta_weight_sync.signing import PUBLIC_KEY, PublicKeys, make_keys
from trainer.deploy import account, keys
from trainer.deploy.apply import apply, refuse_strangers
from trainer.deploy.checks_scene import Scene
from trainer.deploy.doctor import examine
from trainer.deploy.errors import DeployError, explained, masked
from trainer.deploy.health import Home, Waiting
from trainer.deploy.hub import Found, connect, log_lines, spaces_of
from trainer.deploy.keys import Secrets
from trainer.deploy.plan import NO_KEY_YET, Deployment, make_plan, signed_by, write_plan
from trainer.deploy.status import table
from trainer.deploy.told import summary


def main(argv: list[str] | None = None) -> None:
    """Run one command; a fault is one sentence, and the exit status 1."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run_command(arguments)
    except DeployError as error:
        sys.exit(f"deploy: {error}")
    except KeyboardInterrupt:
        sys.exit("deploy: stopped; run the same command again to go on")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.deploy", description="Spaces for a run.")
    commands = parser.add_subparsers(required=True)
    _up_options(_command(commands, "up", _up, "make bucket and Spaces, or bring them up to date"))
    _command(commands, "status", _status, "what each Space does, serves and costs")
    logs = _command(commands, "logs", _logs, "what a Space has written")
    logs.add_argument("space", help="env, replica-1, ...")
    _command(commands, "pause", _pause, "stop all Spaces until `resume`; a paused Space costs nothing")
    _command(commands, "resume", _resume, "start paused Spaces again")
    down = _command(commands, "down", _down, "delete the Spaces; the bucket stays")
    down.add_argument("--bucket", action="store_true", help="delete the bucket as well, with all its runs")
    doctor = _command(commands, "doctor", _doctor, "check what a deployment needs", owner_required=False)
    doctor.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a Hub id, or the folder of a checkpoint")
    doctor.add_argument("--hardware", choices=GPUS, default="l4x1", help="of each replica")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: object,
    text: str,
    *,
    owner_required: bool = True,
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("--owner", required=owner_required, default="", help="user or organization")
    command.add_argument(
        "--name", default="wordle", help="of the bucket, and what the Spaces' names begin with"
    )
    command.set_defaults(run_command=run)
    return command


def _up_options(up: argparse.ArgumentParser) -> None:
    up.add_argument("--run", default="first", help="the run that the replicas follow")
    up.add_argument("--hardware", choices=GPUS, default="l4x1", help="of each replica")
    up.add_argument("--replicas", type=int, default=1, help="how many of them")
    up.add_argument(
        "--public", action="store_true", help="let everyone see the Spaces; the bucket stays private"
    )
    up.add_argument(
        "--unsigned", action="store_true", help="let replicas believe whoever can write to the bucket"
    )
    up.add_argument("--dry-run", type=Path, metavar="DIR", help="only write what would be uploaded to DIR")


def _up(arguments: argparse.Namespace) -> None:
    deployment = make_plan(
        arguments.owner,
        arguments.name,
        run=arguments.run,
        hardware=arguments.hardware,
        replicas=arguments.replicas,
        public=arguments.public,
    )
    if arguments.dry_run:
        write_plan(_signed(deployment, arguments, lambda _: NO_KEY_YET), arguments.dry_run)
        _say(f"{arguments.dry_run} holds what `up` would upload, and plan.json; nothing else was touched")
        return
    api = connect()
    account.must_write(account.who(api), arguments.owner)
    token = account.checked_space_token(api, os.environ.get("SPACE_HF_TOKEN", ""))
    secrets = Secrets(_space_key(arguments.owner), token)
    deployment = _signed(deployment, arguments, partial(_new_signing_key, api, deployment))
    if not apply(api, deployment, secrets, _say):
        _say("nothing to change: everything is as planned")
    made = spaces_of(api, deployment.owner, deployment.name, [plan.repo_id for plan in deployment.spaces])
    homes = _wait(api, made, secrets.all())
    _say(summary(deployment, {home.repo_id: home.url for home in homes}))


def _signed(deployment: Deployment, arguments: argparse.Namespace, make: Callable[[Path], str]) -> Deployment:
    """With replicas that believe this deployment's keys; where there are none, those that `make` makes."""
    if arguments.unsigned:
        return deployment
    place = deployment.owner, deployment.name
    known = keys.signing_keys(*place)
    return signed_by(deployment, known.believed if known else make(keys.signing_file(*place)))


def _new_signing_key(api: HfApi, deployment: Deployment, file: Path) -> str:
    for space in spaces_of(api, deployment.owner, deployment.name):
        if believed := space.variables.get(PUBLIC_KEY):
            raise DeployError(
                f"{space.repo_id} believes {PublicKeys(believed)}, whose file {file} is not here; copy it to"
                " this machine, or if it is lost run `up --unsigned`, and then `up`, which makes a new one"
            )
    public = make_keys(file)
    _say(f"made a new signing key in {file}; only what it has signed will be served")
    return public


def _space_key(owner: str) -> str:
    """The owner's key, which from now on this process sends as a trainer would."""
    if (key := keys.read_key(owner)) is None:
        key = keys.make_key(owner)
        _say(f"made a new SPACE_KEY in {keys.key_file(owner)}; Spaces that had another one get this one")
    os.environ["SPACE_KEY"] = key
    return key


def _wait(api: HfApi, spaces: list[Found], secrets: tuple[str, ...]) -> list[Home]:
    homes = [Home(s.repo_id, "env" if s.repo_id.endswith("-env") else "replica", s.url) for s in spaces]
    Waiting(api, secrets, _say).until_healthy(homes)
    return homes


def _status(arguments: argparse.Namespace) -> None:
    _say(table(_ours(connect(), arguments)))


def _logs(arguments: argparse.Namespace) -> None:
    api = connect()
    wanted = f"{arguments.owner}/{arguments.name}-{arguments.space}"
    found = {space.repo_id: space for space in _ours(api, arguments)}
    if wanted not in found:
        names = ", ".join(repo_id.removeprefix(f"{arguments.owner}/{arguments.name}-") for repo_id in found)
        raise DeployError(f"there is no Space {wanted}; there are {names}")
    stage = found[wanted].runtime.stage
    build = "BUILD" in stage or stage == "CONFIG_ERROR"
    for line in log_lines(api, wanted, build=build):
        _say(masked(line, _known_secrets(arguments.owner)))


def _pause(arguments: argparse.Namespace) -> None:
    api = connect()
    for space in _ours(api, arguments):
        with explained(f"pausing {space.repo_id}"):
            api.pause_space(space.repo_id)
        _say(f"paused {space.repo_id}")


def _resume(arguments: argparse.Namespace) -> None:
    api = connect()
    spaces = _ours(api, arguments)
    for space in spaces:
        if space.runtime.stage != "RUNNING":
            with explained(f"resuming {space.repo_id}"):
                api.restart_space(space.repo_id)
            _say(f"resumed {space.repo_id}")
    _wait(api, spaces, _known_secrets(arguments.owner))


def _down(arguments: argparse.Namespace) -> None:
    api, bucket = connect(), f"{arguments.owner}/{arguments.name}"
    spaces = spaces_of(api, arguments.owner, arguments.name)
    refuse_strangers(spaces)
    for space in spaces:
        with explained(f"deleting {space.repo_id}"):
            api.delete_repo(space.repo_id, repo_type="space")
        _say(f"deleted {space.repo_id}")
    if arguments.bucket:
        with explained(f"deleting the bucket {bucket}"):
            api.delete_bucket(bucket, missing_ok=True)
        _say(f"deleted the bucket {bucket}")
    else:
        _say(f"the bucket {bucket} stays; `down --bucket` deletes it, with all its runs")


def _doctor(arguments: argparse.Namespace) -> None:
    token = os.environ.get("SPACE_HF_TOKEN", "")
    scene = Scene(connect(), arguments.owner, arguments.name, arguments.model, arguments.hardware, token)
    if not examine(scene, _say):
        sys.exit(1)


def _ours(api: HfApi, arguments: argparse.Namespace) -> list[Found]:
    """The Spaces of this deployment; raises `DeployError` if there are none, or some of another maker."""
    spaces = spaces_of(api, arguments.owner, arguments.name)
    refuse_strangers(spaces)
    if not spaces:
        raise DeployError(f"{arguments.owner} has no Spaces called {arguments.name}-*; `up` makes them")
    return spaces


def _known_secrets(owner: str) -> tuple[str, ...]:
    known = (keys.read_key(owner), os.environ.get("SPACE_HF_TOKEN"), get_token())
    return tuple(filter(None, known))


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
