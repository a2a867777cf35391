"""The Spaces that a trainer uses: waiting until they are up, and the credentials that its requests carry.

A request wakes a sleeping Space, which takes minutes to load its model. If waiting cannot help, for example
because a URL, a key or a token is wrong, the run ends with a sentence that names the fix.

The environment variable `SPACES` lists the trainer's own Spaces, or files that list them. Only these Spaces
receive `SPACE_KEY` and `SPACE_HF_TOKEN`, so that a mistyped URL receives neither. No secret is part of a URL,
an option or a log line, and no request follows a redirect.
"""

import contextlib
import contextvars
import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import httpx

from delta_weight_sync.credentials import expand, hub_token, is_own, variable
from delta_weight_sync.runlog import ReplicaReport

Kind = Literal["replica", "env"]

MAX_ANSWER = 1 << 20  # bytes
_READ_S = 10.0  # for the body of an answer
WAIT_LIMIT_S = 1800.0  # a paid Space takes minutes to wake and to load a model
NO_VERSION_YET = "waiting for the run's first version"  # a replica's state before the trainer's first upload
_NOT_SET_UP = "not set up"  # the state of either app if a variable or a secret is missing
_OPTION: dict[Kind, str] = {"replica": "--replicas", "env": "--env_url"}
_READY: dict[Kind, str] = {"replica": "serving", "env": "healthy"}
_READABLE = "set SPACE_HF_TOKEN to a token that may read it, and add its URL to SPACES"


class SpacesUnavailableError(RuntimeError):
    """A Space is not ready in time, or never will be. The message names the Space and the fix."""


@dataclass(frozen=True)
class Answer:
    """The state of a Space. `up`: True only if the app itself answered, and not the Hub."""

    state: str
    up: bool = False
    error: str | None = None

    def __str__(self) -> str:
        return self.state + (f" ({self.error})" if self.error else "")


class Fleet:
    """The replicas of a run. Replicas may be added and removed while the trainer runs.

    Args:
        entries: URLs, and paths of files with a URL on each line. To change a file, replace it in one step.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = entries
        self._urls = list[str]()

    def urls(self) -> list[str]:
        """Return the replicas' URLs. If a file cannot be read or no URL is left, return the last call's URLs.

        Raises:
            SpacesUnavailableError: A file cannot be read or no URL is left, and no earlier call found a URL.
        """
        reason = "it lists no URL"
        try:
            self._urls = expand(self._entries) or self._urls
        except (OSError, UnicodeDecodeError) as error:
            reason = str(error)
        if self._entries and not self._urls:
            problem = f"--replicas {' '.join(self._entries)} names no replica ({reason})"
            raise SpacesUnavailableError(f"{problem}: write https://... URLs, or a file that lists them")
        return self._urls


def env_address(entry: str) -> str:
    """The environment's URL: `entry`, or the first URL in the file that it names; Jobs change their URLs.

    Raises `SpacesUnavailableError` if there is none.
    """
    try:
        return expand([entry])[0] if entry else ""
    except (OSError, UnicodeDecodeError, IndexError) as error:
        problem = f"--env_url {entry} names no environment ({error})"
        raise SpacesUnavailableError(f"{problem}: write an https://... URL, or a file with it") from error


def is_ended_job(url: str, status: int) -> bool:
    """Whether this status can mean that the Job behind a URL does not listen: not yet, or no longer."""
    return status in (404, 410) and (urlsplit(url).hostname or "").endswith(".hf.jobs")


class Spaces:
    """The Spaces of one run, which may be asleep. `env_url` is empty if the task needs no environment."""

    def __init__(self, fleet: Fleet, env_url: str = "") -> None:
        self._fleet = fleet
        self._env_url = env_url
        self._key_accepted: set[tuple[str, Kind]] = set()

    @property
    def _spaces(self) -> list[tuple[str, Kind]]:
        found: list[tuple[str, Kind]] = [(url, "replica") for url in self._fleet.urls()]
        return [*found, (env_address(self._env_url), "env")] if self._env_url else found

    def wake(self) -> None:
        """Wake each Space with a request. Raises `SpacesUnavailableError` if waiting cannot help."""
        for url, kind in self._spaces:
            self._probe(url, kind)

    def wait(self, poll_s: float = 1.0) -> None:
        """Block until the environment and at least one replica are ready; print each change of their states.
        Raises `SpacesUnavailableError` if they are not ready within `WAIT_LIMIT_S`, or never will be."""
        deadline = time.monotonic() + WAIT_LIMIT_S
        reported = ""
        while time.monotonic() < deadline:
            answers = [(url, kind, self._probe(url, kind)) for url, kind in self._spaces]
            ready = {kind for _, kind, answer in answers if answer.state == _READY[kind]}
            if ready == {kind for _, kind, _ in answers}:
                return
            states = "; ".join(f"{url}: {answer}" for url, _, answer in answers)
            if states != reported:
                print(f"waiting for the Spaces - {states}", flush=True)
                reported = states
            time.sleep(poll_s)
        raise SpacesUnavailableError(f"not ready within {WAIT_LIMIT_S:.0f} s: {reported}")

    def _probe(self, url: str, kind: Kind) -> Answer:
        answer = probe(url, kind)
        if answer.up and (url, kind) not in self._key_accepted:
            _check_key(url, kind)
            self._key_accepted.add((url, kind))
        return answer


def probe(url: str, kind: Kind) -> Answer:
    """Ask a Space for its state; raise `SpacesUnavailableError` for a fault that waiting cannot fix."""
    try:
        response = request(url, "GET", "/ready" if kind == "replica" else "/health", kind)
    except httpx.TransportError as error:
        if f"[Errno {socket.EAI_NONAME}]" in str(error):  # other errors may be temporary
            raise SpacesUnavailableError(f"{url}: there is no such host; check {_OPTION[kind]}") from error
        return Answer(f"not reachable ({type(error).__name__})")
    answer = _app_answer(response, kind) or _hub_answer(response, url, kind)
    if answer.state == _NOT_SET_UP:
        raise SpacesUnavailableError(f"{url} is not set up: its page says which variable or secret it lacks")
    return answer


def request(url: str, method: str, path: str, kind: Kind = "replica", **content: Any) -> httpx.Response:
    """Send a request with this Space's credentials. Raises `httpx.TransportError` if there is no answer,
    `SpacesUnavailableError` for an unusable URL or key."""
    try:
        content["headers"] = headers(url, kind)
        if is_near(url):  # the environment's certificates count, but not its proxy
            content |= {"trust_env": False, "verify": httpx.create_ssl_context()}
        with httpx.stream(method, f"{url.rstrip('/')}{path}", timeout=10.0, **content) as answer:
            body = read(answer)
            known = answer.headers.copy()
            known.pop("content-encoding", "")  # `read` has decoded the content
            return httpx.Response(answer.status_code, headers=known, content=body, request=answer.request)
    except ValueError as error:  # from `headers`
        raise SpacesUnavailableError(str(error)) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        example = "https://<owner>-<name>.hf.space"
        raise SpacesUnavailableError(f"{url!r} is not the URL of a Space: write {example}") from error


def is_near(url: str) -> bool:
    """Whether a URL names this machine or a private network, which the environment's proxy cannot reach."""
    host = ""
    try:
        host = urlsplit(url).hostname or ""
        address = ipaddress.ip_address(host)
    except ValueError:  # the host is a name, or this is no URL
        return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))
    return address.is_private or address.is_loopback or address.is_link_local


class Clients:
    """Two HTTP clients: one without a proxy, for this machine and private networks, and one for the rest."""

    def __init__(self, timeout_s: float) -> None:
        self._far = httpx.Client(timeout=timeout_s)
        certificates = httpx.create_ssl_context()  # those that the environment names, if any
        self._near = httpx.Client(timeout=timeout_s, trust_env=False, verify=certificates)

    def stream(
        self, method: str, url: str, **content: Any
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        """Like `httpx.Client.stream`."""
        client = self._near if is_near(url) else self._far
        return client.stream(method, url, **content)

    def close(self) -> None:
        """Close the connections."""
        self._far.close()
        self._near.close()


def read(answer: httpx.Response) -> bytes:
    """Read the body of a streamed answer; empty if it has over `MAX_ANSWER` bytes or takes over `_READ_S`."""
    deadline = time.monotonic() + _READ_S  # httpx limits only the time between two parts
    body = b""
    for part in answer.iter_bytes():  # in parts of a given size, httpx would wait until one is full
        body += part
        if len(body) > MAX_ANSWER or time.monotonic() > deadline:
            return b""
    return body


def _check_key(url: str, kind: Kind) -> None:
    """Send a request that needs the key and changes nothing. Raises `SpacesUnavailableError` if refused."""
    method, path = ("POST", "/v1/completions") if kind == "replica" else ("DELETE", f"/sessions/{uuid4()}")
    try:
        status = request(url, method, path, kind, json={}).status_code
    except httpx.TransportError:
        return  # the next request reports the failure
    if status not in (401, 403):
        return
    if is_own(url):
        made = "if trainer.deploy made the Space, run `set -a; . .deploy/<owner>/env; set +a`"
        text = f"{url} refuses this trainer's key ({status}): set SPACE_KEY to the Space's key; {made}"
    else:
        text = f"{url} needs a key ({status}) and is not in SPACES: add the URL there if the Space is yours"
        text += ", or set ENV_KEY to the key that you were given for it" if kind == "env" else ""
    raise SpacesUnavailableError(text)


def _app_answer(response: httpx.Response, kind: Kind) -> Answer | None:
    """The state that the app reports, or None if something else answered."""
    try:
        body = response.json()
        state = str(body["state" if kind == "replica" else "status"])
        error = str(body["error"]) if body.get("error") else None
    except (ValueError, KeyError, TypeError, RecursionError):  # the last if the answer is nested too deeply
        return None
    if kind == "env" and state not in (_READY["env"], _NOT_SET_UP):
        return None  # a /health of another app
    return Answer(state, up=True, error=error)


def _hub_answer(response: httpx.Response, url: str, kind: Kind) -> Answer:
    """The state of a Space that is starting. Raises `SpacesUnavailableError` if waiting cannot help."""
    status = response.status_code
    if status in (401, 403):
        raise SpacesUnavailableError(f"this trainer may not read {url} ({status}): {_READABLE}")
    # While a Space starts, the Hub answers with an HTML page and a status below 300, or with 408, 425, 429 or
    # at least 500. For a private Space that the token may not see, the Hub answers that it does not exist.
    if is_ended_job(url, status):
        return Answer(f"not up ({status})")
    json = "json" in response.headers.get("content-type", "")
    if (json or status >= 300) and status < 500 and status not in (408, 425, 429):
        if kind == "replica" and _is_vllm(url):
            problem = f"{url} is a vLLM with the plugin, or `delta-weight-sync serve`"
            fix = "start `python -m inference_space.app` in its place, or train with BucketWeightTransfer"
            raise SpacesUnavailableError(f"{problem}, which trainer.train cannot use: {fix}")
        fix = f"give the Space's own URL with {_OPTION[kind]}, such as https://<owner>-<name>.hf.space"
        problem = f"{url} answers {status}, so it is not the {kind}"
        raise SpacesUnavailableError(f"{problem}: {fix}; if it is private, {_READABLE}")
    return Answer(f"not up yet ({status})")


def _is_vllm(url: str) -> bool:
    """Whether a follower answers here that is no replica of `inference_space`."""
    try:
        answer = request(url, "GET", "/delta_weight_sync/status")
        ReplicaReport.model_validate_json(answer.content)
    except (httpx.TransportError, ValueError):
        return False
    return True


def headers(url: str, kind: Kind = "replica") -> dict[str, str]:
    """The credentials for a request to a replica or an environment.

    All Spaces in `SPACES` receive `SPACE_KEY`. Those on the Hub also receive `SPACE_HF_TOKEN`, which opens
    private Spaces. If a Space is not in `SPACES`, an environment receives `ENV_KEY`, and a replica receives
    nothing. No Space receives `HF_TOKEN`, which can write. Raises `ValueError` for a bad value.
    """
    key = ""
    if is_own(url):
        key = variable("SPACE_KEY")
    elif kind == "env":
        key = variable("ENV_KEY")
    token = hub_token(url)
    found = {"X-Space-Key": key, "Authorization": token and f"Bearer {token}"}
    return {name: value for name, value in found.items() if value}


# The HTTP session of a rollout's asyncio task, and of the tasks that the rollout starts, such as tool calls.
connections: contextvars.ContextVar[aiohttp.ClientSession] = contextvars.ContextVar("connections")
