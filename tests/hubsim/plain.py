"""File content over plain http, for clients that do not ask the Xet storage."""

from pathlib import Path
from tempfile import TemporaryDirectory

import hf_xet
from fastapi import Request, Response

from .cas import Cas, parse_range


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
            endpoint=f"{request.base_url}cas", token="xet-read", token_expiry_unix_secs=1 << 40
        ) as group:
            group.start_download_file(hf_xet.XetFileInfo(xet_hash, cas.size(xet_hash)), str(target))
        return target.read_bytes()
