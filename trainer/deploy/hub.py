"""The Hub: the rights of a token, the state and health of the Spaces, and the changes that `up` makes.

Every call to the Hub goes through huggingface_hub. `explained` turns its errors into a `DeployError`.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, SpaceRuntime, get_session
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    BucketNotFoundError,
    HfHubHTTPError,
    HTTPError,  # of httpx or httpx2, whichever this version of huggingface_hub uses
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import logging
from huggingface_hub.utils.tqdm import disable_progress_bars

from delta_weight_sync.cost import HARDWARE, PRICES_READ_ON
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.signing import PUBLIC_KEY
from trainer import spaces
from trainer.deploy import DeployError
from trainer.deploy.keys import fingerprint
from trainer.deploy.plan import MARK, SpacePlan, files

PAGE = "-page"  # ends the name of the static Space, which runs nothing
PAUSED = ("PAUSED", "STOPPED")
FAILED = ("NO_APP_FILE", "CONFIG_ERROR", "BUILD_ERROR", "RUNTIME_ERROR")
_UP = ("healthy", "serving", spaces.NO_VERSION_YET)
TOKENS, BILLING = "https://huggingface.co/settings/tokens", "https://huggingface.co/settings/billing"
PLAN = "Docker Spaces need PRO, Team or Enterprise"
WAIT_LIMIT_S = 3600.0  # the first build pulls vLLM's image, about 10 GB
_POLL_S = 5.0
# `up` fails only if an error lasts this long: at first, the error may be from before the last change.
_ERROR_LIMIT_S = 60.0
_LOG_LINES = 15

Secrets = Mapping[str, str]  # name -> value


def connect() -> HfApi:
    """A client of the Hub at HF_ENDPOINT, with a time limit for requests; huggingface_hub sets none."""

    get_session().timeout = 60.0
    disable_progress_bars()
    logging.set_verbosity_error()  # otherwise the client warns if no file differs
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


@contextmanager
def explained(what: str, variable: str = "HF_TOKEN") -> Iterator[None]:
    """Turn an error of the Hub's client into a `DeployError` about `what`. `variable` holds the token."""
    try:
        yield
    except LocalTokenNotFoundError:
        raise DeployError(f"HF_TOKEN is not set: create a token of type Write at {TOKENS}") from None
    except HfHubHTTPError as error:
        raise DeployError(f"{what}: {_refusal(error, variable)}") from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        fix = "check the network and HF_ENDPOINT, then run the same command again"
        raise DeployError(f"{what}: the Hub gave no answer ({type(error).__name__}); {fix}") from error
    except UnicodeEncodeError:
        raise DeployError(f"{variable} has a character that no token has: copy it from {TOKENS}") from None
    except ValueError as error:  # the client itself refuses to send the request
        raise DeployError(f"{what}: {_one_line(error)}") from error


def _refusal(error: HfHubHTTPError, variable: str) -> str:
    status = error.response.status_code
    if status == 429 or status >= 500:
        return f"the Hub answered {status}: run the same command again in a few minutes"
    known = {
        401: f"the Hub does not know this token (401): create a new one at {TOKENS} and set {variable} to it",
        402: f"the Hub asks for payment (402): {PLAN}, and GPUs need credits: {BILLING}",
        403: f"the token in {variable} lacks this right (403): create one with write access at {TOKENS}",
        404: f"it does not exist, or this token may not see it (404): check its name and {variable}",
    }
    text = re.sub(r"\?\S+", "", error.server_message or str(error))  # without the parameters of a URL in it
    return known.get(status) or f"the Hub refused the request ({status}: {_one_line(text)})"


def _one_line(text: object) -> str:
    return masked(" ".join(str(text).split())[:300])


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """Mask these secrets in `text`, and anything that looks like a token or a signing key."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return re.sub(r"(hf|ed25519_secret)_[A-Za-z0-9_]{8,}", r"\1_***", text)


class Account:
    """The account that a token belongs to, and the token's rights."""

    def __init__(self, api: HfApi, token: str | None = None, variable: str = "HF_TOKEN") -> None:
        with explained(f"looking up the account of {variable}", variable):
            self.who: Mapping[str, Any] = api.whoami(token=token)
        access = self.who.get("auth", {}).get("accessToken") or {}
        self.name, self.role = str(self.who["name"]), str(access.get("role") or "unknown role")
        self.orgs = {org["name"]: org for org in self.who.get("orgs", ())}
        self._grants: Mapping[str, Any] = access.get("fineGrained") or {}

    def may_write(self, owner: str | None = None) -> bool:
        """Whether the token may create repositories of `owner`; for None, whether it may write anything."""
        if self.role != "fineGrained":
            return self.role != "read" and owner in {None, self.name, *self.orgs}
        scopes = [s for s in self._grants.get("scoped", ()) if owner in (None, s["entity"].get("name"))]
        permissions = {permission for scope in scopes for permission in scope["permissions"]}
        if owner:
            return "repo.write" in permissions
        return any(p.endswith(".write") for p in permissions.union(self._grants.get("global", ())))

    def require_write(self, owner: str) -> None:
        """Raise `DeployError` unless the token may create repositories of this owner."""
        if not self.may_write(owner):
            problem = f"the token of {self.name} ({self.role}) may not create anything for {owner}"
            other = f"a fine-grained one with write access to all of {owner}'s repositories"
            fix = f"create one of type Write at {TOKENS}, or {other}, and set HF_TOKEN to it"
            raise DeployError(f"{problem}: {fix}")


def require_read_only(api: HfApi, token: str) -> str:
    """Return the token if it is read-only, as tokens on a Space must be. Otherwise raise `DeployError`."""
    fix = f"create one of type Read at {TOKENS}"
    if not token:
        use = "replicas read the bucket and trainers open private Spaces with this token"
        raise DeployError(f"SPACE_HF_TOKEN is not set: {use}; {fix}")
    account = Account(api, token, "SPACE_HF_TOKEN")
    if account.may_write():
        problem = f"SPACE_HF_TOKEN may write ({account.role})"
        raise DeployError(f"{problem}, but a token on a Space must be read-only: {fix}")
    return token


@dataclass(frozen=True)
class Space:
    """A Space as it is on the Hub."""

    repo_id: str
    url: str
    private: bool
    variables: Mapping[str, str]
    secrets: Mapping[str, str | None]  # name -> description: a fingerprint of the value, which the Hub hides
    files: frozenset[str]
    sha: str | None  # of the newest commit
    runtime: SpaceRuntime

    @property
    def hardware(self) -> str | None:
        """The hardware that was requested last; if none was requested, the current hardware."""
        return self.runtime.requested_hardware or self.runtime.hardware

    @property
    def billed(self) -> bool:
        return self.runtime.stage.startswith("RUNNING")


def spaces_of(
    api: HfApi, owner: str, name: str, expected: Iterable[str] = (), *, page: bool | None = False
) -> list[Space]:
    """Return the deployment's Spaces, the environment's first. Raises `DeployError` if a Space lacks the
    variable `MARK`, because `up` did not create such a Space.

    The Hub's list may be out of date, so `expected` Spaces are looked up by name, too. If `page` is True,
    return only the static Space. If it is False, return only the apps. If it is None, return the apps, then
    the static Space. Sets the environment variable `SPACES` to the URLs of the returned apps, because this
    process sends its key only to URLs in `SPACES`.
    """
    pattern = re.compile(rf"{re.escape(f'{owner}/{name}')}-(env|replica-(\d+)|page)")
    with explained(f"listing the Spaces of {owner}"):
        names = {*expected, *(space.id for space in api.list_spaces(author=owner))}
    known = [match for name in names if (match := pattern.fullmatch(name))]
    matches = [match for match in known if page in (None, match[1] == "page")]
    matches.sort(key=lambda match: (match[1] == "page", int(match[2] or 0)))
    existing = [space for match in matches if (space := _space(api, match[0]))]
    if foreign := ", ".join(s.repo_id for s in existing if not s.variables.items() >= MARK.items()):
        fix = "choose another --name, or delete it on the Hub"
        raise DeployError(f"{foreign} was not made by trainer.deploy, so nothing was changed: {fix}")
    os.environ["SPACES"] = " ".join(space.url for space in existing if not space.repo_id.endswith(PAGE))
    return existing


def _space(api: HfApi, repo_id: str) -> Space | None:
    with explained(f"reading {repo_id}"):
        try:
            info = api.space_info(repo_id)
        except RepositoryNotFoundError:
            return None
        return Space(
            repo_id,
            info.host or f"https://{info.subdomain}.hf.space",
            bool(info.private),
            {name: variable.value for name, variable in api.get_space_variables(repo_id).items()},
            {name: secret.description for name, secret in api.get_space_secrets(repo_id).items()},
            frozenset(file.rfilename for file in info.siblings or ()),
            info.sha,
            api.get_space_runtime(repo_id),
        )


def bucket_is_private(api: HfApi, bucket: str) -> bool | None:
    """Whether the bucket is private; None if it does not exist."""
    with explained(f"looking for the bucket {bucket}"):
        try:
            return bool(api.bucket_info(bucket).private)
        except BucketNotFoundError:
            return None


def log_lines(api: HfApi, repo_id: str, *, build: bool) -> list[str]:
    with explained(f"reading the log of {repo_id}"):
        return [line for chunk in api.fetch_space_logs(repo_id, build=build) for line in chunk.splitlines()]


def make_change(what: str, call: Callable[..., object], *given: object, **options: object) -> None:
    """Make one change on the Hub, then print it."""
    with explained(what):
        call(*given, **options)
    print(what, flush=True)


def apply(api: HfApi, owner: str, name: str, wanted: list[SpacePlan], secrets: Secrets) -> list[Space]:
    """Make the Hub match the plan `wanted` (all apps, or only the page), and print each change.
    Returns the Spaces of the plan, the environment's first."""
    plans, bucket, changes = {plan.repo_id: plan for plan in wanted}, f"{owner}/{name}", 0
    contents, page = {plan.repo_id: files(plan.folder) for plan in wanted}, not wanted[0].hardware

    def change(what: str, *call: Any, **options: Any) -> None:
        nonlocal changes
        make_change(what, *call, **options)
        changes += 1

    there = {space.repo_id for space in spaces_of(api, owner, name, plans, page=page)}
    if not page and bucket_is_private(api, bucket) is None:
        change(f"create the bucket {bucket} (private)", api.create_bucket, bucket, private=True)
    for repo_id in sorted(plans.keys() - there):
        plan, mark = plans[repo_id], [{"key": key, "value": value} for key, value in MARK.items()]
        options: dict[str, Any] = {"repo_type": "space", "space_sdk": "static" if page else "docker"}
        options |= {"space_hardware": plan.hardware or None, "space_sleep_time": plan.sleep_s}
        what = f"create {repo_id} ({'private' if plan.private else 'public'}, {plan.hardware or 'static'})"
        change(what, api.create_repo, repo_id, private=plan.private, space_variables=mark, **options)
    found = spaces_of(api, owner, name, plans, page=page)
    if hidden := plans.keys() - {space.repo_id for space in found}:
        raise DeployError(f"the Hub does not show {', '.join(sorted(hidden))} yet: run `up` again")
    for space in found:
        repo_id, stage = space.repo_id, space.runtime.stage
        if repo_id not in plans:
            change(f"delete {repo_id}, which is not in the plan", api.delete_repo, repo_id, repo_type="space")
            continue
        _update(plans[repo_id], space, secrets, api, change)  # precedes the upload, which starts the Space
        if _upload(api, space, contents[repo_id]):
            changes += 1
        elif not page and stage in (*PAUSED, *FAILED):
            change(f"restart {repo_id} ({stage})", api.restart_space, repo_id)
    if not changes:
        print("nothing to change: everything is as planned", flush=True)
    return [space for space in found if space.repo_id in plans]


def _update(plan: SpacePlan, space: Space, secrets: Secrets, api: HfApi, change: Callable[..., None]) -> None:
    """Change the settings that differ from the plan. Of unplanned variables, only `PUBLIC_KEY` is removed."""
    repo_id, hardware, sleep_s = plan.repo_id, plan.hardware, plan.sleep_s
    if space.private != plan.private:
        what = f"make {repo_id} {'private' if plan.private else 'public'}"
        change(what, api.update_repo_settings, repo_id, private=plan.private, repo_type="space")
    for key, value in plan.variables.items():
        if space.variables.get(key) != value:
            change(f"set {key}={value} of {repo_id}", api.add_space_variable, repo_id, key, value)
    if PUBLIC_KEY in space.variables.keys() - plan.variables.keys():
        change(f"remove {PUBLIC_KEY} from {repo_id}", api.delete_space_variable, repo_id, PUBLIC_KEY)
    for name in plan.secrets:
        value, hashed = secrets[name], fingerprint(secrets["REPLICA_KEY"], name, secrets[name])
        if space.secrets.get(name) != hashed:
            what = f"set the secret {name} of {repo_id}"
            change(what, api.add_space_secret, repo_id, name, value, description=hashed)
    if hardware not in ("", space.hardware):
        what = f"move {repo_id} to {hardware}"
        change(what, api.request_space_hardware, repo_id, hardware, sleep_time=sleep_s)
    elif sleep_s is not None and space.runtime.sleep_time != sleep_s:
        change(f"let {repo_id} sleep after {sleep_s} s", api.set_space_sleep_time, repo_id, sleep_s)


def _upload(api: HfApi, space: Space, local: Mapping[str, Path | bytes]) -> bool:
    """Upload all changed files in one commit, so the Space builds once. Returns False if no file differs."""
    gone = space.files - local.keys() - {".gitattributes"}  # the Hub makes this file
    # The client leaves out files that the Space already has, and makes no empty commit.
    operations: list[Any] = [CommitOperationAdd(*file) for file in local.items()]
    operations += map(CommitOperationDelete, gone)
    repo_id, title = space.repo_id, "Delta Weight Sync"
    with explained(f"upload the files of {repo_id}"):
        made = api.create_commit(repo_id, operations, commit_message=title, repo_type="space")
    if uploaded := made.oid != space.sha:
        print(f"upload the changed files of {repo_id}", flush=True)
    return uploaded


def wait_until_healthy(api: HfApi, waiting: list[Space], secrets: tuple[str, ...]) -> None:
    """Wait until the apps of these Spaces are up, and print their states with `secrets` masked.

    A replica that waits for the run's first version counts as up. Raises `DeployError` if a Space fails, or
    is not up within an hour.
    """
    started, states, error_since = time.monotonic(), dict[str, str](), dict[str, float]()
    while waiting := [space for space in waiting if states.get(space.repo_id) not in _UP]:
        if time.monotonic() > started + WAIT_LIMIT_S:
            left = ", ".join(f"{space.repo_id}: {states[space.repo_id]}" for space in waiting)
            raise DeployError(f"not up within {WAIT_LIMIT_S:.0f} s ({left}): see `logs`, then run `up` again")
        time.sleep(_POLL_S * bool(states))
        for space in waiting:
            repo_id, answer = space.repo_id, _answer(api, space)
            if states.get(repo_id) != (state := masked(str(answer), secrets)):
                states[repo_id] = state
                print(f"[{time.monotonic() - started:5.0f} s] {repo_id}: {state}", flush=True)
            if not answer.error:
                error_since.pop(repo_id, None)
            now = time.monotonic()
            if answer.error and now >= error_since.setdefault(repo_id, now) + _ERROR_LIMIT_S:
                failed = [f"{repo_id} did not become ready: {answer}"]
                if answer.state in FAILED:
                    log = "run" if answer.state == "RUNTIME_ERROR" else "build"
                    failed[0] += f". Fix the error and run `up` again. The end of its {log} log:"
                    failed += log_lines(api, repo_id, build=log == "build")[-_LOG_LINES:]
                raise DeployError(masked("\n  ".join(failed), secrets))


def _answer(api: HfApi, space: Space) -> spaces.Answer:
    with explained(f"reading the state of {space.repo_id}"):
        now = api.get_space_runtime(space.repo_id)
    if now.stage in FAILED:
        return spaces.Answer(now.stage, error=now.raw.get("errorMessage") or "the Hub gives no reason")
    if now.stage in PAUSED:
        raise DeployError(f"{space.repo_id} was paused in the meantime: run `resume`")
    if now.stage not in ("RUNNING", "SLEEPING"):  # a request wakes a sleeping Space
        return spaces.Answer(now.stage)
    try:
        return spaces.probe(space.url, "env" if space.repo_id.endswith("-env") else "replica")
    except spaces.SpacesUnavailableError as error:
        return spaces.Answer(now.stage, error=str(error))


def table(found: list[Space]) -> str:
    """Format a row for each Space, and the cost per hour: now, and while all of them run."""
    rows = [("Space", "stage", "hardware", "version", "digest", "$/h")]
    now = total = 0.0
    for space in found:
        known, version, digest = HARDWARE.get(space.hardware or ""), "-", "-"
        usd = known.usd_per_hour if known else 0.0
        now, total = now + usd * space.billed, total + usd
        cost = f"{usd * space.billed:.2f}" if known or not space.hardware else "?"
        # A request would wake a sleeping Space.
        if space.billed and not space.repo_id.endswith(("-env", PAGE)):
            try:
                report = spaces.request(space.url, "GET", "/status").raise_for_status().content
                status = ReplicaReport.model_validate_json(report).status
                version, digest = "-" if status.version is None else str(status.version), status.digest or "-"
            except (spaces.SpacesUnavailableError, httpx.HTTPError, ValueError):
                version = "no answer"
        rows.append((space.repo_id, space.runtime.stage, space.hardware or "-", version, digest, cost))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.append(f"now ${now:.2f} per hour; ${total:.2f} while all of them run (prices of {PRICES_READ_ON})")
    return "\n".join(lines)
