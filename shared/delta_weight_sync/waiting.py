"""Waits until replicas serve a version, by asking each for its status."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from delta_weight_sync.credentials import hub_token
from delta_weight_sync.errors import ConfigError, ProtocolError, printable
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import POLL_S
from delta_weight_sync.replicas import read_status
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.util import time_text

_NO_COMMITS: Final = 1 << 53  # no version is newer, so the answer lists no commits
_AT_ONCE: Final = 16  # replicas that are asked at the same time


class _NotYetError(Exception):
    """A replica does not serve the version. The message says why; it follows the replica's URL."""


def wait_for(
    reader: RunReader, version: int, replicas: Sequence[str], timeout_s: float | None = None
) -> dict[str, int]:
    """Wait until each replica serves `version` or a newer one. See `Run.wait`."""
    urls = [url.rstrip("/") for url in replicas]
    if not urls:
        raise ConfigError("no replica is named: give the URL of at least one")
    if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
        raise ConfigError(f"{wrong[0]!r} is not the URL of a replica: begin it with http:// or https://")
    digests: dict[int, str] = {}  # published, by version

    def ask(url: str) -> int | _NotYetError:
        try:
            return _served(reader, url, version, digests)
        except _NotYetError as why:
            return why

    started = time.monotonic()
    served: dict[str, int] = {}
    while True:
        left = [url for url in urls if url not in served]
        with ThreadPoolExecutor(_AT_ONCE, "replica-status") as pool:
            answers = dict(zip(left, pool.map(ask, left), strict=True))
        served |= {url: answer for url, answer in answers.items() if isinstance(answer, int)}
        if len(served) == len(set(urls)):
            return served
        if timeout_s is not None and time.monotonic() - started + POLL_S > timeout_s:
            late = [f"{url} {why}" for url, why in answers.items() if isinstance(why, _NotYetError)]
            raise TimeoutError(
                f"after {time_text(timeout_s)}, {len(late)} of {len(urls)} replicas do not serve version"
                f" {version}: {'; '.join(late)}"
            )
        time.sleep(POLL_S)


def _served(reader: RunReader, url: str, version: int, digests: dict[int, str]) -> int:
    """The version that a replica serves, if it is `version` or newer and has the published digest."""
    status = _report(url).status
    if status.version is None:
        raise _NotYetError(f"serves no version ({printable(status.error or status.state)})")
    if status.version < version:
        why = f" ({printable(status.error)})" if status.error else ""
        raise _NotYetError(f"serves version {status.version}{why}")
    if status.digest:
        try:
            published = digests.get(status.version) or reader.manifest(status.version).digest
        except ProtocolError as error:
            raise _NotYetError(f"serves version {status.version}, but {error}") from None
        digests[status.version] = published
        if status.digest != published:
            raise _NotYetError(f"serves version {status.version} with another digest: heal it, see its log")
    return status.version


def _report(url: str) -> ReplicaReport:
    try:
        return ReplicaReport.model_validate_json(read_status(url, _NO_COMMITS))
    except ConfigError:  # of the variables with credentials: waiting does not help
        raise
    except ValidationError:
        why = "gives a status of an unknown form: is it a replica of this project?"
    except httpx.HTTPStatusError as error:
        why = f"answers {error.response.status_code}: is it a replica of this project?"
        if urlsplit(url).netloc.endswith((".hf.space", ".hf.jobs")) and not hub_token(url):
            why += " If the Space is private, set SPACE_HF_TOKEN to a token that may read it, and"
            why += " add its URL to SPACES"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        why = f"does not answer ({error})"
    raise _NotYetError(printable(why))
