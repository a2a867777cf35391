"""The Hub's endpoints for models, datasets and Spaces as repositories, as huggingface_hub calls them."""

import base64
import json
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Body, Form, Header, Request, Response
from fastapi.responses import JSONResponse

from .common import HubError, entry_missing
from .repos import Blob, Commit, RepoState, apply, blob, folders, is_ignored, is_large, listing
from .spaces import card_errors, parse_card
from .store import PLURAL, Hub, create, full_name, url_path, visibility
from .xet import ranged, unpacked, xet_headers, xet_token

Auth = Annotated[str | None, Header()]


def repo_routes(hub: Hub) -> APIRouter:
    """Routes that make, show, change and delete repositories; those of their files are elsewhere."""
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
        try:
            wrong = card_errors(parse_card(asked["content"]), asked["repoType"])
        except yaml.YAMLError as error:
            wrong = [f"Invalid YAML: {error}"]
        empty = (
            []
            if parse_card(asked["content"])
            else [{"message": "empty or missing yaml metadata in repo card"}]
        )
        answer = {"errors": [{"message": message} for message in wrong], "warnings": empty}
        return JSONResponse(answer, 400 if wrong else 200)

    @routes.post("/api/repos/move")
    async def move(wish: dict[str, Any], authorization: Auth = None) -> None:
        hub.move(wish.get("type") or "model", wish["fromRepo"], wish["toRepo"], authorization)

    @routes.post("/api/{kind}/{owner}/{name}/branch/{branch}")
    async def add_branch(
        kind: str, owner: str, name: str, branch: str, wish: dict[str, Any], authorization: Auth = None
    ) -> None:
        repo = hub.repo(kind, f"{owner}/{name}", authorization, write=True)
        if branch in repo.branches:
            raise HubError(409, f"Reference already exists: refs/heads/{branch}")
        repo.branches[branch] = [repo.at(wish.get("startingPoint") or "main")]

    @routes.get("/api/{kind}")
    async def browse(
        kind: str, author: str = "", search: str = "", limit: int = 1000, authorization: Auth = None
    ) -> list[dict[str, Any]]:
        seen = [repo for repo in hub.visible(kind, authorization) if search in repo.id]
        seen = [repo for repo in seen if author in ("", repo.id.split("/")[0])]
        return [{key: value for key, value in hub.info(repo).items() if key != "siblings"} for repo in seen][
            :limit
        ]

    @routes.get("/api/{kind}/{owner}/{name}")
    @routes.get("/api/{kind}/{owner}/{name}/revision/{revision}")
    async def info(
        kind: str,
        owner: str,
        name: str,
        revision: str = "main",
        blobs: bool = False,
        authorization: Auth = None,
    ) -> dict[str, Any]:
        return hub.info(hub.repo(kind, f"{owner}/{name}", authorization), revision, blobs=blobs)

    @routes.get("/api/{kind}/{owner}/{name}/auth-check")
    async def may_read(kind: str, owner: str, name: str, authorization: Auth = None) -> None:
        hub.readable(kind, f"{owner}/{name}", authorization)

    @routes.get("/api/{kind}/{owner}/{name}/auth-check/write")
    async def may_write(kind: str, owner: str, name: str, authorization: Auth = None) -> None:
        hub.repo(kind, f"{owner}/{name}", authorization, write=True)

    @routes.put("/api/{kind}/{owner}/{name}/settings")
    async def settings(
        kind: str, owner: str, name: str, request: Request, authorization: Auth = None
    ) -> None:
        repo, wish = hub.repo(kind, f"{owner}/{name}", authorization, write=True), await request.json()
        repo.visibility = visibility(wish, repo.visibility)
        repo.gated = wish.get("gated", repo.gated)

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

    @routes.post(API + "/preupload/{revision}")
    async def preupload(
        kind: str, owner: str, name: str, revision: str, asked: dict[str, Any], authorization: Auth = None
    ) -> dict[str, Any]:
        repo = hub.repo(kind, f"{owner}/{name}", authorization, write=True)
        ignore = asked.get("gitIgnore") or repo.text(".gitignore")
        return {"files": [_upload_mode(repo, revision, file, ignore) for file in asked["files"]]}

    @routes.post(API + "/commit/{revision}")
    async def commit(
        kind: str, owner: str, name: str, revision: str, request: Request, authorization: Auth = None
    ) -> dict[str, Any]:
        repo = hub.repo(kind, f"{owner}/{name}", authorization, write=True)
        header, *operations = [json.loads(line) for line in (await request.body()).splitlines()]
        before = _tip(repo, revision, header["value"].get("parentCommit"))
        after = apply(before.files, _with_content(hub, operations))
        made = repo.commit(header["value"]["summary"], after, revision)
        if kind == "spaces" and revision == "main":
            hub.spaces[repo.id].pushed()
        url = f"{request.base_url}{'' if kind == 'models' else f'{kind}/'}{repo.id}/commit/{made.oid}"
        return {"success": True, "commitOid": made.oid, "commitUrl": url, "hookOutput": ""}

    @routes.get(API + "/xet-read-token/{revision}")
    async def read_token(
        kind: str, owner: str, name: str, request: Request, authorization: Auth = None
    ) -> JSONResponse:
        hub.readable(kind, f"{owner}/{name}", authorization)
        return xet_token(request, "read")

    @routes.get(API + "/xet-write-token/{revision}")
    async def write_token(
        kind: str, owner: str, name: str, request: Request, authorization: Auth = None
    ) -> JSONResponse:
        hub.repo(kind, f"{owner}/{name}", authorization, write=True)
        return xet_token(request, "write")

    def resolve(
        owner: str,
        name: str,
        revision: str,
        path: str,
        request: Request,
        kind: str = "models",
        authorization: Auth = None,
        range: Range = None,
    ) -> Response:
        repo = hub.readable(kind, f"{owner}/{name}", authorization)
        commit, file = repo.at(revision), repo.file(revision, path)
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.sha256 or file.oid}"'}
        if file.sha256:
            xet_hash, api_path = (
                hub.cas.by_sha256[file.sha256],
                f"api/{kind}/{repo.id}/xet-read-token/{commit.oid}",
            )
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


Range = Annotated[str | None, Header()]
LARGE = 10 << 20  # bytes from which on a text file goes to the Xet storage, as every binary file does
API = "/api/{kind}/{owner}/{name}"
CONFLICT = "The branch was updated since you opened this page. Please refresh and try again."


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


def _with_content(hub: Hub, operations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operations with a `blob` where they add something."""
    return [{**operation, "blob": _added(hub, operation)} for operation in operations]


def _added(hub: Hub, operation: dict[str, Any]) -> Blob | None:
    value = operation["value"]
    if operation["key"] == "file":
        return blob(base64.b64decode(value["content"]))
    if operation["key"] != "lfsFile":
        return None
    if (xet_hash := hub.cas.by_sha256.get(value["oid"])) is None:
        raise HubError(400, f"the content of {value['path']} has not been uploaded")
    return Blob(hub.cas.size(xet_hash), sha256=value["oid"])


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
