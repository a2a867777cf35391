"""The Hub: what a token may do, the state and health of the Spaces, and the changes that `up` makes.

Every call goes through huggingface_hub, and `explained` turns its errors into a `DeployError`.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, set_client_factory
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    BucketNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # of httpx or httpx2, whichever this version of huggingface_hub uses
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from delta_weight_sync.cost import PRICES_READ_ON, price
from trainer import spaces
from trainer.deploy import DeployError
from trainer.deploy.keys import Secrets
from trainer.deploy.plan import MARK, REMOVABLE, Deployment, SpacePlan, files

PAUSED = ("PAUSED", "STOPPED")
ASLEEP = ("SLEEPING", *PAUSED)
FAILED = ("NO_APP_FILE", "CONFIG_ERROR", "BUILD_ERROR", "RUNTIME_ERROR")
TOKENS = "https://huggingface.co/settings/tokens"
WAIT_LIMIT_S = 3600.0  # the first build pulls vLLM's image, some 10 GB
_POLL_S = 5.0
_ERROR_LIMIT_S = 120.0  # for errors that may pass: one that the app reports, or an unknown host name
_FAILED_LIMIT_S = 15.0  # the Hub may still show the state before the last change
_LOG_LINES = 15
_FAILURES = {
    "NO_APP_FILE": "has no files to build; run `up` again",
    "CONFIG_ERROR": "cannot be built with this configuration; fix the error below and run `up` again",
    "BUILD_ERROR": "could not be built; fix the error in the log and run `up` again",
    "RUNTIME_ERROR": "stopped right after its start; fix the error in the log and run `up` again",
}

Change = tuple[str, Callable[[], object]]  # one difference from the plan: what to report, and what to do


def connect() -> HfApi:
    """A client of the Hub at HF_ENDPOINT. Its requests time out; by default they would wait forever."""

    def client() -> Any:
        made = default_client_factory()
        made.timeout = 60.0
        return made

    set_client_factory(client)
    disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


@contextmanager
def explained(what: str, variable: str = "HF_TOKEN") -> Iterator[None]:
    """Turn the client's errors during `what` into a `DeployError`; `variable` holds the token in use."""
    try:
        yield
    except LocalTokenNotFoundError:
        raise DeployError(f"there is no token: make one of type Write at {TOKENS} and set HF_TOKEN") from None
    except HfHubHTTPError as error:
        raise DeployError(f"{what}: {_refusal(error, variable)}") from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        raise DeployError(
            f"{what}: the Hub gave no answer ({type(error).__name__}); check the network and HF_ENDPOINT,"
            " then run the same command again"
        ) from error
    except UnicodeEncodeError:
        raise DeployError(f"{variable} holds a letter that no token has; copy it from {TOKENS}") from None
    except ValueError as error:  # the client itself refuses to send the request
        raise DeployError(f"{what}: {_one_line(error)}") from error


def _refusal(error: HfHubHTTPError, variable: str) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        return "the model is gated; accept its licence on its page, with the account of this token"
    if status == 429 or status >= 500:
        return f"the Hub answered {status}; run the same command again in a few minutes"
    known = {
        401: f"the Hub does not know this token (401); make a new one at {TOKENS} and set {variable}",
        402: "the Hub asks for a paid plan (402); Docker Spaces need PRO, Team or Enterprise, and GPUs need"
        " prepaid credits: https://huggingface.co/settings/billing",
        403: "this token may not do that (403); set HF_TOKEN to one with write access to this owner, made at"
        f" {TOKENS}",
        404: "it does not exist, or this token may not see it; check --owner and HF_TOKEN",
    }
    text = re.sub(r"\?\S+", "", error.server_message or str(error))  # without the parameters of its URL
    return known.get(status) or f"the Hub refused it ({status}: {_one_line(text)})"


def _one_line(text: object) -> str:
    return masked(" ".join(str(text).split())[:300])


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without these secrets, and without anything that looks like a token or a signing key."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return re.sub(r"(hf|ed25519_secret)_[A-Za-z0-9_]{8,}", r"\1_***", text)


class Account:
    """The account of a token and the token's rights, as the Hub describes them."""

    def __init__(self, api: HfApi, token: str | None = None, variable: str = "HF_TOKEN") -> None:
        with explained(f"looking up the account of {variable}", variable):
            self._who: Mapping[str, Any] = api.whoami(token=token)
        access = self._who.get("auth", {}).get("accessToken") or {}
        self.name, self.role = str(self._who["name"]), str(access.get("role") or "unknown role")
        self._orgs = {org["name"]: org for org in self._who.get("orgs", ())}
        self._grants: Mapping[str, Any] = access.get("fineGrained") or {}

    def require_write(self, owner: str) -> None:
        """Raise `DeployError` unless the token may create repositories of this owner."""
        allowed = self.role != "read" and owner in {self.name, *self._orgs}
        if self.role == "fineGrained":
            allowed = "repo.write" in self._permissions(owner)
        if not allowed:
            raise DeployError(
                f"the token of {self.name} ({self.role}) may not create anything for {owner}; set HF_TOKEN to"
                " one of type Write, or a fine-grained one with write access to all repositories of"
                f" {owner}, made at {TOKENS}"
            )

    def can_write(self) -> bool:
        """Whether the token can change anything at all."""
        permissions = {*self._permissions(), *self._grants.get("global", ())}
        fine_grained = any(permission.endswith(".write") for permission in permissions)
        return fine_grained if self.role == "fineGrained" else self.role != "read"

    def has_plan(self, owner: str) -> bool:
        """Whether the owner has the plan that Docker Spaces need: PRO, Team or Enterprise."""
        org = self._orgs.get(owner)
        return bool(self._who.get("isPro") if org is None else org.get("plan") or org.get("isEnterprise"))

    def can_pay(self, owner: str) -> bool | None:
        """Whether the owner can pay for GPUs; None if this token may not know."""
        paying: bool | None = self._orgs.get(owner, self._who).get("canPay")
        return paying

    def _permissions(self, owner: str | None = None) -> set[str]:
        """Those of a fine-grained token on the owner's repositories, or on all."""
        scopes = self._grants.get("scoped", ())
        wanted = [scope for scope in scopes if owner in (None, scope["entity"].get("name"))]
        return {permission for scope in wanted for permission in scope["permissions"]}


def require_read_only(api: HfApi, token: str) -> str:
    """The token, if it cannot write and so may go to the Spaces; raises `DeployError` otherwise."""
    fix = f"make one of type Read at {TOKENS}"
    if not token:
        raise DeployError(
            "SPACE_HF_TOKEN is not set: replicas read the bucket with this read-only token, and trainers"
            f" open private Spaces with it; {fix}"
        )
    account = Account(api, token, "SPACE_HF_TOKEN")
    if account.can_write():
        raise DeployError(f"SPACE_HF_TOKEN may write ({account.role}), and no token on a Space should; {fix}")
    return token


@dataclass(frozen=True)
class Runtime:
    """How a Space runs at the moment."""

    stage: str
    hardware: str | None  # the latest request
    sleep_s: int | None
    error: str

    @property
    def billed(self) -> bool:
        """Whether it costs money."""
        return self.stage.startswith("RUNNING")


@dataclass(frozen=True)
class Space:
    """A Space as it is on the Hub."""

    repo_id: str
    url: str
    private: bool
    variables: Mapping[str, str]
    secrets: Mapping[str, str | None]  # name -> description
    files: Mapping[str, str]  # path -> git's hash of a small file, sha256 of a large one
    runtime: Runtime

    @property
    def ours(self) -> bool:
        """Whether trainer.deploy made it."""
        return self.variables.items() >= MARK.items()


def spaces_of(api: HfApi, owner: str, name: str, expected: Iterable[str] = ()) -> list[Space]:
    """All Spaces with names of this deployment, the environment's first, including foreign ones.

    The Hub's list may be out of date, so the `expected` ones are looked up as well. This process sends its
    key only to Spaces that trainer.deploy made: it lists them in `SPACES`.
    """
    pattern = re.compile(rf"{re.escape(f'{owner}/{name}')}-(env|replica-(\d+))")
    with explained(f"listing the Spaces of {owner}"):
        names = {*expected, *(space.id for space in api.list_spaces(author=owner))}
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    found = [_space(api, match[0]) for match in sorted(matches, key=lambda match: int(match[2] or 0))]
    existing = [space for space in found if space]
    os.environ["SPACES"] = " ".join(space.url for space in existing if space.ours)
    return existing


def refuse_foreign(found: Iterable[Space]) -> None:
    """Raise `DeployError` if trainer.deploy did not make one of these Spaces."""
    if foreign := ", ".join(space.repo_id for space in found if not space.ours):
        fix = "choose another --name, or delete it on the Hub"
        raise DeployError(f"{foreign} was not made by trainer.deploy, so nothing was changed; {fix}")


def _space(api: HfApi, repo_id: str) -> Space | None:
    with explained(f"reading {repo_id}"):
        try:
            info = api.space_info(repo_id)
        except RepositoryNotFoundError:
            return None
        tree = api.list_repo_tree(repo_id, recursive=True, repo_type="space")
        return Space(
            repo_id,
            info.host or f"https://{info.subdomain}.hf.space",
            bool(info.private),
            {name: variable.value for name, variable in api.get_space_variables(repo_id).items()},
            {name: secret.description for name, secret in api.get_space_secrets(repo_id).items()},
            {f.path: f.lfs.sha256 if f.lfs else f.blob_id for f in tree if isinstance(f, RepoFile)},
            runtime(api, repo_id),
        )


def runtime(api: HfApi, repo_id: str) -> Runtime:
    """How a Space runs at the moment."""
    with explained(f"reading the state of {repo_id}"):
        now = api.get_space_runtime(repo_id)
    # The client turns the words that it knows into members of an enumeration.
    stage, hardware = (getattr(v, "value", v) for v in (now.stage, now.requested_hardware or now.hardware))
    return Runtime(str(stage or ""), hardware, now.sleep_time, str(now.raw.get("errorMessage") or ""))


def bucket_is_private(api: HfApi, bucket: str) -> bool | None:
    """Whether the bucket is private; None if it does not exist."""
    with explained(f"looking for the bucket {bucket}"):
        try:
            return bool(api.bucket_info(bucket).private)
        except BucketNotFoundError:
            return None


def log_lines(api: HfApi, repo_id: str, *, build: bool) -> list[str]:
    """The lines of a Space's build log, or of its app's log."""
    with explained(f"reading the log of {repo_id}"):
        chunks = list(api.fetch_space_logs(repo_id, build=build))
    return "\n".join(chunk.rstrip("\n") for chunk in chunks).splitlines()


def apply(api: HfApi, deployment: Deployment, secrets: Secrets, say: Callable[[str], None]) -> int:
    """Make the Hub match the plan: report each change once it is made, and return their number."""
    plans = {plan.repo_id: plan for plan in deployment.spaces}
    found = {space.repo_id: space for space in spaces_of(api, deployment.owner, deployment.name, plans)}
    refuse_foreign(found.values())
    count = 0
    for what, do in _changes(api, deployment.bucket, plans, found, secrets):
        with explained(what):
            do()
        say(what)
        count += 1
    return count


def _changes(
    api: HfApi, bucket: str, plans: Mapping[str, SpacePlan], found: Mapping[str, Space], secrets: Secrets
) -> Iterator[Change]:
    if bucket_is_private(api, bucket) is None:
        yield f"create the bucket {bucket} (private)", partial(api.create_bucket, bucket, private=True)
    for repo_id, plan in plans.items():
        if space := found.get(repo_id):
            yield from _updates(api, plan, space, secrets)
            yield from (uploads := list(_files(api, plan, space.files)))
            stage = space.runtime.stage
            if stage in PAUSED or (stage in FAILED and not uploads):
                yield f"restart {repo_id} ({stage})", partial(api.restart_space, repo_id)
        else:
            visibility = "private" if plan.private else "public"
            yield f"create {repo_id} ({visibility}, {plan.hardware})", partial(_create, api, plan, secrets)
            yield from _files(api, plan, {})
    for extra in sorted(found.keys() - plans.keys()):
        do = partial(api.delete_repo, extra, repo_type="space")
        yield f"delete {extra}, which is not in the plan", do


def _create(api: HfApi, plan: SpacePlan, secrets: Secrets) -> None:
    """Send all settings in the request that creates the Space, so that it never runs without them."""
    api.create_repo(
        plan.repo_id,
        repo_type="space",
        space_sdk="docker",
        private=plan.private,
        space_hardware=plan.hardware,  # type: ignore[arg-type]
        space_sleep_time=plan.sleep_s,
        space_variables=[{"key": key, "value": value} for key, value in plan.variables.items()],
        space_secrets=[
            {"key": key, "value": secrets.value(key), "description": secrets.fingerprint(key)}
            for key in plan.secrets
        ],
    )


def _updates(api: HfApi, plan: SpacePlan, space: Space, secrets: Secrets) -> Iterator[Change]:
    """The settings that differ from the plan. A variable that the owner added stays."""
    repo_id, hardware, sleep_s = plan.repo_id, plan.hardware, plan.sleep_s
    do: Callable[[], object]
    if space.private != plan.private:
        do = partial(api.update_repo_settings, repo_id, private=plan.private, repo_type="space")
        yield f"make {repo_id} {'private' if plan.private else 'public'}", do
    for key, value in plan.variables.items():
        if space.variables.get(key) != value:
            yield f"set {key}={value} of {repo_id}", partial(api.add_space_variable, repo_id, key, value)
    for key in space.variables.keys() & {*REMOVABLE} - plan.variables.keys():
        yield f"remove {key} from {repo_id}", partial(api.delete_space_variable, repo_id, key)
    for name in plan.secrets:
        value, mark = secrets.value(name), secrets.fingerprint(name)
        if space.secrets.get(name) != mark:
            do = partial(api.add_space_secret, repo_id, name, value, description=mark)
            yield f"set the secret {name} of {repo_id}", do
    if space.runtime.hardware != hardware:
        do = partial(api.request_space_hardware, repo_id, hardware, sleep_time=sleep_s)  # type: ignore[arg-type]
        yield f"move {repo_id} to {hardware}", do
    elif sleep_s is not None and space.runtime.sleep_s != sleep_s:
        yield f"let {repo_id} sleep after {sleep_s} s", partial(api.set_space_sleep_time, repo_id, sleep_s)


def _files(api: HfApi, plan: SpacePlan, remote: Mapping[str, str]) -> Iterator[Change]:
    """One commit, and so one build, for all files that differ."""
    local = {path: source.read_bytes() for path, source in files(plan.folder).items()}
    changed = [path for path, data in local.items() if remote.get(path) not in _hashes(data)]
    gone = sorted(remote.keys() - local.keys() - {".gitattributes"})  # the Hub makes this one
    if changed or gone:
        operations = [*(CommitOperationAdd(p, local[p]) for p in changed), *map(CommitOperationDelete, gone)]
        commit = partial(api.create_commit, commit_message="Delta Weight Sync", repo_type="space")
        what = f"upload {len(changed)} and delete {len(gone)} files of {plan.repo_id}"
        yield what, partial(commit, plan.repo_id, operations)


def _hashes(data: bytes) -> tuple[str, str]:
    """Git's name of this content as a small file, and the Hub's as a large file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), hashlib.sha256(data).hexdigest()


def wait_until_healthy(
    api: HfApi, waiting: list[Space], secrets: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Block until the apps of these Spaces are up, and report each change of their states without `secrets`.

    A replica that waits for the run's first version is up. Raises `DeployError` for a Space that fails, or is
    not up within an hour.
    """
    started = time.monotonic()
    states: dict[str, str] = {}
    error_since: dict[str, float] = {}

    def healthy(space: Space) -> bool:
        repo_id, is_env = space.repo_id, space.repo_id.endswith("-env")
        answer = _answer(api, space, "env" if is_env else "replica")
        state = masked(str(answer), secrets)
        if states.get(repo_id) != state:
            states[repo_id] = state
            say(f"[{time.monotonic() - started:5.0f} s] {repo_id}: {state}")
        if not answer.error:
            error_since.pop(repo_id, None)
            return answer.state in (("healthy",) if is_env else ("serving", spaces.NO_VERSION_YET))
        limit = _FAILED_LIMIT_S if answer.state in FAILED else _ERROR_LIMIT_S
        if time.monotonic() >= error_since.setdefault(repo_id, time.monotonic()) + limit:
            failed = answer.state in FAILED
            text = _failure(api, repo_id, answer) if failed else f"{repo_id} does not get ready: {answer}"
            raise DeployError(masked(text, secrets))
        return False

    while time.monotonic() < started + WAIT_LIMIT_S:
        waiting = [space for space in waiting if not healthy(space)]
        if not waiting:
            return
        time.sleep(_POLL_S)
    left = ", ".join(f"{space.repo_id}: {states[space.repo_id]}" for space in waiting)
    raise DeployError(f"not up within {WAIT_LIMIT_S:.0f} s ({left}); see `logs`, then run `up` again")


def _answer(api: HfApi, space: Space, kind: spaces.Kind) -> spaces.Answer:
    now = runtime(api, space.repo_id)
    if now.stage in FAILED:
        return spaces.Answer(now.stage, error=now.error or "the Hub gives no reason")
    if now.stage in PAUSED:
        raise DeployError(f"{space.repo_id} was paused in the meantime; `resume` it")
    if now.stage not in ("RUNNING", "SLEEPING"):  # a request wakes a sleeping Space
        return spaces.Answer(now.stage)
    try:
        return spaces.probe(space.url, kind)
    except spaces.SpacesUnavailableError as error:
        return spaces.Answer(now.stage, error=str(error))


def _failure(api: HfApi, repo_id: str, answer: spaces.Answer) -> str:
    build = answer.state != "RUNTIME_ERROR"
    log = "build" if build else "run"
    sentence = f"{repo_id} {_FAILURES[answer.state]} ({answer.error}). The end of its {log} log:"
    return "\n  ".join([sentence, *(log_lines(api, repo_id, build=build)[-_LOG_LINES:] or ["(nothing)"])])


def table(found: list[Space]) -> str:
    """One row for each Space, and the cost of all of them now and while all of them run."""
    rows = [("Space", "stage", "hardware", "version", "digest", "$/h")]
    now = total = 0.0
    for space in found:
        usd, billed = price(space.runtime.hardware), space.runtime.billed
        now, total = now + (usd or 0.0) * billed, total + (usd or 0.0)
        cost, hardware = "?" if usd is None else f"{usd * billed:.2f}", space.runtime.hardware or "-"
        rows.append((space.repo_id, space.runtime.stage, hardware, *_served(space), cost))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.append(f"now ${now:.2f} per hour; ${total:.2f} while all of them run (prices of {PRICES_READ_ON})")
    return "\n".join(lines)


def _served(space: Space) -> tuple[str, str]:
    """Version and digest that a running replica serves. A request to another Space would wake it."""
    if not space.runtime.billed or space.repo_id.endswith("-env"):
        return "-", "-"
    try:
        status = spaces.request(space.url, "GET", "/status").raise_for_status().json()["status"]
        version, digest = ("-" if status[key] is None else str(status[key]) for key in ("version", "digest"))
        return version, digest
    except (httpx.HTTPError, spaces.SpacesUnavailableError, ValueError, LookupError, TypeError):
        return "no answer", "-"
