"""What is in a repository: its files and folders, and its commits."""

from typing import Annotated, Any

from fastapi import APIRouter, Form, Header

from .errors import entry_missing
from .repos import RepoState
from .store import Hub
from .trees import folders, listing

API = "/api/{kind}/{owner}/{name}"
Auth = Annotated[str | None, Header()]


def tree_routes(hub: Hub) -> APIRouter:
    """Routes that list the content of models, datasets and Spaces."""
    routes = APIRouter()

    @routes.get(API + "/tree/{revision}")
    @routes.get(API + "/tree/{revision}/{folder:path}")
    async def tree(
        kind: str,
        owner: str,
        name: str,
        revision: str,
        folder: str = "",
        recursive: bool = False,
        expand: bool = False,
        authorization: Auth = None,
    ) -> list[dict[str, Any]]:
        repo = hub.readable(kind, f"{owner}/{name}", authorization)
        found = listing(repo.at(revision).files, folder.rstrip("/"), recursive=recursive)
        if folder and not found:
            raise entry_missing(f"{folder} does not exist on {revision}")
        return [_described(hub, repo, revision, path, expand=expand) for path in found]

    @routes.post(API + "/paths-info/{revision}")
    async def paths_info(
        kind: str,
        owner: str,
        name: str,
        revision: str,
        paths: Annotated[list[str], Form()],
        expand: Annotated[bool, Form()] = False,
        authorization: Auth = None,
    ) -> list[dict[str, Any]]:
        repo = hub.readable(kind, f"{owner}/{name}", authorization)
        files = repo.at(revision).files
        known = [path for path in paths if path in files or path in folders(files)]
        return [_described(hub, repo, revision, path, expand=expand) for path in known]

    @routes.get(API + "/commits/{revision}")
    async def commits(
        kind: str, owner: str, name: str, revision: str, authorization: Auth = None
    ) -> list[dict[str, Any]]:
        repo = hub.readable(kind, f"{owner}/{name}", authorization)
        newest_first = reversed(repo.branches.get(revision, []))
        plain = [{"id": commit.oid, "title": commit.title, "date": commit.date} for commit in newest_first]
        return [{**commit, "message": "", "authors": []} for commit in plain]

    return routes


def _described(hub: Hub, repo: RepoState, revision: str, path: str, *, expand: bool) -> dict[str, Any]:
    """A file or a folder of a listing; to `expand` it is to add its last commit."""
    file = repo.at(revision).files.get(path)
    shown: dict[str, Any] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
    if file:
        shown |= {"type": "file", "oid": file.oid, "size": file.size}
    if file and file.sha256:
        lfs = {"oid": file.sha256, "size": file.size, "pointerSize": len(file.pointer)}
        shown |= {"lfs": lfs, "xetHash": hub.cas.by_sha256[file.sha256]}
    if expand:
        commit = repo.last_change(revision, path)
        shown["lastCommit"] = {"id": commit.oid, "title": commit.title, "date": commit.date}
    return shown
