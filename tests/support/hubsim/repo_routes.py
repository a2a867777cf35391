"""The Hub's endpoints for models, datasets and Spaces as repositories, as huggingface_hub calls them."""

import base64
import json
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Body, Depends, Form, Header, Request, Response
from fastapi.responses import JSONResponse

from .common import HubError, entry_missing
from .repos import Blob, Commit, RepoState, apply, blob, folders, is_ignored, is_large, listing
from .spaces import card_errors, parse_card
from .store import PLURAL, Hub, create, full_name, url_path, visibility
from .xet import ranged, unpacked, xet_headers, xet_token

Auth = Annotated[str | None, Header()]
CONFLICT = "The branch was updated since you opened this page. Please refresh and try again."
API = "/api/{kind}/{owner}/{name}"
LARGE = 10 << 20  # bytes from which on a text file goes to the Xet storage, as every binary file does


def repo_routes(hub: Hub) -> APIRouter:
    """Routes that make, show, change and delete repositories and their files."""

    async def visible(kind: str, owner: str, name: str, authorization: Auth = None) -> RepoState:
        return hub.repo(kind, f"{owner}/{name}", authorization)

    async def readable(owner: str, name: str, kind: str = "models", authorization: Auth = None) -> RepoState:
        return hub.readable(kind, f"{owner}/{name}", authorization)

    async def writable(kind: str, owner: str, name: str, authorization: Auth = None) -> RepoState:
        return hub.repo(kind, f"{owner}/{name}", authorization, write=True)

    viewer, reader = Annotated[RepoState, Depends(visible)], Annotated[RepoState, Depends(readable)]
    writer = Annotated[RepoState, Depends(writable)]
    routes = APIRouter()

    @routes.post("/api/repos/create")
    async def make(wish: dict[str, Any], request: Request, authorization: Auth = None) -> dict[str, Any]:
        kind, name = PLURAL[wish.get("type") or "model"], full_name(hub, wish, authorization)
        create(hub, kind, name, wish, authorization)
        return {"url": f"{request.base_url}{url_path(kind, name)}", "name": name, "id": name}

    @routes.delete("/api/repos/delete")
    async def delete(wish: Annotated[dict[str, Any], Body()], authorization: Auth = None) -> None:
        kind, name = PLURAL[wish.get("type") or "model"], full_name(hub, wish, authorization)
        hub.repo(kind, name, authorization, write=True)
        del hub.repos[kind, name]
        hub.spaces.pop(name, None)

    @routes.post("/api/validate-yaml")
    async def validate(asked: dict[str, str]) -> JSONResponse:
        card: dict[str, Any] = {}
        try:
            card = parse_card(asked["content"])
            wrong = card_errors(card, asked["repoType"])
        except yaml.YAMLError as error:
            wrong = [f"Invalid YAML: {error}"]
        warnings = [] if card else [{"message": "empty or missing yaml metadata in repo card"}]
        answer = {"errors": [{"message": message} for message in wrong], "warnings": warnings}
        return JSONResponse(answer, 400 if wrong else 200)

    @routes.post(API + "/branch/{branch}")
    async def add_branch(repo: writer, branch: str, wish: dict[str, Any]) -> None:
        if branch in repo.branches:
            raise HubError(409, f"Reference already exists: refs/heads/{branch}")
        repo.branches[branch] = [repo.at(wish.get("startingPoint") or "main")]

    @routes.get("/api/{kind}")
    async def browse(
        kind: str, author: str = "", search: str = "", limit: int = 1000, authorization: Auth = None
    ) -> list[dict[str, Any]]:
        seen = [repo for repo in hub.visible(kind, authorization) if search in repo.id]
        seen = [repo for repo in seen if author in ("", repo.id.split("/")[0])]
        shown = [hub.info(repo) for repo in seen[:limit]]
        return [{key: value for key, value in info.items() if key != "siblings"} for info in shown]

    @routes.get(API)
    @routes.get(API + "/revision/{revision}")
    async def info(repo: viewer, revision: str = "main", blobs: bool = False) -> dict[str, Any]:
        return hub.info(repo, revision, blobs=blobs)

    @routes.get(API + "/auth-check")
    async def may_read(repo: reader) -> None:
        """Answers, or refuses: the reader is looked up."""

    @routes.put(API + "/settings")
    async def settings(repo: writer, wish: dict[str, Any]) -> None:
        repo.visibility = visibility(wish, repo.visibility)
        repo.gated = wish.get("gated", repo.gated)

    @routes.get(API + "/tree/{revision}")
    @routes.get(API + "/tree/{revision}/{folder:path}")
    async def tree(
        repo: reader, revision: str, folder: str = "", recursive: bool = False
    ) -> list[dict[str, Any]]:
        found = listing(repo.at(revision).files, folder.rstrip("/"), recursive=recursive)
        if folder and not found:
            raise entry_missing(f"{folder} does not exist on {revision}")
        return [_described(hub, repo, revision, path) for path in found]

    @routes.post(API + "/paths-info/{revision}")
    async def paths_info(
        repo: reader,
        revision: str,
        paths: Annotated[list[str], Form()],
        expand: Annotated[bool, Form()] = False,
    ) -> list[dict[str, Any]]:
        files = repo.at(revision).files
        known = [path for path in paths if path in files or path in folders(files)]
        found = [_described(hub, repo, revision, path) for path in known]
        if expand:
            found = [
                {**one, "lastCommit": repo.last_change(one["path"], revision).to_json()} for one in found
            ]
        return found

    @routes.get(API + "/commits/{revision}")
    async def commits(repo: reader, revision: str) -> list[dict[str, Any]]:
        newest_first = reversed(repo.branches.get(revision, []))
        return [{**commit.to_json(), "message": "", "authors": []} for commit in newest_first]

    @routes.post(API + "/preupload/{revision}")
    async def preupload(repo: writer, revision: str, asked: dict[str, Any]) -> dict[str, Any]:
        ignore = asked.get("gitIgnore") or repo.text(".gitignore")
        return {"files": [_upload_mode(repo, revision, file, ignore) for file in asked["files"]]}

    @routes.post(API + "/commit/{revision}")
    async def commit(repo: writer, revision: str, request: Request) -> dict[str, Any]:
        header, *operations = [json.loads(line) for line in (await request.body()).splitlines()]
        before = _tip(repo, revision, header["value"].get("parentCommit"))
        contents = [{**operation, "blob": _added(hub, operation)} for operation in operations]
        after = apply(before.files, contents)
        made = repo.commit(header["value"]["summary"], after, revision)
        if repo.kind == "spaces" and revision == "main":
            hub.spaces[repo.id].pushed()
        url = f"{request.base_url}{url_path(repo.kind, repo.id)}/commit/{made.oid}"
        return {"success": True, "commitOid": made.oid, "commitUrl": url, "hookOutput": ""}

    @routes.get(API + "/xet-read-token/{revision}")
    async def read_token(repo: reader, request: Request) -> JSONResponse:
        return xet_token(request, "read")

    @routes.get(API + "/xet-write-token/{revision}")
    async def write_token(repo: writer, request: Request) -> JSONResponse:
        return xet_token(request, "write")

    def resolve(repo: reader, revision: str, path: str, request: Request, range: Auth = None) -> Response:
        commit, file = repo.at(revision), repo.file(revision, path)
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.sha256 or file.oid}"'}
        if file.sha256:
            xet_hash = hub.cas.by_sha256[file.sha256]
            api_path = f"api/{repo.kind}/{repo.id}/xet-read-token/{commit.oid}"
            headers |= xet_headers(request, api_path, xet_hash, file.size)
        if request.method == "HEAD":
            return Response(headers=headers | {"Content-Length": str(file.size)})
        content = unpacked(request, hub.cas, xet_hash) if file.sha256 else file.content
        return ranged(content, range, headers)

    for pattern in (
        "/{owner}/{name}/resolve/{revision}/{path:path}",
        "/{kind}/{owner}/{name}/resolve/{revision}/{path:path}",
    ):
        routes.add_api_route(pattern, resolve, methods=["GET", "HEAD"])

    return routes


def _upload_mode(repo: RepoState, revision: str, asked: dict[str, Any], ignore: str) -> dict[str, Any]:
    """How to upload a file; `oid` lets the client leave out what has not changed."""
    path, sample = asked["path"], base64.b64decode(asked["sample"])
    large = asked["size"] >= LARGE or b"\0" in sample or is_large(path, repo.text(".gitattributes"))
    present = repo.at(revision).files.get(path)
    oid = (present.sha256 or present.oid) if present else None
    mode = "lfs" if large else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": is_ignored(path, ignore), "oid": oid}


def _tip(repo: RepoState, branch: str, parent: str | None) -> Commit:
    tip = repo.at(branch)
    if branch not in repo.branches:
        raise HubError(400, f"{branch} is not a branch")
    if parent and parent != tip.oid:
        raise HubError(412, CONFLICT)
    return tip


def _added(hub: Hub, operation: dict[str, Any]) -> Blob | None:
    """The content of the file that an operation adds."""
    value = operation["value"]
    if operation["key"] == "file":
        return blob(base64.b64decode(value["content"]))
    if operation["key"] != "lfsFile":
        return None
    if (xet_hash := hub.cas.by_sha256.get(value["oid"])) is None:
        raise HubError(400, f"the content of {value['path']} has not been uploaded")
    return Blob(hub.cas.size(xet_hash), sha256=value["oid"])


def _described(hub: Hub, repo: RepoState, revision: str, path: str) -> dict[str, Any]:
    """A file or a folder of a listing."""
    file = repo.at(revision).files.get(path)
    if not file:
        return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
    shown: dict[str, Any] = {"type": "file", "path": path, "oid": file.oid, "size": file.size}
    if file.sha256:
        lfs = {"oid": file.sha256, "size": file.size, "pointerSize": len(file.pointer)}
        shown |= {"lfs": lfs, "xetHash": hub.cas.by_sha256[file.sha256]}
    return shown
