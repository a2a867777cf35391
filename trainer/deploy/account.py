"""Who a token belongs to and what it may do, read from the Hub's `whoami`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import HfApi

from trainer.deploy.errors import TOKENS, DeployError, explained

Who = Mapping[str, Any]

READ_ONLY = f"make one at {TOKENS} with the type Read"


def who(api: HfApi, token: str | None = None, variable: str = "HF_TOKEN") -> Who:
    """What the Hub says about the token in this variable; None is the client's own. Raises `DeployError`."""
    with explained(f"asking whom {variable} belongs to", variable):
        found: Who = api.whoami(token=token)
        return found


def role(who: Who) -> str:
    """'read', 'write' or 'fineGrained'; empty for tokens of another kind."""
    return str(_token(who).get("role", ""))


def may_write(who: Who, owner: str) -> bool:
    """Whether the token may create repositories of this owner."""
    if role(who) == "fineGrained":
        return "repo.write" in _permissions(who, owner)
    return role(who) != "read" and owner in {who["name"], *_orgs(who)}


def must_write(who: Who, owner: str) -> None:
    """Raise `DeployError` unless the token may create repositories of this owner."""
    if not may_write(who, owner):
        raise DeployError(
            f"the token of {who['name']} ({role(who) or 'unknown role'}) may not create anything for {owner};"
            f" set HF_TOKEN to one of the type Write, or a fine-grained one with write access to all"
            f" repositories of {owner}, made at {TOKENS}"
        )


def read_only(who: Who) -> bool:
    """Whether the token can change nothing at all."""
    if role(who) == "fineGrained":
        return not any(permission.endswith(".write") for permission in _permissions(who))
    return role(who) == "read"


def has_plan(who: Who, owner: str) -> bool:
    """Whether the owner has what Docker Spaces on free hardware need: PRO, Team or Enterprise."""
    org = _orgs(who).get(owner)
    if org is None:
        return bool(who.get("isPro"))
    return bool(org.get("plan") or org.get("isEnterprise"))


def can_pay(who: Who, owner: str) -> bool | None:
    """Whether the owner can pay for GPUs; None if the token may not know."""
    paying: bool | None = _orgs(who).get(owner, who).get("canPay")
    return paying


def checked_space_token(api: HfApi, token: str) -> str:
    """The token that Spaces get, which must not be able to write. Raises `DeployError`."""
    if not token:
        raise DeployError(
            "SPACE_HF_TOKEN is not set: with this read-only token replicas read the bucket, and trainers get"
            f" into private Spaces; {READ_ONLY}"
        )
    found = who(api, token, "SPACE_HF_TOKEN")
    if not read_only(found):
        raise DeployError(
            f"SPACE_HF_TOKEN may write ({role(found) or 'unknown role'}), which no token on a Space should;"
            f" {READ_ONLY}"
        )
    return token


def _token(who: Who) -> Mapping[str, Any]:
    token: Mapping[str, Any] = who.get("auth", {}).get("accessToken") or {}
    return token


def _orgs(who: Who) -> dict[str, Mapping[str, Any]]:
    return {org["name"]: org for org in who.get("orgs", ())}


def _permissions(who: Who, owner: str | None = None) -> set[str]:
    """Of a fine-grained token: what it may do with what belongs to `owner`, or all that it may do."""
    grants = _token(who).get("fineGrained") or {}
    scoped = [s for s in grants.get("scoped", ()) if owner in (None, s["entity"].get("name"))]
    found = {permission for scope in scoped for permission in scope["permissions"]}
    return found | (set(grants.get("global", ())) if owner is None else set())
