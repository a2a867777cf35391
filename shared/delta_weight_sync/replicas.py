"""Asks a replica for its status."""

import time
from typing import Final

import httpx

from delta_weight_sync.credentials import hub_token

# Of a vLLM with the plugin, and of a replica Space.
_PATHS: Final = ("/delta_weight_sync/status", "/status")
_REQUEST_S: Final = 10.0
_MAX_BYTES: Final = 4 << 20  # a report names at most 1,024 commits


def read_status(url: str, after: int, *, proxies: bool = True) -> bytes:
    """Return a replica's report as JSON; see `delta_weight_sync.runlog.ReplicaReport`.

    A private Space on the Hub gets `SPACE_HF_TOKEN` if `SPACES` lists it. Redirects are not followed.

    Args:
        url: The replica, such as `http://127.0.0.1:8000`: a vLLM with the plugin, or a Space.
        after: The report lists the commits of versions after this one.
        proxies: Whether to use the environment's proxies.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: There is no answer, or not one of status 200.
        ValueError: The answer is too large, or takes too long.
        ConfigError: `SPACES` or `SPACE_HF_TOKEN` has a bad value.
    """
    token = hub_token(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    deadline = time.monotonic() + _REQUEST_S
    with httpx.Client(timeout=_REQUEST_S, trust_env=proxies, headers=headers) as client:
        for path in _PATHS:
            with client.stream("GET", url.rstrip("/") + path, params={"after": after}) as answer:
                if answer.status_code == httpx.codes.NOT_FOUND and path != _PATHS[-1]:
                    continue
                body = b""
                # In parts of a given size, httpx would wait until one is full, however long that takes.
                for part in answer.raise_for_status().iter_bytes():
                    body += part
                    if len(body) > _MAX_BYTES or time.monotonic() > deadline:
                        raise ValueError(f"the status of {url} is too large, or takes too long")
                return body
    raise AssertionError("the last path returns or raises")
