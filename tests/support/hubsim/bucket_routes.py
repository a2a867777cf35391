"""The Hub's endpoints for buckets, as huggingface_hub calls them."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from .buckets import BucketState, feed, place
from .common import HubError, entry_missing
from .store import Hub, is_private
from .xet import ranged, unpacked, xet_headers, xet_token

PAGE = 1000
NO_HASH = "0" * 64  # of an empty file, which the storage has no need to keep
API = "/api/buckets/{owner}/{name}"
Auth = Annotated[str | None, Header()]


def bucket_routes(hub: Hub) -> APIRouter:
    """Routes that make, show, change and delete buckets and what they hold."""
    routes = APIRouter()

    @routes.post(API)
    async def create(owner: str, name: str, request: Request, authorization: Auth = None) -> dict[str, str]:
        owner = hub.owner(owner, authorization)
        bucket_id, where = f"{owner}/{name}", f"buckets/{owner}/{name}"
        hub.accounts.caller(authorization).must_write("bucket", owner)
        if bucket_id in hub.buckets:
            raise HubError(409, "You already created this bucket", url=where)
        private = is_private(await request.json(), hub.accounts.accounts[owner])
        hub.buckets[bucket_id] = BucketState(bucket_id, private)
        return {"id": bucket_id, "url": f"{request.base_url}{where}"}

    @routes.put(API + "/settings")
    async def settings(owner: str, name: str, wish: dict[str, Any], authorization: Auth = None) -> None:
        hub.bucket(f"{owner}/{name}", authorization, write=True).private = wish["private"]

    @routes.delete(API, status_code=204)
    async def delete(owner: str, name: str, authorization: Auth = None) -> None:
        hub.bucket(f"{owner}/{name}", authorization, write=True)
        del hub.buckets[f"{owner}/{name}"]

    @routes.get(API)
    async def info(owner: str, name: str, authorization: Auth = None) -> dict[str, Any]:
        return hub.bucket(f"{owner}/{name}", authorization).to_json()

    @routes.get("/api/buckets/{owner}")
    async def browse(owner: str, search: str = "", authorization: Auth = None) -> list[dict[str, Any]]:
        owner = hub.owner(owner, authorization)
        seen = hub.visible_buckets(owner, authorization)
        return [bucket.to_json() for bucket in seen if search in bucket.id]

    @routes.get(API + "/events")
    async def events(
        owner: str, name: str, cursor: str | None = None, since: str = "", authorization: Auth = None
    ) -> StreamingResponse:
        bucket = hub.bucket(f"{owner}/{name}", authorization)
        sent = place(bucket, cursor, hub.feed)
        return StreamingResponse(feed(bucket, sent, since, hub.feed), media_type="text/event-stream")

    @routes.get(API + "/tree")
    @routes.get(API + "/tree/{prefix:path}")
    async def tree(
        owner: str,
        name: str,
        request: Request,
        prefix: str = "",
        recursive: bool = True,
        cursor: int = 0,
        authorization: Auth = None,
    ) -> JSONResponse:
        found = hub.bucket(f"{owner}/{name}", authorization).tree(prefix, recursive=recursive)
        more = str(request.url.include_query_params(cursor=cursor + PAGE))
        headers = {"Link": f'<{more}>; rel="next"'} if cursor + PAGE < len(found) else None
        return JSONResponse(found[cursor : cursor + PAGE], headers=headers)

    @routes.post(API + "/paths-info")
    async def paths_info(
        owner: str, name: str, asked: dict[str, list[str]], authorization: Auth = None
    ) -> list[dict[str, Any]]:
        files = hub.bucket(f"{owner}/{name}", authorization).files
        return [files[path].to_json(path) for path in asked["paths"] if path in files]

    @routes.post(API + "/batch")
    async def batch(owner: str, name: str, request: Request, authorization: Auth = None) -> JSONResponse:
        bucket = hub.bucket(f"{owner}/{name}", authorization, write=True)
        operations = [json.loads(line) for line in (await request.body()).splitlines()]
        failed = [failure for operation in operations if (failure := _apply(hub, bucket, operation))]
        counts = {"processed": len(operations), "succeeded": len(operations) - len(failed)}
        answer = {"success": not failed, **counts, "failed": failed}
        return JSONResponse(answer, 422 if failed and not counts["succeeded"] else 200)

    @routes.get("/api/buckets/{owner}/{name}/xet-{kind}-token")
    async def token(
        owner: str, name: str, kind: str, request: Request, authorization: Auth = None
    ) -> JSONResponse:
        hub.bucket(f"{owner}/{name}", authorization, write=kind == "write")
        return xet_token(request, kind)

    @routes.api_route("/buckets/{owner}/{name}/resolve/{path:path}", methods=["GET", "HEAD"])
    def resolve(  # in a thread, as it may have to ask this very server for the content
        owner: str, name: str, path: str, request: Request, authorization: Auth = None, range: Auth = None
    ) -> Response:
        bucket = hub.bucket(f"{owner}/{name}", authorization)
        if (file := bucket.files.get(path)) is None:
            raise entry_missing()
        headers = xet_headers(request, f"api/buckets/{bucket.id}/xet-read-token", file.xet_hash, file.size)
        headers["ETag"] = f'"{file.xet_hash}"'
        if request.method == "HEAD":
            return Response(headers=headers | {"Content-Length": str(file.size)})
        return ranged(unpacked(request, hub.cas, file.xet_hash), range, headers)

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
