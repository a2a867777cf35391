"""What the Hub hands out so that a client can talk to the Xet storage."""

from fastapi import Request
from fastapi.responses import JSONResponse

from .clock import CLOCK

HOUR = 3600  # seconds that a token lives, by what its answer says


def xet_token(request: Request, kind: str) -> JSONResponse:
    """The answer of .../xet-{kind}-token: hf_xet reads its body, the client its headers."""
    url, token, expiry = f"{request.base_url}cas", f"xet-{kind}", int(CLOCK.now().timestamp()) + HOUR
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expiry)}
    return JSONResponse({"casUrl": url, "accessToken": token, "exp": expiry}, headers=headers)


def xet_headers(request: Request, api_path: str, xet_hash: str, size: int) -> dict[str, str]:
    """Those of a file in the Xet storage; `api_path` is where the client gets a token for it."""
    link = f'<{request.base_url}{api_path}>; rel="xet-auth"'
    return {"X-Xet-Hash": xet_hash, "X-Linked-Size": str(size), "Link": link}
