"""Makes the Hub what the plan says: compares, and changes only what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from trainer.deploy.errors import DeployError, explained
from trainer.deploy.hub import FAILED, PAUSED, Found, bucket_privacy, spaces_of
from trainer.deploy.keys import Secrets
from trainer.deploy.plan import SWITCHED, Deployment, SpacePlan
from trainer.deploy.stage import files

Say = Callable[[str], None]
_MADE_BY_THE_HUB = {".gitattributes"}


@dataclass(frozen=True)
class Change:
    """One thing that differs from the plan."""

    what: str
    do: Callable[[], object]


def apply(api: HfApi, deployment: Deployment, secrets: Secrets, say: Say) -> int:
    """Carry out what differs, each change said once it is done; returns how many there were."""
    expected = [plan.repo_id for plan in deployment.spaces]
    there = spaces_of(api, deployment.owner, deployment.name, expected)
    found = {space.repo_id: space for space in there}
    refuse_strangers(found.values())
    count = 0
    for change in _changes(api, deployment, found, secrets):
        with explained(change.what):
            change.do()
        say(change.what)
        count += 1
    return count


def refuse_strangers(spaces: Iterable[Found]) -> None:
    """Raise `DeployError` if one of these Spaces was not made by this command."""
    strangers = [space.repo_id for space in spaces if not space.ours]
    if strangers:
        raise DeployError(
            f"{', '.join(strangers)} was not made by trainer.deploy, so nothing was changed; choose another"
            " --name, or delete it on the Hub"
        )


def _changes(
    api: HfApi, deployment: Deployment, found: Mapping[str, Found], secrets: Secrets
) -> Iterator[Change]:
    yield from _bucket(api, deployment.bucket)
    for plan in deployment.spaces:
        there = found.get(plan.repo_id)
        if there is None:
            yield Change(_creation(plan), partial(_create, api, plan, secrets))
            yield from _files(api, plan, {})
        else:
            yield from _differences(api, plan, there, secrets)
    for extra in sorted(found.keys() - {plan.repo_id for plan in deployment.spaces}):
        yield Change(
            f"delete {extra}, which the plan has no more",
            partial(api.delete_repo, extra, repo_type="space"),
        )


def _bucket(api: HfApi, bucket: str) -> Iterator[Change]:
    if bucket_privacy(api, bucket) is None:
        yield Change(
            f"create the bucket {bucket} (private)", partial(api.create_bucket, bucket, private=True)
        )


def _creation(plan: SpacePlan) -> str:
    return f"create {plan.repo_id} ({'private' if plan.private else 'public'}, {plan.hardware})"


def _create(api: HfApi, plan: SpacePlan, secrets: Secrets) -> None:
    """All settings in the one request that makes the Space, so that it never runs without them."""
    api.create_repo(
        plan.repo_id,
        repo_type="space",
        space_sdk="docker",
        private=plan.private,
        space_hardware=plan.hardware,  # type: ignore[arg-type]
        space_sleep_time=plan.sleep_s,
        space_variables=[{"key": key, "value": value} for key, value in plan.variables.items()],
        space_secrets=[
            {"key": name, "value": secrets.value(name), "description": secrets.fingerprint(name)}
            for name in plan.secrets
        ],
    )


def _differences(api: HfApi, plan: SpacePlan, there: Found, secrets: Secrets) -> Iterator[Change]:
    yield from _visibility(api, plan, there)
    yield from _variables(api, plan, there)
    yield from _secrets(api, plan, there, secrets)
    yield from _hardware(api, plan, there)
    new_files = list(_files(api, plan, there.files))
    yield from new_files
    stage = there.runtime.stage
    if stage in PAUSED or (stage in FAILED and not new_files):
        yield Change(f"restart {plan.repo_id} ({stage})", partial(api.restart_space, plan.repo_id))


def _visibility(api: HfApi, plan: SpacePlan, there: Found) -> Iterator[Change]:
    if there.private != plan.private:
        do = partial(api.update_repo_settings, plan.repo_id, private=plan.private, repo_type="space")
        yield Change(f"make {plan.repo_id} {'private' if plan.private else 'public'}", do)


def _variables(api: HfApi, plan: SpacePlan, there: Found) -> Iterator[Change]:
    for key, value in plan.variables.items():
        if there.variables.get(key) != value:
            do = partial(api.add_space_variable, plan.repo_id, key, value)
            yield Change(f"set {key}={value} of {plan.repo_id}", do)
    for key in SWITCHED:
        if key in there.variables and key not in plan.variables:
            do = partial(api.delete_space_variable, plan.repo_id, key)
            yield Change(f"take {key} from {plan.repo_id}", do)


def _secrets(api: HfApi, plan: SpacePlan, there: Found, secrets: Secrets) -> Iterator[Change]:
    for name in plan.secrets:
        mark = secrets.fingerprint(name)
        if there.secrets.get(name) != mark:
            do = partial(api.add_space_secret, plan.repo_id, name, secrets.value(name), description=mark)
            yield Change(f"set the secret {name} of {plan.repo_id}", do)


def _hardware(api: HfApi, plan: SpacePlan, there: Found) -> Iterator[Change]:
    repo_id, hardware, sleep_s = plan.repo_id, plan.hardware, plan.sleep_s
    if there.runtime.hardware != hardware:
        yield Change(
            f"move {repo_id} to {hardware}",
            partial(api.request_space_hardware, repo_id, hardware, sleep_time=sleep_s),  # type: ignore[arg-type]
        )
    elif sleep_s is not None and there.runtime.sleep_s != sleep_s:
        yield Change(
            f"let {repo_id} sleep after {sleep_s} s", partial(api.set_space_sleep_time, repo_id, sleep_s)
        )


def _files(api: HfApi, plan: SpacePlan, remote: Mapping[str, str]) -> Iterator[Change]:
    """One commit, so one build, with the files that are not the same there."""
    local = {path: source.read_bytes() for path, source in files(plan.folder).items()}
    changed = [path for path, data in local.items() if remote.get(path) not in _hashes(data)]
    gone = sorted(remote.keys() - local.keys() - _MADE_BY_THE_HUB)
    if not changed and not gone:
        return
    operations = [
        *(CommitOperationAdd(path, local[path]) for path in changed),
        *(CommitOperationDelete(path) for path in gone),
    ]
    what = f"upload {len(changed)} and delete {len(gone)} files of {plan.repo_id}"
    commit = partial(api.create_commit, commit_message="Delta Weight Sync", repo_type="space")
    yield Change(what, partial(commit, plan.repo_id, operations))


def _hashes(data: bytes) -> tuple[str, str]:
    """How git names this content as a file of its own, and how it names it behind a pointer."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), hashlib.sha256(data).hexdigest()
