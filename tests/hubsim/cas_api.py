"""The Xet storage service over http, as hf_xet calls it."""

from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response

from .cas import Cas, parse_range
from .errors import HubError
from .xet import Term

Auth = Annotated[str, Header()]
Range = Annotated[str, Header()]


def cas_routes(cas: Cas) -> APIRouter:
    """Routes under /cas. Whatever is not here answers 404, and the client does without."""
    routes = APIRouter(prefix="/cas")
    _upload_routes(routes, cas)
    _download_routes(routes, cas)
    return routes


def _upload_routes(routes: APIRouter, cas: Cas) -> None:
    @routes.post("/v1/xorbs/default/{name}")
    async def put_xorb(name: str, request: Request, authorization: Auth = "") -> dict[str, bool]:
        _authorize(authorization, "xet-write")
        return {"was_inserted": cas.put_xorb(name, await request.body())}

    @routes.post("/v1/shards")
    async def put_shard(request: Request, authorization: Auth = "") -> dict[str, int]:
        _authorize(authorization, "xet-write")
        cas.put_shard(await request.body())
        return {"result": 1}


def _download_routes(routes: APIRouter, cas: Cas) -> None:
    @routes.get("/v2/reconstructions/{file_hash}")
    async def reconstruct(
        file_hash: str, request: Request, authorization: Auth = "", range: Range = "bytes=0-"
    ) -> dict[str, Any]:
        _authorize(authorization, "xet-write", "xet-read")
        if file_hash not in cas.files:
            raise HubError(404, "file not found")
        skip, terms = cas.reconstruct(file_hash, *parse_range(range, cas.size(file_hash)))
        described = [
            {"hash": t.xorb, "unpacked_length": t.size, "range": {"start": t.start, "end": t.end}}
            for t in terms
        ]
        xorbs = _xorb_spans(cas, terms, f"{request.base_url}cas/data/")
        return {"offset_into_first_range": skip, "terms": described, "xorbs": xorbs}

    @routes.get("/data/{name}")
    async def data(name: str, range: Range = "bytes=0-") -> Response:
        content = (cas.root / name).read_bytes()
        start, stop = parse_range(range, len(content))
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return Response(content[start:stop], 206, headers, media_type="application/octet-stream")


def _xorb_spans(cas: Cas, terms: list[Term], url: str) -> dict[str, Any]:
    """For each xorb one range that covers all its terms: more than needed at times, never less."""
    spans = {}
    for name, group in groupby(sorted(terms, key=lambda term: term.xorb), key=lambda term: term.xorb):
        parts = list(group)
        start, end = min(part.start for part in parts), max(part.end for part in parts)
        offsets = cas.xorbs[name].offsets
        packed = {"start": offsets[start], "end": offsets[end] - 1}
        chunks = {"start": start, "end": end}
        spans[name] = [{"url": url + name, "ranges": [{"chunks": chunks, "bytes": packed}]}]
    return spans


def _authorize(authorization: str, *allowed: str) -> None:
    if authorization.removeprefix("Bearer ") not in allowed:
        raise HubError(401, "this needs the token that the Hub hands out for it")
