"""What the simulated Hub holds, and who may see it: in memory, but for the content of large files."""

from pathlib import Path
from typing import Any

from .accounts import READ, Accounts, Caller
from .bucket_events import Feed
from .buckets import BucketState
from .cas import Cas
from .errors import HubError, repo_missing
from .repos import KINDS, RepoState
from .spaces import Builds, SpaceState

Who = str | None  # an Authorization header


class Hub:
    """Accounts, buckets, repositories and Spaces, and the storage behind them.

    `doors` are the URLs at which Spaces can be visited; each new Space takes one.
    """

    def __init__(self, root: Path, doors: list[str]) -> None:
        self.accounts = Accounts()
        self.cas = Cas(root / "xorbs")
        self.buckets: dict[str, BucketState] = {}
        self.feed = Feed()
        self.repos: dict[tuple[str, str], RepoState] = {}
        self.spaces: dict[str, SpaceState] = {}
        self.doors = doors
        self.builds: dict[str, Builds] = {}  # how the builds of Spaces will go, where a test said so
        self.hosts: dict[str, str] = {}  # what the Hub names as the addresses of apps, where a test said so

    def bucket(self, name: str, who: Who, *, write: bool = False) -> BucketState:
        """Look up a bucket on behalf of a caller; to a stranger a private one looks missing."""
        caller, bucket = self.accounts.caller(who), self.buckets.get(name)
        if bucket is None or (bucket.private and not caller.may(READ, "bucket", name)):
            raise repo_missing(anonymous=caller.anonymous)
        if write:
            caller.must_write("bucket", name)
        return bucket

    def repo(self, kind: str, name: str, who: Who, *, write: bool = False) -> RepoState:
        """The same for a repository; `kind` is models, datasets or spaces."""
        caller, repo = self.accounts.caller(who), self.repos.get((kind, name))
        if repo is None or (repo.private and not caller.may(READ, KINDS[kind], name)):
            raise repo_missing(anonymous=caller.anonymous)
        if write:
            caller.must_write(KINDS[kind], name)
        return repo

    def readable(self, kind: str, name: str, who: Who) -> RepoState:
        """A repository whose files the caller may read: past the gate, where there is one."""
        repo = self.repo(kind, name, who)
        if repo.gated and not self._past_gate(repo, self.accounts.caller(who)):
            raise _gated(repo, anonymous=not who)
        return repo

    def space(self, name: str, who: Who, *, write: bool = False) -> SpaceState:
        self.repo("spaces", name, who, write=write)
        return self.spaces[name]

    def owner(self, name: str, who: Who) -> str:
        """The account that a path names; the client writes "me" for the caller's own."""
        owner = self.accounts.whoami(who)["name"] if name == "me" else name
        if owner not in self.accounts.accounts:
            raise repo_missing()
        return owner

    def visible(self, kind: str, who: Who) -> list[RepoState]:
        """The repositories of a kind that a caller may see."""
        if kind not in KINDS:
            raise HubError(404, "Not Found")
        caller = self.accounts.caller(who)
        repos = [repo for (plural, _), repo in self.repos.items() if plural == kind]
        return [repo for repo in repos if not repo.private or caller.may(READ, KINDS[kind], repo.id)]

    def visible_buckets(self, owner: str, who: Who) -> list[BucketState]:
        """The buckets of an owner that a caller may see."""
        caller = self.accounts.caller(who)
        owned = [bucket for bucket in self.buckets.values() if bucket.id.startswith(f"{owner}/")]
        return [one for one in owned if not one.private or caller.may(READ, "bucket", one.id)]

    def info(self, repo: RepoState, revision: str = "main", *, blobs: bool = False) -> dict[str, Any]:
        """What `repo_info` reads; of a Space with its runtime."""
        shown = repo.to_json(revision, blobs=blobs)
        return shown | self.spaces[repo.id].to_json() if repo.kind == "spaces" else shown

    def move(self, kind: str, source: str, target: str, who: Who) -> None:
        """Rename a bucket or a repository; `kind` is bucket, model, dataset or space."""
        self.accounts.caller(who).must_write(kind, target.split("/")[0])
        if target in self.buckets if kind == "bucket" else (f"{kind}s", target) in self.repos:
            raise HubError(409, f"{target} exists already")
        if kind == "bucket":
            self.bucket(source, who, write=True).id = target
            self.buckets[target] = self.buckets.pop(source)
            return
        plural = f"{kind}s"
        self.repo(plural, source, who, write=True).id = target
        self.repos[plural, target] = self.repos.pop((plural, source))
        if kind == "space":
            self.spaces[target] = self.spaces.pop(source)

    def new_door(self) -> str:
        """The URL of a Space to be: one that no other Space has."""
        taken = {space.door for space in self.spaces.values()}
        if free := [door for door in self.doors if door not in taken]:
            return free[0]
        raise HubError(500, f"the simulator has ports for {len(self.doors)} Spaces, and all are taken")

    def _past_gate(self, repo: RepoState, caller: Caller) -> bool:
        owner = caller.belongs_to(repo.id.split("/")[0])
        return owner or (caller.account is not None and caller.account.name in repo.granted)


def _gated(repo: RepoState, *, anonymous: bool) -> HubError:
    message = f"Access to {KINDS[repo.kind]} {repo.id} is restricted"
    if anonymous:
        return HubError(401, f"{message}. You must have access to it and be authenticated.", "GatedRepo")
    return HubError(403, f"{message} and you are not in the authorized list.", "GatedRepo")
