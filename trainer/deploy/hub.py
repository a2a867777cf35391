"""The Hub: the rights of a token, the Spaces of a deployment, and the changes that `up` makes.

Every call to the Hub goes through huggingface_hub. `explained` turns its errors into a `DeployError`.
"""

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, SpaceRuntime
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    BucketNotFoundError,
    HfHubHTTPError,
    HTTPError,  # of httpx or httpx2, whichever this version of huggingface_hub uses
    LocalTokenNotFoundError,
)
from huggingface_hub.utils import logging
from huggingface_hub.utils.tqdm import disable_progress_bars

from delta_weight_sync.cost import HARDWARE, PRICES_READ_ON
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.signing import PUBLIC_KEY
from delta_weight_sync.store.hub import for_each_client
from trainer import spaces
from trainer.deploy import DeployError
from trainer.deploy.plan import MARK, SpacePlan

PAGE = "-page"  # ends the name of the static Space, which runs nothing
PAUSED = ("PAUSED", "STOPPED")
BROKEN = ("CONFIG_ERROR", "BUILD_ERROR", "RUNTIME_ERROR")
UP = ("healthy", "serving", spaces.NO_VERSION_YET)
TOKENS = "https://huggingface.co/settings/tokens"
BILLING = "https://huggingface.co/settings/billing"
PLAN = "Docker Spaces need PRO, Team or Enterprise"
WAIT_LIMIT_S = 3600.0  # the first build pulls vLLM's image, about 10 GB
_POLL_S = 5.0
# `up` fails only if an error lasts this long: at first, the error may be from before the last change.
ERROR_LIMIT_S = 60.0
_LOG_LINES = 15

Secrets = Mapping[str, str]  # name -> value


def connect() -> HfApi:
    """A client of the Hub at HF_ENDPOINT, with a time limit for requests; huggingface_hub sets none."""
    for_each_client(_limit_time)
    disable_progress_bars()
    logging.set_verbosity_error()  # otherwise the client warns if no file differs
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _limit_time(client: Any) -> None:
    client.timeout = 60.0


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
        402: f"the Hub asks for payment (402): {PLAN}, GPUs and Jobs need credits: {BILLING}",
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

    def may_write(self, owner: str | None = None, right: str = "repo.write") -> bool:
        """Whether the token has this right for all of `owner`; for None, whether it may write anything."""
        if self.role != "fineGrained":
            return self.role != "read" and owner in {None, self.name, *self.orgs}
        scopes = [s for s in self._grants.get("scoped", ()) if owner in (None, s["entity"].get("name"))]
        permissions = {permission for scope in scopes for permission in scope["permissions"]}
        if owner:
            return right in permissions
        return any(p.endswith(".write") for p in permissions.union(self._grants.get("global", ())))

    def require_write(self, owner: str) -> None:
        """Raise `DeployError` unless the token may create repositories of this owner."""
        if not self.may_write(owner):
            problem = f"the token of {self.name} ({self.role}) may not create anything for {owner}"
            other = f"a fine-grained one with write access to all of {owner}'s repositories"
            fix = f"create one of type Write at {TOKENS}, or {other}, and set HF_TOKEN to it"
            raise DeployError(f"{problem}: {fix}")

    def require_jobs(self, owner: str) -> None:
        """Raise `DeployError` unless the token may start Jobs of this owner."""
        if not self.may_write(owner, "job.write"):
            problem = f"the token of {self.name} ({self.role}) may not start Jobs for {owner}"
            raise DeployError(f"{problem}: give it the right to start and manage Jobs at {TOKENS}")


def require_read_only(api: HfApi, token: str) -> None:
    """Raise `DeployError` unless `token`, the value of SPACE_HF_TOKEN, is a token that can only read."""
    fix = f"create one of type Read at {TOKENS}"
    if not token:
        use = "replicas read the bucket and trainers open private Spaces with this token"
        raise DeployError(f"SPACE_HF_TOKEN is not set: {use}; {fix}")
    account = Account(api, token, "SPACE_HF_TOKEN")
    if account.may_write():
        problem = f"SPACE_HF_TOKEN may write ({account.role})"
        raise DeployError(f"{problem}, but a token on a Space must be read-only: {fix}")


@dataclass(frozen=True)
class Space:
    """A Space as it is on the Hub."""

    repo_id: str
    url: str
    private: bool
    variables: Mapping[str, str]
    runtime: SpaceRuntime

    @property
    def hardware(self) -> str | None:
        """The hardware that was requested last; if none was requested, the current hardware."""
        return self.runtime.requested_hardware or self.runtime.hardware

    @property
    def billed(self) -> bool:
        return self.runtime.stage.startswith("RUNNING")

    @property
    def is_page(self) -> bool:
        return self.repo_id.endswith(PAGE)

    @property
    def is_replica(self) -> bool:
        return re.search(r"-replica-\d+$", self.repo_id) is not None


def spaces_of(api: HfApi, owner: str, name: str) -> list[Space]:
    """Return the deployment's Spaces: the environment's, the replicas', and then the static one.

    Raises `DeployError` if a Space lacks the variable `MARK`, because `up` did not create such a Space.
    """
    pattern = re.compile(rf"{re.escape(f'{owner}/{name}')}-(env|replica-(\d+)|page)")
    with explained(f"listing the Spaces of {owner}"):
        names = [space.id for space in api.list_spaces(author=owner)]
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    matches.sort(key=lambda match: (match[1] == "page", int(match[2] or 0)))
    spaces = [read_space(api, match[0]) for match in matches]
    if foreign := ", ".join(s.repo_id for s in spaces if not s.variables.items() >= MARK.items()):
        fix = "choose another --name, or delete it on the Hub"
        raise DeployError(f"{foreign} was not made by trainer.deploy, so nothing was changed: {fix}")
    return spaces


def read_space(api: HfApi, repo_id: str) -> Space:
    with explained(f"reading {repo_id}"):
        info = api.space_info(repo_id)
        variables = api.get_space_variables(repo_id)
        runtime = api.get_space_runtime(repo_id)
    return Space(
        repo_id,
        info.host or f"https://{info.subdomain}.hf.space",
        bool(info.private),
        {name: variable.value for name, variable in variables.items()},
        runtime,
    )


def send_key_to(found: Sequence[Space]) -> None:
    """Let this process send its SPACE_KEY and SPACE_HF_TOKEN to the apps among these Spaces only."""
    send_key_to_urls(space.url for space in found if not space.is_page)


def send_key_to_urls(urls: Iterable[str]) -> None:
    """The same for the URLs of Jobs."""
    os.environ["SPACES"] = " ".join(urls)


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


def put_space(api: HfApi, plan: SpacePlan, folder: Path, secrets: Secrets) -> None:
    """Create the Space if it is missing, set everything in its plan, and upload the files that differ.

    `folder` holds all files of the Space; others are deleted. Variables that are not in the plan stay, except
    for the keys that replicas trust.
    """
    repo_id = plan.repo_id
    hardware: Any = plan.hardware or None  # the client's type has only the hardware that its authors knew
    what = f"create or update {repo_id} ({'private' if plan.private else 'public'}, {hardware or 'static'})"
    with explained(what):
        api.create_repo(
            repo_id,
            repo_type="space",
            exist_ok=True,
            private=plan.private,
            space_sdk="docker" if hardware else "static",
            space_hardware=hardware,
            space_sleep_time=plan.sleep_s,
            # Immediately, so that the next `up` recognizes the Space.
            space_variables=[{"key": key, "value": value} for key, value in MARK.items()],
        )
        api.update_repo_settings(repo_id, private=plan.private, repo_type="space")
        for key, value in plan.variables.items():
            api.add_space_variable(repo_id, key, value)
        if PUBLIC_KEY not in plan.variables and PUBLIC_KEY in api.get_space_variables(repo_id):
            api.delete_space_variable(repo_id, PUBLIC_KEY)
        for name in plan.secrets:
            api.add_space_secret(repo_id, name, secrets[name])
        if hardware:
            api.request_space_hardware(repo_id, hardware, sleep_time=plan.sleep_s)
        # Last, because it starts a new Space. The client deletes only files that are not in the folder.
        api.upload_folder(
            repo_id=repo_id,
            repo_type="space",
            folder_path=folder,
            delete_patterns="*",
            commit_message="Delta Weight Sync",
        )
    print(what, flush=True)


def wait_until_healthy(api: HfApi, apps: Sequence[Space], secrets: Sequence[str]) -> None:
    """Wait until these apps are up, and print their states; see `wait`."""
    known = {app.repo_id: app for app in apps}
    wait(
        lambda: {name: _answer(api, app) for name, app in known.items()},
        lambda name, answer: _failure(api, known[name], answer),
        secrets,
    )


def wait(
    look: Callable[[], Mapping[str, spaces.Answer]],
    failure: Callable[[str, spaces.Answer], str],
    secrets: Sequence[str],
) -> None:
    """Wait until all apps are up, and print each new state, with `secrets` masked.

    A replica that waits for the run's first version counts as up.

    Args:
        look: Asks the apps: name -> answer.
        failure: What to say of an app whose error does not go away, given its name and answer.
        secrets: These are masked, in errors too.

    Raises:
        DeployError: An app fails, or is not up within an hour.
    """
    started = time.monotonic()
    said: dict[str, str] = {}
    error_since: dict[str, float] = {}
    while True:
        for app, answer in look().items():
            now = time.monotonic()
            state = masked(str(answer), secrets)
            if said.get(app) != state:
                print(f"[{now - started:5.0f} s] {app}: {state}", flush=True)
            said[app] = state
            error_since[app] = min(error_since.get(app, now), now) if answer.error else math.inf
            if now >= error_since[app] + ERROR_LIMIT_S:
                raise DeployError(masked(failure(app, answer), secrets))
        late = [f"{app} ({state})" for app, state in said.items() if state not in UP]
        if said and not late:
            return
        if time.monotonic() > started + WAIT_LIMIT_S:
            limit = f"not up within {WAIT_LIMIT_S:.0f} s: {', '.join(late) or 'no app'}"
            raise DeployError(f"{limit}: see `logs`, then run `up` again")
        time.sleep(_POLL_S)


def _failure(api: HfApi, app: Space, answer: spaces.Answer) -> str:
    problem = f"{app.repo_id} did not become ready: {answer}"
    if answer.state not in BROKEN:
        return problem
    log = "run" if answer.state == "RUNTIME_ERROR" else "build"
    end = log_lines(api, app.repo_id, build=log == "build")[-_LOG_LINES:]
    fix = f"Fix the error and run `up` again. The end of its {log} log:"
    return "\n  ".join([f"{problem}. {fix}", *end])


def _answer(api: HfApi, space: Space) -> spaces.Answer:
    with explained(f"reading the state of {space.repo_id}"):
        now = api.get_space_runtime(space.repo_id)
    if now.stage in (*BROKEN, "NO_APP_FILE"):
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
        known = HARDWARE.get(space.hardware or "")
        version = "-"
        digest = "-"
        usd = known.usd_per_hour if known else 0.0
        now += usd * space.billed
        total += usd
        cost = f"{usd * space.billed:.2f}" if known or not space.hardware else "?"
        # A request would wake a sleeping Space.
        if space.billed and space.is_replica:
            try:
                report = spaces.request(space.url, "GET", "/status").raise_for_status().content
                status = ReplicaReport.model_validate_json(report).status
                version = "-" if status.version is None else str(status.version)
                digest = status.digest or "-"
            except (spaces.SpacesUnavailableError, httpx.HTTPError, ValueError):
                version = "no answer"
        rows.append((space.repo_id, space.runtime.stage, space.hardware or "-", version, digest, cost))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.append(f"now ${now:.2f} per hour; ${total:.2f} while all of them run (prices of {PRICES_READ_ON})")
    return "\n".join(lines)
