"""Headers of the public port: what the apps get to see of a request's, and what answers tell browsers."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Message, Send

Headers = list[tuple[bytes, bytes]]
# All that an app behind the gate needs. Not the key, not a token; not the origin, which would make Gradio let
# any site read its answers; and nothing about the name by which a request came: it could say anything.
_PASSED_ON = frozenset(
    b"accept accept-encoding accept-language content-type cookie if-none-match user-agent".split()
)
_HOST = (b"host", b"replica")
FRAMED = "frame-ancestors https://huggingface.co"  # nobody but the Hub shows a Space inside of its own page
_ALWAYS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
]
_POLICY = (b"content-security-policy", f"default-src 'none'; {FRAMED}".encode())


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Those of a request that the apps get to see."""
    return [_HOST, *(pair for pair in headers if pair[0] in _PASSED_ON)]


def with_headers(send: Send) -> Send:
    """Sends an answer with what browsers must know; only a page brings a policy of its own."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), *_ALWAYS]
            own = any(name.lower() == _POLICY[0] for name, _ in headers)
            message = {**message, "headers": headers if own else [*headers, _POLICY]}
        await send(message)

    return sent
