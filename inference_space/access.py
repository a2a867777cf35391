"""Why a bucket cannot be read: no token, a wrong one, one that does not reach it, or no such bucket."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from huggingface_hub import HfApi, get_token

from delta_weight_sync.store import AccessDenied, BucketMissing
from delta_weight_sync.store.hub import FAILURES

TOKENS = "https://huggingface.co/settings/tokens"
_READING = {"repo.content.read", "repo.write"}


def refusal(error: Exception, url: str) -> dict[str, str]:
    """Variable or secret -> what is wrong with it, if `error` is a refusal of the bucket at `url`."""
    if not isinstance(error, AccessDenied | BucketMissing):
        return {}
    if not url.startswith("hf://"):
        return {"REPLICA_BUCKET": f"{error}"}
    if not (token := get_token()):
        return {"HF_TOKEN": f"not set, and {url} is private or does not exist; make a token at {TOKENS}"}
    if _status(error) == 401:
        return {"HF_TOKEN": f"the Hub does not know this token: it is wrong or expired; make one at {TOKENS}"}
    if isinstance(error, AccessDenied) or not _reaches(token, url.removeprefix("hf://buckets/")):
        return {"HF_TOKEN": f"this token may not read {url}; give it read access to the bucket at {TOKENS}"}
    return {"REPLICA_BUCKET": f"{url} does not exist; check its name, or start the trainer, which makes it"}


def _status(error: Exception) -> int:
    return int(getattr(getattr(error.__cause__, "response", None), "status_code", 0))


def _reaches(token: str, bucket: str) -> bool:
    """Whether the token would see this bucket if it were there; what it may not see looks missing."""
    name = "/".join(bucket.split("/")[:2])
    owner = name.split("/")[0]
    try:
        me = _whoami(token)
    except FAILURES:
        return True
    if owner not in {me["name"], *(org["name"] for org in me.get("orgs", ()))}:
        return False
    kind = me.get("auth", {}).get("accessToken", {})
    if kind.get("role") != "fineGrained":
        return True
    scoped = kind.get("fineGrained", {}).get("scoped", ())
    return any(s["entity"].get("name") in (name, owner) and _READING & {*s["permissions"]} for s in scoped)


@lru_cache(maxsize=1)
def _whoami(token: str) -> dict[str, Any]:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT")).whoami(token=token)
