"""Everything that the simulated Hub holds, in memory but for large files, and the access to it."""

from pathlib import Path
from typing import Any

from .accounts import READ, Account, Accounts
from .buckets import BucketState, Feed
from .common import HubError, repo_missing
from .repos import KINDS, RepoState, blob
from .spaces import CPU_BASIC, FLAVORS, README, Builds, SpaceState
from .xet import Cas

Who = str | None  # an Authorization header


class Hub:
    """Accounts, buckets, repositories and Spaces, and the storage behind them.

    `addresses` are the URLs of the Spaces' apps; each new Space takes one.
    """

    def __init__(self, root: Path, addresses: list[str]) -> None:
        self.accounts = Accounts()
        self.cas = Cas(root / "xorbs")
        self.buckets: dict[str, BucketState] = {}
        self.feed = Feed()
        self.repos: dict[tuple[str, str], RepoState] = {}
        self.spaces: dict[str, SpaceState] = {}
        self.addresses = addresses
        self.builds: dict[str, Builds] = {}  # how the builds of Spaces will go, where a test said so
        self.hosts: dict[str, str] = {}  # what the Hub names as the addresses of apps, where a test said so

    def bucket(self, name: str, who: Who, *, write: bool = False) -> BucketState:
        """Look up a bucket on behalf of a caller; to a stranger a private one looks missing."""
        caller = self.accounts.caller(who)
        bucket = self.buckets.get(name)
        if bucket is None or (bucket.private and not caller.may(READ, "bucket", name)):
            raise repo_missing(anonymous=caller.anonymous)
        if write:
            caller.must_write("bucket", name)
        return bucket

    def repo(self, kind: str, name: str, who: Who, *, write: bool = False) -> RepoState:
        """The same for a repository; `kind` is models, datasets or spaces."""
        caller = self.accounts.caller(who)
        repo = self.repos.get((kind, name))
        if repo is None or (repo.private and not caller.may(READ, KINDS[kind], name)):
            raise repo_missing(anonymous=caller.anonymous)
        if write:
            caller.must_write(KINDS[kind], name)
        return repo

    def readable(self, kind: str, name: str, who: Who) -> RepoState:
        """A repository whose files the caller may read: not gated, or open to the caller."""
        repo = self.repo(kind, name, who)
        caller = self.accounts.caller(who)
        granted = caller.account is not None and caller.account.name in repo.granted
        if not repo.gated or granted or caller.belongs_to(name.split("/")[0]):
            return repo
        message = f"Access to {KINDS[kind]} {name} is restricted"
        if caller.anonymous:
            raise HubError(401, f"{message}. You must have access to it and be authenticated.", "GatedRepo")
        raise HubError(403, f"{message} and you are not in the authorized list.", "GatedRepo")

    def space(self, name: str, who: Who, *, write: bool = False) -> SpaceState:
        self.repo("spaces", name, who, write=write)
        return self.spaces[name]

    def owner(self, name: str, who: Who) -> str:
        owner = self.accounts.whoami(who)["name"] if name == "me" else name
        if owner not in self.accounts.accounts:
            raise repo_missing()
        return owner

    def visible(self, kind: str, who: Who) -> list[RepoState]:
        if kind not in KINDS:
            raise HubError(404, "Not Found")
        caller = self.accounts.caller(who)
        repos = [repo for (plural, _), repo in self.repos.items() if plural == kind]
        return [repo for repo in repos if not repo.private or caller.may(READ, KINDS[kind], repo.id)]

    def visible_buckets(self, owner: str, who: Who) -> list[BucketState]:
        caller = self.accounts.caller(who)
        owned = [bucket for bucket in self.buckets.values() if bucket.id.startswith(f"{owner}/")]
        return [one for one in owned if not one.private or caller.may(READ, "bucket", one.id)]

    def info(self, repo: RepoState, revision: str = "main") -> dict[str, Any]:
        shown = repo.to_json(revision)
        return shown | self.spaces[repo.id].to_json() if repo.kind == "spaces" else shown

    def new_address(self) -> str:
        """A URL that no Space has yet."""
        taken = {space.address for space in self.spaces.values()}
        if free := [address for address in self.addresses if address not in taken]:
            return free[0]
        raise HubError(500, f"the simulator has ports for {len(self.addresses)} Spaces, and all are taken")


PLURAL = {kind: plural for plural, kind in KINDS.items()}
NO_PLAN = (
    "Static Spaces are free for everyone, but hosting Gradio and Docker Spaces on free cpu-basic"
    " requires a PRO subscription."
)
NO_CARD = (
    "You must add a payment method to your account to upgrade your space's hardware. Visit your billing"
    " settings to add one: https://huggingface.co/settings/billing"
)


def full_name(hub: Hub, wish: dict[str, Any], who: Who) -> str:
    """Owner and name of the repository that a request names; without an owner it is the caller's own."""
    owner = wish.get("organization") or hub.accounts.whoami(who)["name"]
    return f"{owner}/{wish['name']}"


def visibility(wish: dict[str, Any], default: str) -> str:
    """As huggingface_hub 2 sends it, or as 1 does."""
    if wish.get("private") is not None:
        return "private" if wish["private"] else "public"
    return wish.get("visibility") or default


def create(hub: Hub, kind: str, name: str, wish: dict[str, Any], who: Who) -> RepoState:
    """Make what a request asks for; refuse callers without the right or the plan, and taken names."""
    hub.accounts.caller(who).must_write(KINDS[kind], name.split("/")[0])
    owner = hub.accounts.accounts[name.split("/")[0]]
    if kind == "spaces":
        check_plan(owner, wish.get("sdk", "docker"), wish)
    if (kind, name) in hub.repos:
        raise HubError(409, f"You already created this {KINDS[kind]} repo", url=url_path(kind, name))
    repo = RepoState(kind, name, visibility(wish, owner.visibility))
    if kind == "spaces":
        hub.spaces[name] = _new_space(hub, repo, wish)
    hub.repos[kind, name] = repo
    return repo


def check_plan(owner: Account, sdk: str, wish: dict[str, Any]) -> None:
    """Free accounts may not host an app on free machines; paid machines need a payment method."""
    flavor = wish.get("hardware") or CPU_BASIC
    if flavor not in FLAVORS:
        raise HubError(400, f'"hardware" {flavor} is not a known flavor')
    if flavor != CPU_BASIC and not owner.can_pay:
        raise HubError(403, NO_CARD)
    if flavor == CPU_BASIC and sdk != "static" and not owner.is_pro:
        raise HubError(402, NO_PLAN)


def url_path(kind: str, name: str) -> str:
    return name if kind == "models" else f"{kind}/{name}"


def _new_space(hub: Hub, repo: RepoState, wish: dict[str, Any]) -> SpaceState:
    readme = README.format(repo.id.split("/")[1], wish["sdk"])
    repo.commits[0].files["README.md"] = blob(readme.encode())
    space = SpaceState(repo, wish["sdk"], hub.new_address(), builds=hub.builds.get(repo.id, Builds()))
    space.host = hub.hosts.get(repo.id, space.address)
    space.requested = wish.get("hardware") or (None if wish["sdk"] == "static" else CPU_BASIC)
    space.sleep_time = wish.get("sleepTimeSeconds")
    for kind in ("variables", "secrets"):
        for setting in wish.get(kind) or []:
            space.set(kind, setting["key"], setting["value"], setting.get("description"))
    return space
