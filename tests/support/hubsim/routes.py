"""The Hub's endpoints for repositories, buckets and Spaces, as huggingface_hub calls them."""

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import parse_qs

import yaml
from fastapi import APIRouter, Body, Depends, Header, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse

from .accounts import READ, START_JOBS
from .buckets import BucketState, feed, place
from .common import HubError, entry_missing
from .jobs import HARDWARE, Jobs
from .repos import Blob, RepoState, apply, blob, is_large
from .spaces import SpaceState, card_errors, parse_card
from .store import PLURAL, Hub, check_plan, create, full_name, url_path, visibility
from .xet import ranged, unpacked, xet_headers, xet_token

Auth = Annotated[str | None, Header()]
REPO = "/api/{kind}/{owner}/{name}"
BUCKET = "/api/buckets/{owner}/{name}"
SPACE = "/api/spaces/{owner}/{name}"
PAGE = 1000
NO_HASH = "0" * 64  # of an empty file, which the storage has no need to keep
LARGE = 10 << 20  # bytes from which on a text file goes to the Xet storage, as every binary file does


def _reader_and_writer(find: Callable[..., Any]) -> tuple[Any, Any]:
    """What routes depend on: what `find` gives a caller who reads, and one who writes."""

    async def readable(owner: str, name: str, authorization: Auth = None) -> Any:
        return find(f"{owner}/{name}", authorization)

    async def writable(owner: str, name: str, authorization: Auth = None) -> Any:
        return find(f"{owner}/{name}", authorization, write=True)

    return Depends(readable), Depends(writable)


def _add_tokens(routes: APIRouter, path: str, reader: Any, writer: Any) -> None:
    """Routes that give the tokens of the Xet storage; "*" stands for what they allow."""

    @routes.get(path.replace("*", "read"))
    async def read_token(allowed: reader, request: Request) -> JSONResponse:
        return xet_token(request, "read")

    @routes.get(path.replace("*", "write"))
    async def write_token(allowed: writer, request: Request) -> JSONResponse:
        return xet_token(request, "write")


def repo_routes(hub: Hub) -> APIRouter:
    """Routes that make, show, change and delete repositories and their files."""

    async def visible(kind: str, owner: str, name: str, authorization: Auth = None) -> RepoState:
        return hub.repo(kind, f"{owner}/{name}", authorization)

    async def readable(owner: str, name: str, kind: str = "models", authorization: Auth = None) -> RepoState:
        return hub.readable(kind, f"{owner}/{name}", authorization)

    async def writable(kind: str, owner: str, name: str, authorization: Auth = None) -> RepoState:
        return hub.repo(kind, f"{owner}/{name}", authorization, write=True)

    viewer = Annotated[RepoState, Depends(visible)]
    reader = Annotated[RepoState, Depends(readable)]
    writer = Annotated[RepoState, Depends(writable)]
    routes = APIRouter()

    @routes.post("/api/repos/create")
    async def make(wish: dict[str, Any], request: Request, authorization: Auth = None) -> dict[str, Any]:
        kind = PLURAL[wish.get("type") or "model"]
        name = full_name(hub, wish, authorization)
        create(hub, kind, name, wish, authorization)
        return {"url": f"{request.base_url}{url_path(kind, name)}", "name": name, "id": name}

    @routes.delete("/api/repos/delete")
    async def delete(wish: Annotated[dict[str, Any], Body()], authorization: Auth = None) -> None:
        kind = PLURAL[wish.get("type") or "model"]
        name = full_name(hub, wish, authorization)
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

    @routes.get("/api/{kind}")
    async def browse(kind: str, author: str, authorization: Auth = None) -> list[dict[str, Any]]:
        seen = hub.visible(kind, authorization)
        shown = [hub.info(repo) for repo in seen if repo.id.startswith(f"{author}/")]
        return [{key: value for key, value in info.items() if key != "siblings"} for info in shown]

    @routes.get(REPO)
    @routes.get(REPO + "/revision/{revision}")
    async def info(repo: viewer, revision: str = "main") -> dict[str, Any]:
        return hub.info(repo, revision)

    @routes.get(REPO + "/auth-check")
    async def may_read(repo: reader) -> None:
        """Answers, or refuses: the reader is looked up."""

    @routes.put(REPO + "/settings")
    async def settings(repo: writer, wish: dict[str, Any]) -> None:
        repo.visibility = visibility(wish, repo.visibility)
        repo.gated = wish.get("gated", repo.gated)

    @routes.post(REPO + "/preupload/main")
    async def preupload(repo: writer, asked: dict[str, Any]) -> dict[str, Any]:
        return {"files": [_upload_mode(repo, file) for file in asked["files"]]}

    @routes.post(REPO + "/commit/main")
    async def commit(repo: writer, request: Request) -> dict[str, Any]:
        header, *operations = [json.loads(line) for line in (await request.body()).splitlines()]
        contents = [{**operation, "blob": _added(hub, operation)} for operation in operations]
        made = repo.commit(header["value"]["summary"], apply(repo.files, contents))
        if repo.kind == "spaces":
            hub.spaces[repo.id].pushed()
        url = f"{request.base_url}{url_path(repo.kind, repo.id)}/commit/{made.oid}"
        return {"success": True, "commitOid": made.oid, "commitUrl": url, "hookOutput": ""}

    @routes.get(REPO + "/tree/{revision}")
    @routes.get(REPO + "/tree/{revision}/{prefix:path}")
    async def tree(
        repo: viewer, revision: str, prefix: str = "", recursive: bool = False
    ) -> list[dict[str, Any]]:
        return [_entry(hub, *found) for found in repo.tree(revision, prefix, recursive=recursive)]

    @routes.post(REPO + "/paths-info/{revision}")
    async def paths_info(repo: viewer, revision: str, request: Request) -> list[dict[str, Any]]:
        files = repo.at(revision).files
        asked = parse_qs((await request.body()).decode())["paths"]  # the client sends a form
        return [_entry(hub, path, files[path]) for path in asked if path in files]

    _add_tokens(routes, REPO + "/xet-*-token/{revision}", reader, writer)

    def resolve(repo: reader, revision: str, path: str, request: Request, range: Auth = None) -> Response:
        commit = repo.at(revision)
        file = repo.file(revision, path)
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.oid}"'}
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


def _entry(hub: Hub, path: str, file: Blob | None) -> dict[str, Any]:
    """A file of a repository, or a folder, as listings show it."""
    if file is None:
        return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
    entry = {"type": "file", "path": path, "oid": file.oid, "size": file.size}
    if not file.sha256:
        return entry
    lfs = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
    return entry | {"lfs": lfs, "xetHash": hub.cas.by_sha256[file.sha256]}


def _upload_mode(repo: RepoState, asked: dict[str, Any]) -> dict[str, Any]:
    """How to upload a file; `oid` lets the client leave out what has not changed."""
    path = asked["path"]
    sample = base64.b64decode(asked["sample"])
    large = asked["size"] >= LARGE or b"\0" in sample or is_large(path)
    present = repo.files.get(path)
    mode = "lfs" if large else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": present and present.oid}


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


def bucket_routes(hub: Hub) -> APIRouter:
    """Routes that make, show, change and delete buckets and what they hold."""

    reader, writer = (Annotated[BucketState, one] for one in _reader_and_writer(hub.bucket))
    routes = APIRouter()

    @routes.post(BUCKET)
    async def create(owner: str, name: str, request: Request, authorization: Auth = None) -> dict[str, str]:
        owner = hub.owner(owner, authorization)
        bucket_id = f"{owner}/{name}"
        where = f"buckets/{owner}/{name}"
        hub.accounts.caller(authorization).must_write("bucket", owner)
        if bucket_id in hub.buckets:
            raise HubError(409, "You already created this bucket", url=where)
        private = visibility(await request.json(), hub.accounts.accounts[owner].visibility) == "private"
        hub.buckets[bucket_id] = BucketState(bucket_id, private)
        return {"id": bucket_id, "url": f"{request.base_url}{where}"}

    @routes.put(BUCKET + "/settings")
    async def settings(bucket: writer, wish: dict[str, Any]) -> None:
        bucket.private = wish["private"]

    @routes.post("/api/repos/move")
    async def move(wish: dict[str, str], authorization: Auth = None) -> None:
        source = wish["fromRepo"]
        target = wish["toRepo"]
        hub.accounts.caller(authorization).must_write("bucket", target.split("/")[0])
        if target in hub.buckets:
            raise HubError(409, f"{target} exists already")
        bucket = hub.bucket(source, authorization, write=True)
        bucket.id = target
        hub.buckets[target] = hub.buckets.pop(source)

    @routes.delete(BUCKET, status_code=204)
    async def delete(bucket: writer) -> None:
        del hub.buckets[bucket.id]

    @routes.get(BUCKET)
    async def info(bucket: reader) -> dict[str, Any]:
        return bucket.to_json()

    @routes.get("/api/buckets/{owner}")
    async def browse(owner: str, search: str = "", authorization: Auth = None) -> list[dict[str, Any]]:
        owner = hub.owner(owner, authorization)
        seen = hub.visible_buckets(owner, authorization)
        return [bucket.to_json() for bucket in seen if search in bucket.id]

    @routes.get(BUCKET + "/events")
    async def events(bucket: reader, cursor: str | None = None, since: str = "") -> StreamingResponse:
        sent = place(bucket, cursor, hub.feed)
        return StreamingResponse(feed(bucket, sent, since, hub.feed), media_type="text/event-stream")

    @routes.get(BUCKET + "/tree")
    @routes.get(BUCKET + "/tree/{prefix:path}")
    async def tree(
        bucket: reader, request: Request, prefix: str = "", recursive: bool = True, cursor: int = 0
    ) -> JSONResponse:
        found = bucket.tree(prefix, recursive=recursive)
        more = str(request.url.include_query_params(cursor=cursor + PAGE))
        headers = {"Link": f'<{more}>; rel="next"'} if cursor + PAGE < len(found) else None
        return JSONResponse(found[cursor : cursor + PAGE], headers=headers)

    @routes.post(BUCKET + "/paths-info")
    async def paths_info(bucket: reader, asked: dict[str, list[str]]) -> list[dict[str, Any]]:
        return [bucket.files[path].to_json(path) for path in asked["paths"] if path in bucket.files]

    @routes.post(BUCKET + "/batch")
    async def batch(bucket: writer, request: Request, authorization: Auth = None) -> JSONResponse:
        operations = [json.loads(line) for line in (await request.body()).splitlines()]
        done = [_apply(hub, bucket, operation, authorization) for operation in operations]
        failed = [failure for failure in done if failure]
        counts = {"processed": len(operations), "succeeded": len(operations) - len(failed)}
        answer = {"success": not failed, **counts, "failed": failed}
        return JSONResponse(answer, 422 if failed and not counts["succeeded"] else 200)

    _add_tokens(routes, BUCKET + "/xet-*-token", reader, writer)

    @routes.api_route("/buckets/{owner}/{name}/resolve/{path:path}", methods=["GET", "HEAD"])
    async def resolve(bucket: reader, path: str, request: Request) -> Response:
        if (file := bucket.files.get(path)) is None:
            raise entry_missing()
        headers = xet_headers(request, f"api/buckets/{bucket.id}/xet-read-token", file.xet_hash, file.size)
        headers["ETag"] = f'"{file.xet_hash}"'
        if request.method == "HEAD":
            return Response(headers=headers | {"Content-Length": str(file.size)})
        return RedirectResponse(f"{request.base_url}cas-bridge/{file.xet_hash}", 302, headers)

    return routes


def _apply(
    hub: Hub, bucket: BucketState, operation: dict[str, Any], who: str | None
) -> dict[str, str] | None:
    """One line of a batch; returns what the Hub says where it refuses."""
    path = operation["path"]
    if operation["type"] == "deleteFile":
        bucket.delete(path)
        return None
    xet_hash = operation["xetHash"]
    copied = operation["type"] == "copyFile"
    if xet_hash not in hub.cas.files or (copied and xet_hash not in _contents(hub, operation, who)):
        return {"path": path, "error": "Xet hash not found"}
    bucket.put(path, hub.cas.size(xet_hash), xet_hash, operation["mtime"])
    return None


def _contents(hub: Hub, operation: dict[str, Any], who: str | None) -> set[str]:
    """The Xet hashes of the repository or bucket from which the caller copies; none if it is hidden."""
    kind = operation["sourceRepoType"]
    name = operation["sourceRepoId"]
    try:
        if kind == "bucket":
            held = {file.xet_hash for file in hub.bucket(name, who).files.values()}
        else:
            commits = hub.readable(PLURAL[kind], name, who).commits
            large = {file.sha256 for commit in commits for file in commit.files.values() if file.sha256}
            held = {hub.cas.by_sha256[sha256] for sha256 in large}
    except HubError:
        return set()
    return held - {NO_HASH}


def space_routes(hub: Hub) -> APIRouter:
    """Routes that only Spaces have."""
    reader, writer = (Annotated[SpaceState, one] for one in _reader_and_writer(hub.space))
    routes = APIRouter()

    @routes.get(SPACE + "/runtime")
    async def runtime(space: reader) -> dict[str, Any]:
        return space.look()

    @routes.post(SPACE + "/pause")
    async def pause(space: writer) -> dict[str, Any]:
        space.enter("PAUSED")
        return space.runtime()

    @routes.post(SPACE + "/restart")
    async def restart(space: writer, factory: bool = False) -> dict[str, Any]:
        space.restart(factory=factory)
        return space.runtime()

    @routes.post(SPACE + "/hardware")
    async def request_hardware(space: writer, wish: dict[str, Any]) -> dict[str, Any]:
        check_plan(hub.accounts.accounts[space.id.split("/")[0]], space.sdk, {"hardware": wish["flavor"]})
        if space.requested != wish["flavor"]:
            space.requested = wish["flavor"]
            space.start()
        space.sleep_time = wish.get("sleepTimeSeconds", space.sleep_time)
        return space.runtime()

    @routes.post(SPACE + "/sleeptime")
    async def sleep_time(space: writer, wish: dict[str, Any]) -> dict[str, Any]:
        space.sleep_time = wish["seconds"]
        return space.runtime()

    def add(kind: str, seer: Any) -> None:
        def shown(space: SpaceState) -> dict[str, Any]:
            return {key: one.to_json(secret=kind == "secrets") for key, one in getattr(space, kind).items()}

        @routes.get(f"{SPACE}/{kind}")
        async def read(space: seer) -> dict[str, Any]:
            return shown(space)

        @routes.post(f"{SPACE}/{kind}")
        async def put(space: writer, wish: dict[str, Any]) -> dict[str, Any]:
            space.set(kind, wish["key"], wish["value"], wish.get("description"))
            return shown(space)

        @routes.delete(f"{SPACE}/{kind}")
        async def delete(space: writer, wish: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
            space.unset(kind, wish["key"])
            return shown(space)

    add("variables", reader)  # every reader of the Space sees them
    add("secrets", writer)  # only a writer sees their names

    @routes.get(SPACE + "/logs/{kind}")
    async def logs(space: writer, kind: str) -> Response:
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in space.logs[kind])
        return Response(lines, media_type="text/event-stream")

    return routes


def job_routes(jobs: Jobs) -> APIRouter:
    """Routes of Jobs; those without `async` run in a thread, because they ask this server or wait."""
    routes = APIRouter(prefix="/api/jobs")

    @routes.get("/hardware")
    async def hardware() -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "prettyName": name,
                "cpu": "2 vCPU",
                "ram": "16 GB",
                "unitCostMicroUSD": price,
                "unitCostUSD": price / 1e6,
                "unitLabel": "minute",
            }
            for name, price in HARDWARE.items()
        ]

    @routes.post("/{owner}")
    def run(owner: str, spec: dict[str, Any], authorization: Auth = None) -> dict[str, Any]:
        return jobs.run(owner, authorization, spec).to_json()

    @routes.get("/{owner}")
    async def browse(request: Request, owner: str, authorization: Auth = None) -> list[dict[str, Any]]:
        jobs.check(owner, authorization, READ)
        stages = request.query_params.getlist("stage")
        labels = {tuple(label.split("=", 1)) for label in request.query_params.getlist("label")}
        own = [job for job in jobs.all.values() if job.owner["name"] == owner]
        shown = [job.to_json() for job in reversed(own) if labels <= (job.spec.get("labels") or {}).items()]
        return [job for job in shown if not stages or job["status"]["stage"] in stages]

    @routes.get("/{owner}/{name}")
    async def inspect(owner: str, name: str, authorization: Auth = None) -> dict[str, Any]:
        return jobs.find(owner, name, authorization).to_json()

    @routes.post("/{owner}/{name}/cancel")
    async def cancel(owner: str, name: str, authorization: Auth = None) -> dict[str, Any]:
        job = jobs.find(owner, name, authorization, START_JOBS)
        job.end("CANCELED")
        return job.to_json()

    @routes.post("/{owner}/{name}/duplicate")
    def duplicate(owner: str, name: str, authorization: Auth = None) -> dict[str, Any]:
        spec = jobs.find(owner, name, authorization, START_JOBS).spec
        return jobs.run(owner, authorization, spec, "duplicated-job").to_json()

    @routes.put("/{owner}/{name}/labels")
    async def relabel(
        owner: str, name: str, wish: dict[str, dict[str, str]], authorization: Auth = None
    ) -> dict[str, Any]:
        job = jobs.find(owner, name, authorization, START_JOBS)
        job.spec = {**job.spec, "labels": wish["labels"]}
        return job.to_json()

    @routes.get("/{owner}/{name}/logs")
    async def logs(owner: str, name: str, tail: int = 0, authorization: Auth = None) -> Response:
        lines = [*jobs.find(owner, name, authorization).log()][-tail:]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in lines)
        return Response(text, media_type="text/event-stream")

    return routes
