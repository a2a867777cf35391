"""Git-based repositories: commits, each with all its files, and the rules for paths."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from .common import HubError, entry_missing, now

# Part of what the Hub puts into every new repository.
LARGE = (
    "7z arrow bin bz2 ckpt gz h5 joblib npy npz onnx parquet pickle pkl pt pth safetensors tar tgz xz zip zst"
)
ATTRIBUTES = "".join(f"*.{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in LARGE.split())


def is_large(path: str, attributes: str) -> bool:
    """Does .gitattributes send the path to the storage for large files?"""
    lines = [line.split() for line in attributes.splitlines() if not line.startswith("#")]
    return any(_matches(path, words[0]) for words in lines if "filter=lfs" in words)


def is_ignored(path: str, gitignore: str) -> bool:
    """Does .gitignore exclude the path, or a folder above it? Exceptions with "!" are not understood."""
    patterns = [
        line.strip().strip("/") for line in gitignore.splitlines() if line.strip()[:1] not in ("", "#")
    ]
    parts = path.split("/")
    above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return any(_matches(part, pattern) for part in above for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path if "/" in pattern else path.split("/")[-1], pattern)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}


@dataclass(frozen=True)
class Blob:
    """The content of one file: here, or with a `sha256` in the Xet storage."""

    size: int
    content: bytes = b""
    sha256: str = ""

    @property
    def pointer(self) -> bytes:
        """What git holds instead of a large file."""
        return POINTER.format(self.sha256, self.size).encode()

    @property
    def oid(self) -> str:
        """Git's name for it; of a large file, for its pointer."""
        content = self.pointer if self.sha256 else self.content
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The description of a file that `repo_info` reads."""
        lfs = {"sha256": self.sha256, "size": self.size, "pointerSize": len(self.pointer)}
        return {"size": self.size, "blobId": self.oid} | ({"lfs": lfs} if self.sha256 else {})


def blob(content: bytes) -> Blob:
    return Blob(len(content), content)


@dataclass(frozen=True)
class Commit:
    """One version of a repository: path -> content."""

    oid: str
    title: str
    files: dict[str, Blob]
    date: str = field(default_factory=now)

    def below(self, path: str) -> dict[str, Blob]:
        return {name: file for name, file in self.files.items() if f"{name}/".startswith(f"{path}/")}

    def to_json(self) -> dict[str, Any]:
        return {"id": self.oid, "title": self.title, "date": self.date}


@dataclass
class RepoState:
    """A model, a dataset or the files of a Space. `kind` is the plural that API paths use."""

    kind: str
    id: str
    visibility: str = "public"
    gated: str | bool = False
    granted: set[str] = field(default_factory=set)  # users that may read in spite of `gated`
    created_at: str = field(default_factory=now)
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": []})

    def __post_init__(self) -> None:
        self.commit("initial commit", {".gitattributes": blob(ATTRIBUTES.encode())})

    @property
    def commits(self) -> list[Commit]:
        return self.branches["main"]

    @property
    def private(self) -> bool:
        return self.visibility == "private"

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[-1].files

    def commit(self, title: str, files: dict[str, Blob], branch: str = "main") -> Commit:
        commits = self.branches[branch]
        seed = f"{self.kind} {self.id} {branch} {len(commits)} {title} {now()}"
        commits.append(Commit(hashlib.sha1(seed.encode()).hexdigest(), title, files))
        return commits[-1]

    def at(self, revision: str) -> Commit:
        known = {commit.oid: commit for commits in self.branches.values() for commit in commits}
        known |= {branch: commits[-1] for branch, commits in self.branches.items()}
        if revision not in known:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return known[revision]

    def file(self, revision: str, path: str) -> Blob:
        if path not in self.at(revision).files:
            raise entry_missing()
        return self.at(revision).files[path]

    def last_change(self, path: str, revision: str) -> Commit:
        """The commit that gave a file its content, or a folder that of some file in it."""
        tip = self.at(revision)
        commits = next(commits for commits in self.branches.values() if tip in commits)
        for before, after in reversed([*pairwise(commits[: commits.index(tip) + 1])]):
            if before.below(path) != after.below(path):
                return after
        return commits[0]

    def text(self, path: str) -> str:
        file = self.files.get(path)
        return file.content.decode(errors="replace") if file else ""

    def to_json(self, revision: str, *, blobs: bool = False) -> dict[str, Any]:
        """What `model_info` and its siblings read; with `blobs` there is more about each file."""
        commit = self.at(revision)
        siblings = [
            {"rfilename": path, **(file.to_json() if blobs else {})}
            for path, file in sorted(commit.files.items())
        ]
        return {
            "id": self.id,
            "author": self.id.split("/")[0],
            "private": self.private,
            "createdAt": self.created_at,
            "lastModified": commit.date,
            "sha": commit.oid,
            "gated": self.gated,
            "disabled": False,
            "likes": 0,
            "downloads": 0,
            "tags": [],
            "siblings": siblings,
        }


def check_path(path: str) -> str:
    """Refuse a path that could leave the repository on a client's disk."""
    if "\\" in path or {"", ".", ".."} & set(path.rstrip("/").split("/")):
        raise HubError(422, f'"{path}" is not a valid path')
    return path


def apply(files: dict[str, Blob], operations: list[dict[str, Any]]) -> dict[str, Blob]:
    """The files after the operations of a commit; raises where one of them cannot be done."""
    after = dict(files)
    for operation in operations:
        path = check_path(operation["value"]["path"])
        if operation["key"] in ("deletedFile", "deletedFolder"):
            _delete(after, path)
        elif operation["key"] in ("file", "lfsFile"):
            after[path] = operation["blob"]
        else:
            raise HubError(400, f"unknown operation {operation['key']}")
    return after


def _delete(files: dict[str, Blob], path: str) -> None:
    """Delete a file, or all that is below a folder; the Hub does not insist on the right word for either."""
    gone = [name for name in files if f"{name}/".startswith(f"{path.rstrip('/')}/")]
    if not gone:
        raise entry_missing("A file with this name doesn't exist")
    for name in gone:
        del files[name]


def folders(paths: Iterable[str]) -> set[str]:
    """Every folder that some path lies in, at any depth."""
    found = set()
    for path in paths:
        parts = path.split("/")[:-1]
        found |= {"/".join(parts[: depth + 1]) for depth in range(len(parts))}
    return found


def listing(paths: Iterable[str], folder: str, *, recursive: bool) -> list[str]:
    """The files and folders in `folder` ("" is the root), sorted; with `recursive` at any depth."""
    inside = f"{folder}/" if folder else ""
    everything = {*paths} | folders(paths)
    below = [path for path in everything if path.startswith(inside) and path != folder]
    return sorted(path for path in below if recursive or "/" not in path[len(inside) :])
