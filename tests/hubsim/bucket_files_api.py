"""Single files of a bucket: where their content is to be had, and the content itself over plain http."""

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse

from .errors import entry_missing
from .plain import ranged, unpacked
from .store import Hub
from .xet_tokens import xet_headers, xet_token

Auth = Annotated[str | None, Header()]


def bucket_file_routes(hub: Hub) -> APIRouter:
    """Routes to the content of the files in buckets."""
    routes = APIRouter()

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
