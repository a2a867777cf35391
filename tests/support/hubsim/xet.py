"""The Xet storage: its binary formats, its files on disk, and its http service for hf_xet."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Annotated, Any
from uuid import uuid4

import hf_xet
from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse

from .common import CLOCK, HubError

RECORD = 48  # every record of a shard has this size, its header included
LAST = b"\xff" * 32
HAS_VERIFICATION = 1 << 31
HAS_METADATA = 1 << 30


@dataclass(frozen=True)
class Term:
    """A run of chunks [start, end) of one xorb; `size` is their length when unpacked."""

    xorb: str
    start: int
    end: int
    size: int


def chunk_offsets(data: bytes) -> list[int]:
    """Where the packed chunks of a xorb begin, and the last one ends.

    The footer that may follow them starts with a byte other than 0.
    """
    offsets = [0]
    while offsets[-1] < len(data) and data[offsets[-1]] == 0:
        packed = data[offsets[-1] + 1 : offsets[-1] + 4]
        offsets.append(offsets[-1] + 8 + int.from_bytes(packed, "little"))
    if offsets[-1] > len(data):
        raise ValueError("xorb ends inside a chunk")
    return offsets


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard; `sha256` is empty where the client left it out, as it does for buckets."""

    hash: str
    terms: list[Term]
    sha256: str


def parse_shard(data: bytes) -> list[ShardFile]:
    files = []
    position = RECORD
    while data[position : position + 32] != LAST:
        file_hash, flags, count = struct.unpack_from("<32sII", data, position)
        terms = list(_terms(data, position + RECORD, count))
        position += RECORD + RECORD * count * (2 if flags & HAS_VERIFICATION else 1)
        sha256 = _hex(data[position : position + 32]) if flags & HAS_METADATA else ""
        position += RECORD if flags & HAS_METADATA else 0
        files.append(ShardFile(_hex(file_hash), terms, sha256))
    return files


def _terms(data: bytes, position: int, count: int) -> Iterator[Term]:
    for offset in range(position, position + RECORD * count, RECORD):
        xorb, _flags, size, start, end = struct.unpack_from("<32s4I", data, offset)
        yield Term(_hex(xorb), start, end, size)


def _hex(raw: bytes) -> str:
    """Xet writes a hash as four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


class Cas:
    """Files by their Xet hash, as the chunks that they are made of; repositories know them by SHA-256."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)
        self.xorbs: dict[str, list[int]] = {}  # where the chunks of each lie in its file
        self.files: dict[str, list[Term]] = {}
        self.by_sha256: dict[str, str] = {}  # SHA-256 -> Xet hash
        self.grants: dict[str, tuple[int, bytes]] = {}  # length of a xorb that may come, and what came
        self.received = 0  # bytes that clients have uploaded

    def put_xorb(self, name: str, data: bytes) -> bool:
        """Store a xorb; False if it was there already."""
        if name in self.xorbs:
            return False
        offsets = chunk_offsets(data)
        (self.root / name).write_bytes(data)
        self.xorbs[name] = offsets
        return True

    def put_shard(self, data: bytes) -> None:
        """Make the files of a shard known; every xorb that they use must be here already."""
        files = parse_shard(data)
        for term in (term for file in files for term in file.terms):
            if term.xorb not in self.xorbs:
                raise HubError(400, f"unknown xorb {term.xorb}")
        self.files |= {file.hash: file.terms for file in files}
        self.by_sha256 |= {file.sha256: file.hash for file in files if file.sha256}

    def size(self, file_hash: str) -> int:
        return sum(term.size for term in self.files[file_hash])

    def reconstruct(self, file_hash: str, start: int, stop: int) -> tuple[int, list[Term]]:
        """The terms that hold bytes [start, stop) of a file, and how many of their first bytes to skip."""
        skip = 0
        terms = []
        position = 0
        for term in self.files[file_hash]:
            if position < stop and start < position + term.size:
                if not terms:
                    skip = start - position
                terms.append(term)
            position += term.size
        return skip, terms


def parse_range(header: str, size: int) -> tuple[int, int]:
    first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", header).groups()
    if int(first) >= size > 0:
        raise HubError(416, "Range Not Satisfiable")
    return int(first), min(int(last) + 1, size) if last else size


Auth = Annotated[str, Header()]
Range = Annotated[str, Header()]
OptionalRange = Annotated[str | None, Header()]

GRANTED = "x-granted"  # a header that the client has to send where the grant leads
HELD = 8  # files that are kept as a browser gets them
OWN_CAS = "/_sim/cas"  # for the simulator itself: no faults, and no place among the counted requests


def bridge_routes(cas: Cas) -> APIRouter:
    """Whole files by one request, as a browser gets them. The real one is another host, with signed URLs."""
    routes = APIRouter()
    lock = Lock()
    held = dict[str, bytes]()

    @routes.get("/cas-bridge/{xet_hash}")
    def bridge(xet_hash: str, request: Request, range: OptionalRange = None) -> Response:
        """In a thread: it asks this very server for the parts. Many followers want one file at a time."""
        with lock:
            if (content := held.get(xet_hash)) is None:
                content = held[xet_hash] = unpacked(request, cas, xet_hash)
            while len(held) > HELD:
                held.pop(next(iter(held)))
        return ranged(content, range, {})

    return routes


def cas_routes(cas: Cas, place: str) -> APIRouter:
    """Routes under `place`. The client works without the routes that are missing here."""
    routes = APIRouter(prefix=place)

    @routes.post("/v1/xorbs/default/{name}")
    async def put_xorb(name: str, request: Request, authorization: Auth = "") -> dict[str, bool]:
        _authorize(authorization, "xet-write")
        body = await request.body()
        cas.received += len(body)
        return {"was_inserted": cas.put_xorb(name, body)}

    @routes.post("/v1/xorb-grants/default/{name}", status_code=201)
    async def grant(name: str, asked: dict[str, Any], request: Request, authorization: Auth = "") -> Any:
        _authorize(authorization, "xet-write")
        if name in cas.xorbs:
            return JSONResponse({})
        cas.grants[grant_id := uuid4().hex] = asked["length"], b""
        url = f"{str(request.base_url).rstrip('/')}{place}/granted/{grant_id}"
        return {"id": grant_id, "method": "PUT", "url": url, "headers": {GRANTED: grant_id}}

    @routes.put("/granted/{grant_id}")
    async def put_granted(grant_id: str, request: Request) -> None:
        """Where a grant leads; on the real Hub another host, which knows only what it signed."""
        length, _ = cas.grants.get(grant_id, (-1, b""))
        body = await request.body()
        if "authorization" in request.headers or request.headers.get(GRANTED) != grant_id:
            raise HubError(403, "the headers are not those of the grant")
        if len(body) != length:
            raise HubError(400, "the body is not what the grant is for")
        cas.received += length
        cas.grants[grant_id] = length, body

    @routes.post("/v1/xorb-commits/default/{name}/grant/{grant_id}")
    async def commit(name: str, grant_id: str, authorization: Auth = "") -> dict[str, bool]:
        _authorize(authorization, "xet-write")
        _, body = cas.grants.pop(grant_id, (0, b""))
        if not body:
            raise HubError(404, "nothing was uploaded for this grant")
        return {"was_inserted": cas.put_xorb(name, body)}

    @routes.post("/v1/shards")
    async def put_shard(request: Request, authorization: Auth = "") -> dict[str, int]:
        _authorize(authorization, "xet-write")
        body = await request.body()
        cas.received += len(body)
        cas.put_shard(body)
        return {"result": 1}

    @routes.post("/v2/shards")
    async def put_shard_told(request: Request, authorization: Auth = "") -> Response:
        """As before, but the answer is a stream of what happens, whose last line is the result."""
        await put_shard(request, authorization)
        lines = '{"type":"validating","verified":1,"total":1}\n{"type":"result"}\n'
        return Response(lines, media_type="application/x-ndjson")

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
        xorbs = _xorb_spans(cas, terms, f"{str(request.base_url).rstrip('/')}{place}/data/")
        return {"offset_into_first_range": skip, "terms": described, "xorbs": xorbs}

    @routes.get("/data/{name}")
    async def data(name: str, range: Range = "bytes=0-") -> Response:
        return ranged((cas.root / name).read_bytes(), range, {})

    return routes


def _xorb_spans(cas: Cas, terms: list[Term], url: str) -> dict[str, Any]:
    """For each xorb one range that covers all its terms: more than needed at times, never less."""
    spans = {}
    for name, group in groupby(sorted(terms, key=lambda term: term.xorb), key=lambda term: term.xorb):
        parts = list(group)
        start = min(part.start for part in parts)
        end = max(part.end for part in parts)
        offsets = cas.xorbs[name]
        packed = {"start": offsets[start], "end": offsets[end] - 1}
        chunks = {"start": start, "end": end}
        spans[name] = [{"url": url + name, "ranges": [{"chunks": chunks, "bytes": packed}]}]
    return spans


def _authorize(authorization: str, *allowed: str) -> None:
    if authorization.removeprefix("Bearer ") not in allowed:
        raise HubError(401, "this needs the token that the Hub hands out for it")


HOUR = 3600  # seconds that a token lives, by what its answer says


def xet_token(request: Request, kind: str) -> JSONResponse:
    """The answer of .../xet-{kind}-token: hf_xet reads its body, the client its headers."""
    url = f"{request.base_url}cas"
    token = f"xet-{kind}"
    expiry = int(CLOCK.now().timestamp()) + HOUR
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expiry)}
    return JSONResponse({"casUrl": url, "accessToken": token, "exp": expiry}, headers=headers)


def xet_headers(request: Request, api_path: str, xet_hash: str, size: int) -> dict[str, str]:
    """Those of a file in the Xet storage; `api_path` is where the client gets a token for it."""
    link = f'<{request.base_url}{api_path}>; rel="xet-auth"'
    return {"X-Xet-Hash": xet_hash, "X-Linked-Size": str(size), "Link": link}


def ranged(content: bytes, header: str | None, headers: dict[str, str]) -> Response:
    """`content`, or the part of it that a Range header asks for."""
    headers = {**headers, "Accept-Ranges": "bytes"}
    if header is None:
        return Response(content, headers=headers, media_type="application/octet-stream")
    start, stop = parse_range(header, len(content))
    headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
    return Response(content[start:stop], 206, headers, media_type="application/octet-stream")


def unpacked(request: Request, cas: Cas, xet_hash: str) -> bytes:
    """A file of the Xet storage, which the simulator lets the client's own library put together."""
    with TemporaryDirectory() as folder:
        target = Path(folder) / "file"
        with hf_xet.XetSession().new_file_download_group(
            endpoint=f"{str(request.base_url).rstrip('/')}{OWN_CAS}",
            token="xet-read",
            token_expiry_unix_secs=1 << 40,
        ) as group:
            group.start_download_file(hf_xet.XetFileInfo(xet_hash, cas.size(xet_hash)), str(target))
        return target.read_bytes()
