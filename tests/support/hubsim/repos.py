"""Git-based repositories: the commits of their one branch, each with all its files."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from .common import HubError, entry_missing, now

# Part of what the Hub puts into every new repository.
LARGE = (
    "7z arrow bin bz2 ckpt gz h5 joblib npy npz onnx parquet pickle pkl pt pth safetensors tar tgz xz zip zst"
)
ATTRIBUTES = "".join(f"*.{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in LARGE.split())


def is_large(path: str) -> bool:
    """Does .gitattributes send the path to the storage for large files?"""
    return path.rpartition(".")[2] in LARGE.split()


KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}


@dataclass(frozen=True)
class Blob:
    """The content of one file: here, or with a `sha256` in the Xet storage."""

    size: int
    content: bytes = b""
    sha256: str = ""

    @property
    def oid(self) -> str:
        """Git's name for it; of a large file, its SHA-256."""
        return self.sha256 or hashlib.sha1(b"blob %d\0" % self.size + self.content).hexdigest()


def blob(content: bytes) -> Blob:
    return Blob(len(content), content)


@dataclass(frozen=True)
class Commit:
    """One version of a repository: path -> content."""

    oid: str
    title: str
    files: dict[str, Blob]
    date: str = field(default_factory=now)


@dataclass
class RepoState:
    """A model, a dataset or the files of a Space. `kind` is the plural that API paths use."""

    kind: str
    id: str
    visibility: str = "public"
    gated: str | bool = False
    granted: set[str] = field(default_factory=set)  # users that may read in spite of `gated`
    created_at: str = field(default_factory=now)
    commits: list[Commit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit("initial commit", {".gitattributes": blob(ATTRIBUTES.encode())})

    @property
    def private(self) -> bool:
        return self.visibility == "private"

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[-1].files

    def commit(self, title: str, files: dict[str, Blob]) -> Commit:
        seed = f"{self.kind} {self.id} {len(self.commits)} {title} {now()}"
        self.commits.append(Commit(hashlib.sha1(seed.encode()).hexdigest(), title, files))
        return self.commits[-1]

    def at(self, revision: str) -> Commit:
        known = {commit.oid: commit for commit in self.commits} | {"main": self.commits[-1]}
        if revision not in known:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return known[revision]

    def file(self, revision: str, path: str) -> Blob:
        if path not in self.at(revision).files:
            raise entry_missing()
        return self.at(revision).files[path]

    def tree(self, revision: str, prefix: str, *, recursive: bool) -> list[tuple[str, Blob | None]]:
        """All files below the folder `prefix`, or what lies directly in it; a folder has no content."""
        files = self.at(revision).files
        start = f"{prefix}/" if prefix else ""
        inside = {path: file for path, file in files.items() if path.startswith(start)}
        if not inside:
            raise entry_missing(f"{prefix} does not exist on {revision}")
        if recursive:
            return sorted(inside.items())
        shown = {start + path.removeprefix(start).split("/")[0] for path in inside}
        return [(path, inside.get(path)) for path in sorted(shown)]

    def text(self, path: str) -> str:
        file = self.files.get(path)
        return file.content.decode(errors="replace") if file else ""

    def to_json(self, revision: str) -> dict[str, Any]:
        """What `model_info` and its siblings read."""
        commit = self.at(revision)
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
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        }


def apply(files: dict[str, Blob], operations: list[dict[str, Any]]) -> dict[str, Blob]:
    """The files after the operations of a commit; raises where one of them cannot be done."""
    after = dict(files)
    for operation in operations:
        path = operation["value"]["path"]
        if operation["key"] in ("file", "lfsFile"):
            after[path] = operation["blob"]
        elif operation["key"] != "deletedFile":
            raise HubError(400, f"unknown operation {operation['key']}")
        elif after.pop(path, None) is None:
            raise entry_missing("A file with this name doesn't exist")
    return after
