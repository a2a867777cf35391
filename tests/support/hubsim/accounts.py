"""Users, organizations, access tokens with their roles, and what each of them may do."""

from dataclasses import dataclass, field
from hashlib import sha1
from typing import Any

from .common import HubError, now

READ = "repo.content.read"
WRITE = "repo.write"
START_JOBS = "job.write"


@dataclass(frozen=True)
class Account:
    """A user or an organization; users are members of `orgs` with the right to write there."""

    name: str
    is_pro: bool = True  # of an organization: whether it has a Team or Enterprise plan
    can_pay: bool = True
    orgs: tuple[str, ...] = ()
    type: str = "user"
    visibility: str = "public"  # of its repositories and buckets, unless asked for another

    def to_json(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "id": sha1(self.name.encode()).hexdigest()[:24],
            "name": self.name,
            "fullname": self.name.title(),
            "canPay": self.can_pay,
        }


@dataclass(frozen=True)
class Token:
    """An access token. `scopes` counts for the role fineGrained only: "org:team" -> permissions there."""

    user: str
    role: str = "write"  # read, write or fineGrained
    scopes: dict[str, list[str]] = field(default_factory=dict)
    expired: bool = False
    created_at: str = field(default_factory=now)

    def allows(self, permission: str, kind: str, name: str) -> bool:
        """`name` is "owner/name", or "owner" for what is yet to be created there."""
        if self.role != "fineGrained":
            return self.role == "write" or permission == READ
        owner = name.split("/")[0]
        places = {f"{kind}:{name}", f"user:{owner}", f"org:{owner}"}
        return any(permission in permissions for place, permissions in self.scopes.items() if place in places)

    def to_json(self, name: str) -> dict[str, Any]:
        described = {"displayName": name, "role": self.role, "createdAt": self.created_at}
        if self.role == "fineGrained":
            scoped = [
                {"entity": dict(zip(("type", "name"), place.split(":"), strict=True)), "permissions": may}
                for place, may in self.scopes.items()
            ]
            described["fineGrained"] = {"canReadGatedRepos": True, "global": [], "scoped": scoped}
        return {"type": "access_token", "accessToken": described}


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request; without a token, anybody."""

    account: Account | None = None
    token: Token | None = None

    @property
    def anonymous(self) -> bool:
        return self.account is None

    def belongs_to(self, owner: str) -> bool:
        return self.account is not None and owner in (self.account.name, *self.account.orgs)

    def may(self, permission: str, kind: str, name: str) -> bool:
        """Whether this is a member of the owner, with a token that has this permission on `name`."""
        member = self.belongs_to(name.split("/")[0])
        return member and self.token is not None and self.token.allows(permission, kind, name)

    def must_write(self, kind: str, name: str) -> None:
        """Refuse a caller that may not change `name`."""
        if self.anonymous:
            raise HubError(401, "Invalid username or password.")
        if self.may(WRITE, kind, name):
            return
        if "/" in name:
            raise HubError(403, f"Forbidden: this token has no write access to the {kind} {name}")
        raise HubError(403, f'You don\'t have the rights to create a {kind} under the namespace "{name}"')


class Accounts:
    """All accounts and tokens. `user` is PRO and a member of `team`; `free` is neither, and cannot pay."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.add(Account("team", type="org"), Account("user", orgs=("team",)))
        self.add(Account("free", is_pro=False, can_pay=False))
        self.tokens = {
            "hf_write": Token("user"),
            "hf_read": Token("user", "read"),
            "hf_team": Token("user", "fineGrained", {"org:team": [READ, WRITE]}),
            "hf_bucket_read": Token("user", "fineGrained", {"bucket:team/wordle": [READ]}),
            "hf_expired": Token("user", expired=True),
            "hf_free": Token("free"),
        }

    def add(self, *accounts: Account) -> None:
        self.accounts |= {account.name: account for account in accounts}

    def caller(self, authorization: str | None) -> Caller:
        if not authorization:
            return Caller()
        token = self.tokens.get(authorization.removeprefix("Bearer "))
        if token is None or token.expired:
            raise HubError(401, "Invalid credentials in Authorization header")
        return Caller(self.accounts[token.user], token)

    def whoami(self, authorization: str | None) -> dict[str, Any]:
        """The answer of /api/whoami-v2, in the parts that clients read."""
        caller = self.caller(authorization)
        if caller.account is None or caller.token is None:
            raise HubError(401, "Invalid username or password.")
        user = caller.account
        orgs = [self._membership(self.accounts[org]) for org in user.orgs]
        mine = {"email": f"{user.name}@example.com", "emailVerified": True, "isPro": user.is_pro}
        name = str(authorization).removeprefix("Bearer ").removeprefix("hf_")
        return {**user.to_json(), **mine, "orgs": orgs, "auth": caller.token.to_json(name)}

    def _membership(self, org: Account) -> dict[str, Any]:
        plan = {"plan": "team"} if org.is_pro else {}
        return {**org.to_json(), "roleInOrg": "admin", "isEnterprise": False, **plan}
