"""The Hub's bucket endpoints, as huggingface_hub calls them."""

import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse

from .store import BucketState, Entry, Hub, HubError

PAGE = 1000
Auth = Annotated[str | None, Header()]


def hub_routes(hub: Hub) -> APIRouter:
    """Routes under /api/buckets and /buckets."""
    routes = APIRouter()
    _bucket_routes(routes, hub)
    _file_routes(routes, hub)
    _xet_routes(routes, hub)
    return routes


def _bucket_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.post("/api/buckets/{owner}/{name}")
    async def create(owner: str, name: str, request: Request, authorization: Auth = None) -> JSONResponse:
        hub.authorize(authorization, write=True)
        bucket_id = f"{owner}/{name}"
        answer = {"id": bucket_id, "url": f"{request.base_url}buckets/{bucket_id}"}
        if bucket_id in hub.buckets:
            return JSONResponse({"error": "You already created this bucket", **answer}, 409)
        wish = await request.json()
        private = wish.get("private") or wish.get("visibility") == "private"  # huggingface_hub 1 and 2
        hub.buckets[bucket_id] = BucketState(bucket_id, bool(private))
        return JSONResponse(answer)

    @routes.get("/api/buckets/{owner}/{name}")
    async def info(owner: str, name: str, authorization: Auth = None) -> dict[str, Any]:
        return hub.bucket(f"{owner}/{name}", authorization).to_json()


def _file_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.get("/api/buckets/{owner}/{name}/tree")
    @routes.get("/api/buckets/{owner}/{name}/tree/{prefix:path}")
    async def tree(
        owner: str, name: str, request: Request, prefix: str = "", cursor: int = 0, authorization: Auth = None
    ) -> JSONResponse:
        files = hub.bucket(f"{owner}/{name}", authorization).files
        paths = sorted(path for path in files if path.startswith(prefix))
        page = [files[path].to_json(path) for path in paths[cursor : cursor + PAGE]]
        more = str(request.url.include_query_params(cursor=cursor + PAGE))
        headers = {"Link": f'<{more}>; rel="next"'} if cursor + PAGE < len(paths) else None
        return JSONResponse(page, headers=headers)

    @routes.post("/api/buckets/{owner}/{name}/paths-info")
    async def paths_info(owner: str, name: str, request: Request, authorization: Auth = None) -> JSONResponse:
        files = hub.bucket(f"{owner}/{name}", authorization).files
        paths = (await request.json())["paths"]
        return JSONResponse([files[path].to_json(path) for path in paths if path in files])

    @routes.post("/api/buckets/{owner}/{name}/batch")
    async def batch(owner: str, name: str, request: Request, authorization: Auth = None) -> JSONResponse:
        bucket = hub.bucket(f"{owner}/{name}", authorization, write=True)
        operations = [json.loads(line) for line in (await request.body()).splitlines()]
        failed = [failure for operation in operations if (failure := _apply(hub, bucket, operation))]
        answer = {"success": not failed, "processed": len(operations), "failed": failed}
        return JSONResponse(answer, 422 if failed and len(failed) == len(operations) else 200)


def _apply(hub: Hub, bucket: BucketState, operation: dict[str, Any]) -> dict[str, str] | None:
    """One line of a batch; returns what the Hub says where it refuses."""
    path = operation["path"]
    if operation["type"] == "deleteFile":
        bucket.files.pop(path, None)
    elif operation["xetHash"] in hub.cas.files:
        xet_hash = operation["xetHash"]
        bucket.files[path] = Entry(hub.cas.size(xet_hash), xet_hash)
    else:
        return {"path": path, "error": "Xet hash not found"}
    return None


def _xet_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.get("/api/buckets/{owner}/{name}/xet-{kind}-token")
    async def token(
        owner: str, name: str, kind: str, request: Request, authorization: Auth = None
    ) -> dict[str, Any]:
        hub.bucket(f"{owner}/{name}", authorization, write=kind == "write")
        expiry = int(time.time()) + 3600
        return {"casUrl": f"{request.base_url}cas", "accessToken": f"xet-{kind}", "exp": expiry}

    @routes.head("/buckets/{owner}/{name}/resolve/{path:path}")
    async def resolve(
        owner: str, name: str, path: str, request: Request, authorization: Auth = None
    ) -> Response:
        bucket = hub.bucket(f"{owner}/{name}", authorization)
        if (file := bucket.files.get(path)) is None:
            raise HubError(404, "Entry not found", "EntryNotFound")
        link = f'<{request.base_url}api/buckets/{bucket.id}/xet-read-token>; rel="xet-auth"'
        size = {"X-Linked-Size": str(file.size), "Content-Length": str(file.size)}
        return Response(
            headers={"X-Xet-Hash": file.xet_hash, "ETag": f'"{file.xet_hash}"', "Link": link, **size}
        )
