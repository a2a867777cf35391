"""The files of repositories: uploading in a commit, and downloading."""

import base64
import json
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse

from .errors import HubError
from .git_rules import is_ignored, is_large
from .plain import ranged, unpacked
from .repos import Blob, Commit, RepoState, apply, blob
from .store import Hub
from .xet_tokens import xet_headers, xet_token

Auth = Annotated[str | None, Header()]
Range = Annotated[str | None, Header()]
LARGE = 10 << 20  # bytes from which on a text file goes to the Xet storage, as every binary file does
API = "/api/{kind}/{owner}/{name}"
CONFLICT = "The branch was updated since you opened this page. Please refresh and try again."


def file_routes(hub: Hub) -> APIRouter:
    """Routes to the content of models, datasets and Spaces."""
    routes = APIRouter()
    _preupload_routes(routes, hub)
    _commit_routes(routes, hub)
    _token_routes(routes, hub)
    _resolve_routes(routes, hub)
    return routes


def _preupload_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.post(API + "/preupload/{revision}")
    async def preupload(
        kind: str, owner: str, name: str, revision: str, asked: dict[str, Any], authorization: Auth = None
    ) -> dict[str, Any]:
        repo = hub.repo(kind, f"{owner}/{name}", authorization, write=True)
        ignore = asked.get("gitIgnore") or repo.text(".gitignore")
        return {"files": [_upload_mode(repo, revision, file, ignore) for file in asked["files"]]}


def _upload_mode(repo: RepoState, revision: str, asked: dict[str, Any], ignore: str) -> dict[str, Any]:
    """How to upload a file; `oid` lets the client leave out what has not changed."""
    path, sample = asked["path"], base64.b64decode(asked["sample"])
    large = asked["size"] >= LARGE or b"\0" in sample or is_large(path, repo.text(".gitattributes"))
    present = repo.at(revision).files.get(path)
    oid = (present.sha256 or present.oid) if present else None
    mode = "lfs" if large else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": is_ignored(path, ignore), "oid": oid}


def _commit_routes(routes: APIRouter, hub: Hub) -> None:
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


def _tip(repo: RepoState, branch: str, parent: str | None) -> Commit:
    """The commit to build on, which must be `parent` if the client names one."""
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


def _token_routes(routes: APIRouter, hub: Hub) -> None:
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


def _resolve_routes(routes: APIRouter, hub: Hub) -> None:
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
