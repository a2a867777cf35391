"""The Hub's endpoints for buckets, as huggingface_hub calls them."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse

from .buckets import BucketState, feed, place
from .common import HubError, entry_missing
from .store import Hub, visibility
from .xet import xet_headers, xet_token

PAGE = 1000
NO_HASH = "0" * 64  # of an empty file, which the storage has no need to keep
API = "/api/buckets/{owner}/{name}"
Auth = Annotated[str | None, Header()]


def bucket_routes(hub: Hub) -> APIRouter:
    """Routes that make, show, change and delete buckets and what they hold."""

    async def readable(owner: str, name: str, authorization: Auth = None) -> BucketState:
        return hub.bucket(f"{owner}/{name}", authorization)

    async def writable(owner: str, name: str, authorization: Auth = None) -> BucketState:
        return hub.bucket(f"{owner}/{name}", authorization, write=True)

    reader, writer = Annotated[BucketState, Depends(readable)], Annotated[BucketState, Depends(writable)]
    routes = APIRouter()

    @routes.post(API)
    async def create(owner: str, name: str, request: Request, authorization: Auth = None) -> dict[str, str]:
        owner = hub.owner(owner, authorization)
        bucket_id, where = f"{owner}/{name}", f"buckets/{owner}/{name}"
        hub.accounts.caller(authorization).must_write("bucket", owner)
        if bucket_id in hub.buckets:
            raise HubError(409, "You already created this bucket", url=where)
        private = visibility(await request.json(), hub.accounts.accounts[owner].visibility) == "private"
        hub.buckets[bucket_id] = BucketState(bucket_id, private)
        return {"id": bucket_id, "url": f"{request.base_url}{where}"}

    @routes.put(API + "/settings")
    async def settings(bucket: writer, wish: dict[str, Any]) -> None:
        bucket.private = wish["private"]

    @routes.post("/api/repos/move")
    async def move(wish: dict[str, str], authorization: Auth = None) -> None:
        source, target = wish["fromRepo"], wish["toRepo"]
        hub.accounts.caller(authorization).must_write("bucket", target.split("/")[0])
        if target in hub.buckets:
            raise HubError(409, f"{target} exists already")
        bucket = hub.bucket(source, authorization, write=True)
        bucket.id = target
        hub.buckets[target] = hub.buckets.pop(source)

    @routes.delete(API, status_code=204)
    async def delete(bucket: writer) -> None:
        del hub.buckets[bucket.id]

    @routes.get(API)
    async def info(bucket: reader) -> dict[str, Any]:
        return bucket.to_json()

    @routes.get("/api/buckets/{owner}")
    async def browse(owner: str, search: str = "", authorization: Auth = None) -> list[dict[str, Any]]:
        owner = hub.owner(owner, authorization)
        seen = hub.visible_buckets(owner, authorization)
        return [bucket.to_json() for bucket in seen if search in bucket.id]

    @routes.get(API + "/events")
    async def events(bucket: reader, cursor: str | None = None, since: str = "") -> StreamingResponse:
        sent = place(bucket, cursor, hub.feed)
        return StreamingResponse(feed(bucket, sent, since, hub.feed), media_type="text/event-stream")

    @routes.get(API + "/tree")
    @routes.get(API + "/tree/{prefix:path}")
    async def tree(
        bucket: reader, request: Request, prefix: str = "", recursive: bool = True, cursor: int = 0
    ) -> JSONResponse:
        found = bucket.tree(prefix, recursive=recursive)
        more = str(request.url.include_query_params(cursor=cursor + PAGE))
        headers = {"Link": f'<{more}>; rel="next"'} if cursor + PAGE < len(found) else None
        return JSONResponse(found[cursor : cursor + PAGE], headers=headers)

    @routes.post(API + "/paths-info")
    async def paths_info(bucket: reader, asked: dict[str, list[str]]) -> list[dict[str, Any]]:
        return [bucket.files[path].to_json(path) for path in asked["paths"] if path in bucket.files]

    @routes.post(API + "/batch")
    async def batch(bucket: writer, request: Request) -> JSONResponse:
        operations = [json.loads(line) for line in (await request.body()).splitlines()]
        failed = [failure for operation in operations if (failure := _apply(hub, bucket, operation))]
        counts = {"processed": len(operations), "succeeded": len(operations) - len(failed)}
        answer = {"success": not failed, **counts, "failed": failed}
        return JSONResponse(answer, 422 if failed and not counts["succeeded"] else 200)

    @routes.get(API + "/xet-read-token")
    async def read_token(bucket: reader, request: Request) -> JSONResponse:
        return xet_token(request, "read")

    @routes.get(API + "/xet-write-token")
    async def write_token(bucket: writer, request: Request) -> JSONResponse:
        return xet_token(request, "write")

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


def _apply(hub: Hub, bucket: BucketState, operation: dict[str, Any]) -> dict[str, str] | None:
    """One line of a batch; returns what the Hub says where it refuses."""
    path = operation["path"]
    if operation["type"] == "deleteFile":
        bucket.delete(path)
        return None
    xet_hash, copied = operation["xetHash"], operation["type"] == "copyFile"
    if xet_hash not in hub.cas.files or (copied and xet_hash == NO_HASH):
        return {"path": path, "error": "Xet hash not found"}
    bucket.put(path, hub.cas.size(xet_hash), xet_hash, operation["mtime"])
    return None
