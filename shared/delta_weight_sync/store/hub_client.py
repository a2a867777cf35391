"""huggingface_hub's HTTP client, as buckets need it: bounded in time, and with an eye on the quota."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from functools import cache
from typing import Any

from huggingface_hub import set_client_factory
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from delta_weight_sync.store.hub_events import asked_s
from delta_weight_sync.store.quota import Quota

REQUEST_TIMEOUT = 10.0  # seconds; the client's own default is to wait for ever
LONGEST_PAUSE = 10  # seconds that a server may ask the client to wait; the client would wait for hours

# hf_xet has no other parameters. At its defaults it tries for up to five minutes. Its read timeout must
# stay at two minutes per attempt: it also runs while a block of 64 MB is being sent.
XET_SETTINGS = {"HF_XET_CLIENT_RETRY_BASE_DELAY": "2s", "HF_XET_CLIENT_RETRY_MAX_DURATION": "16s"}

_BUCKET = re.compile(r"/buckets/([^/]+/[^/]+)(?:/|$)(?!events$)")
QUOTAS: defaultdict[str, Quota] = defaultdict(Quota)  # bucket -> what its answers say of the token's quota


@cache
def configure_clients() -> None:
    """Once per process, as huggingface_hub and hf_xet have no settings for a single bucket."""
    for name, value in XET_SETTINGS.items():
        os.environ.setdefault(name, value)
    disable_progress_bars()  # a bar for every sync would flood the log
    set_client_factory(_client)


def _client() -> Any:
    client = default_client_factory()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _limit_time],
        "response": [*hooks["response"], _note_quota, _limit_pause],
    }
    return client


def _bucket_of(request: Any) -> str:
    """The bucket that a request is for; "" for other requests, and for a bucket's feed, which has no end."""
    place = _BUCKET.search(request.url.path)
    return place[1] if place else ""


def _limit_time(request: Any) -> None:
    """Bound each request for a bucket; other users of this client keep their own limits."""
    if _bucket_of(request):
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), REQUEST_TIMEOUT)


def _note_quota(response: Any) -> None:
    """Take down what an answer says of the requests that are left, for those who look again and again."""
    if bucket := _bucket_of(response.request):
        quota, said = QUOTAS[bucket], parse_ratelimit_headers(response.headers)
        if response.status_code == 429:
            quota.refused(asked_s(response.headers))
        elif said and said.resource_type == "resolvers":
            quota.left(said.remaining, said.reset_in_seconds)


def _limit_pause(response: Any) -> None:
    """Shorten the pause that a busy server asks for, as the client would sleep all of it."""
    asked = response.headers.get("retry-after", "")
    if _bucket_of(response.request) and response.status_code in (429, 503):
        response.headers.pop("ratelimit", None)  # the same wish in other words
        response.headers["retry-after"] = str(min(int(asked), LONGEST_PAUSE)) if asked.isdigit() else ""
