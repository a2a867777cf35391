"""What is on the Hub now: the Spaces of a deployment, and of each all that can differ from its plan."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import BucketNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from trainer import space_access
from trainer.deploy.errors import explained
from trainer.deploy.plan import MARK

_TIMEOUT_S = 60.0  # the client's own default is to wait for ever
PAUSED = ("PAUSED", "STOPPED")
ASLEEP = ("SLEEPING", *PAUSED)
FAILED = ("NO_APP_FILE", "CONFIG_ERROR", "BUILD_ERROR", "RUNTIME_ERROR")


@dataclass(frozen=True)
class Runtime:
    """How a Space runs at the moment."""

    stage: str
    hardware: str | None  # what was asked for last
    sleep_s: int | None
    error: str

    @property
    def billed(self) -> bool:
        """Whether it costs something now."""
        return self.stage.startswith("RUNNING")


@dataclass(frozen=True)
class Found:
    """A Space as it is."""

    repo_id: str
    url: str
    private: bool
    variables: Mapping[str, str]
    secrets: Mapping[str, str | None]  # name -> description
    files: Mapping[str, str]  # path -> git's hash of a small file, sha256 of a large one
    runtime: Runtime

    @property
    def ours(self) -> bool:
        """Whether this command made it."""
        return self.variables.items() >= MARK.items()


def connect() -> HfApi:
    """A client of the Hub at HF_ENDPOINT that does not wait for ever."""
    set_client_factory(_client)
    disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _client() -> Any:
    client = default_client_factory()
    client.timeout = _TIMEOUT_S
    return client


def spaces_of(api: HfApi, owner: str, name: str, expected: Iterable[str] = ()) -> list[Found]:
    """All Spaces called like those of this deployment, whoever made them; the environment's first.

    The Hub's list may be a little behind, so the `expected` ones are looked for in any case. Those that this
    command made are the ones that it sends the owner's key.
    """
    ours = re.compile(rf"{re.escape(f'{owner}/{name}')}-(env|replica-(\d+))")
    with explained(f"listing the Spaces of {owner}"):
        names = {*expected, *(space.id for space in api.list_spaces(author=owner))}
    matches = [match for name in names if (match := ours.fullmatch(name))]
    found = [look(api, match[0]) for match in sorted(matches, key=lambda match: int(match[2] or 0))]
    spaces = [space for space in found if space]
    space_access.own(space.url for space in spaces if space.ours)
    return spaces


def look(api: HfApi, repo_id: str) -> Found | None:
    """One Space with all that a plan can differ in, or None if it does not exist."""
    with explained(f"reading {repo_id}"):
        try:
            info = api.space_info(repo_id)
        except RepositoryNotFoundError:
            return None
        tree = api.list_repo_tree(repo_id, recursive=True, repo_type="space")
        return Found(
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
    with explained(f"asking how {repo_id} runs"):
        now = api.get_space_runtime(repo_id)
    hardware = now.requested_hardware or now.hardware
    return Runtime(
        _text(now.stage), _text(hardware) or None, now.sleep_time, _text(now.raw.get("errorMessage"))
    )


def _text(value: Any) -> str:
    """The Hub's own word, also where the client has made a member of an enumeration of it."""
    return str(getattr(value, "value", value) or "")


def bucket_privacy(api: HfApi, bucket: str) -> bool | None:
    """Whether the bucket is private; None if it does not exist."""
    with explained(f"looking for the bucket {bucket}"):
        try:
            return bool(api.bucket_info(bucket).private)
        except BucketNotFoundError:
            return None


def log_lines(api: HfApi, repo_id: str, *, build: bool) -> list[str]:
    """What a Space's build, or the app itself, has written so far."""
    with explained(f"reading the log of {repo_id}"):
        chunks = list(api.fetch_space_logs(repo_id, build=build))
    return "\n".join(chunk.rstrip("\n") for chunk in chunks).splitlines()
