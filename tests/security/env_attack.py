"""A hostile client of the environment: slow, many, endless, malformed and rude, all at once and for so long.

    python -m tests.security.env_attack http://127.0.0.1:8000 --key KEY --seconds 15

prints how often it tried what. With the key it also floods what only players may do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from tests.env.test_env_refusals import MALFORMED

PAUSE_S = 0.2  # before one of them tries again, so that one process drives a thousand
JSON = b"Content-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: w\r\n\r\n"
WORDS = b"GET /words HTTP/1.1\r\nHost: w\r\n\r\n"
UPGRADE = b"GET /ws HTTP/1.1\r\nHost: w\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
NOVEL = "x" * 16_000
ENDLESS = 1 << 20
LOOKS = (
    "",
    "words",
    "metrics",
    "health",
    "docs",
    "openapi.json",
    "page/play.js",
    "watch",
    "schema",
    "nowhere",
)


@dataclass
class Target:
    """Where to, with which key, and until when."""

    url: str
    key: str
    until: float

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.until


Attack = Callable[[Target, aiohttp.ClientSession], Awaitable[None]]


async def raw(target: Target, *parts: bytes, pause_s: float = 0, reads: bool = True) -> None:
    """Send these bytes, and stay until the service hangs up or the time is up."""
    host, port = target.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + target.until - time.monotonic()
            ):
                while await reader.read(4096) if reads else await asyncio.sleep(1, True):
                    """It still listens."""
    finally:
        writer.transport.abort()


async def silent(target: Target, _: aiohttp.ClientSession) -> None:
    """Say nothing."""
    await raw(target)


async def drip(target: Target, _: aiohttp.ClientSession) -> None:
    """Send a head byte by byte."""
    await raw(target, *(bytes([byte]) for byte in b"GET /health HTTP/1.1\r\nX: " + b"x" * 900), pause_s=0.1)


async def half(target: Target, _: aiohttp.ClientSession) -> None:
    """Send a part of a body, to what is open and to what wants the key."""
    path = random.choice(
        [b"/play", b"/mcp", b"/sessions", b"/play/00000000-0000-0000-0000-000000000000/guess"]
    )
    await raw(target, b"POST " + path + b" HTTP/1.1\r\nHost: w\r\n" + JSON + b"Content-Length: 99\r\n\r\n{")


async def endless(target: Target, _: aiohttp.ClientSession) -> None:
    """Send a head or a body without end."""
    chunked = b"POST /play HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    begun, more = random.choice(
        [
            (b"GET / HTTP/1.1\r\nX: ", b"x"),
            (b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
            (b"GET /", b"x"),
            (chunked, b"1\r\n \r\n"),
            (chunked + b"0\r\nX: ", b"x"),
            (b"", HEALTH),
        ]
    )
    await raw(target, begun, more * (ENDLESS // len(more)))


async def deaf(target: Target, _: aiohttp.ClientSession) -> None:
    """Ask for much and read nothing."""
    await raw(target, WORDS * 8, reads=False)


async def malformed(target: Target, _: aiohttp.ClientSession) -> None:
    """Send what no client sends."""
    body = random.choice(MALFORMED)[0]
    path = random.choice([b"/play", b"/mcp", b"/sessions", b"/%2e%2e/etc/passwd", b"*", b"/\xff"])
    sent = b"POST " + path + b" HTTP/1.1\r\n" + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body
    await raw(target, random.choice([sent, UPGRADE, random.randbytes(99), b"BREW / HTCPCP/1.0\r\n\r\n"]))


async def look(target: Target, http: aiohttp.ClientSession) -> None:
    """Look at everything that is open, and try what is not."""
    async with http.get(f"{target.url}/{random.choice(LOOKS)}") as answer:
        await answer.read()
    async with http.post(
        f"{target.url}/sessions", json={"seed": 1}, headers={"X-Space-Key": "guessed"}
    ) as no:
        await no.read()


async def play(target: Target, http: aiohttp.ClientSession) -> None:
    """Take games of the page from ever other addresses, as far as one may forge them, and never end one."""
    forged = {"X-Forwarded-For": f"{random.randrange(256)}.1.1.{random.randrange(256)}"}
    async with http.post(f"{target.url}/play", json={"seed": 1}, headers=forged) as answer:
        game = (await answer.json()).get("session")
    for _ in range(9):
        async with http.post(f"{target.url}/play/{game}/guess", json={"word": NOVEL, "turn": 1}) as answer:
            await answer.read()


async def keyed(target: Target, http: aiohttp.ClientSession) -> None:
    """Play whole games of novels with the key."""
    own = {"X-Space-Key": target.key}
    async with http.post(f"{target.url}/sessions", json={"seed": 1}, headers=own) as answer:
        game = f"{target.url}/sessions/{(await answer.json()).get('session')}"
    for turn in range(1, 7):
        async with http.post(f"{game}/guess", json={"word": NOVEL, "turn": turn}, headers=own) as answer:
            await answer.read()


AT_ONCE: dict[Attack, int] = {
    silent: 1100,
    drip: 50,
    half: 50,
    endless: 6,
    deaf: 20,
    malformed: 12,
    look: 24,
    play: 12,
    keyed: 12,
}


async def repeat(attack: Attack, target: Target, http: aiohttp.ClientSession, tried: Counter[str]) -> None:
    """Attack until the time is up; what the service does about it is its business."""
    while not target.over:
        with suppress(OSError, aiohttp.ClientError, TimeoutError, ValueError):
            tried[attack.__name__] += 1
            await attack(target, http)
        await asyncio.sleep(PAUSE_S)


async def run(target: Target) -> Counter[str]:
    """All attacks at once; how often each was tried."""
    tried: Counter[str] = Counter()
    patience = aiohttp.ClientTimeout(total=10)
    async with (
        aiohttp.ClientSession(timeout=patience, connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as group,
    ):
        for attack, times in AT_ONCE.items():
            for _ in range(times):
                group.create_task(repeat(attack, target, http, tried))
    return tried


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Attack an environment of your own.")
    parser.add_argument("url")
    parser.add_argument("--key", default="")
    parser.add_argument("--seconds", type=float, default=15)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    target = Target(given.url, given.key, time.monotonic() + given.seconds)
    print(json.dumps(asyncio.run(run(target))))


if __name__ == "__main__":
    main()
