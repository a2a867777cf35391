"""A hostile client of the environment: slow, many, endless, malformed and rude, all at the same time.

    python -m tests.env_space.attack http://127.0.0.1:8000 --key KEY --seconds 15

prints how often it tried what. With the key it also floods the routes that need it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from tests.env_space.test_api import MALFORMED

PAUSE_S = 0.2  # between two tries of one attacker, so that one process drives a thousand
JSON = b"Content-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: w\r\n\r\n"
WORDS = b"GET /words HTTP/1.1\r\nHost: w\r\n\r\n"
UPGRADE = b"GET /ws HTTP/1.1\r\nHost: w\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
CHUNKED = b"POST /play HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
NOVEL = "x" * 16_000
ENDLESS = 1 << 20
LOOKS = "/ words metrics health docs openapi.json page/play.js watch schema nowhere".split()  # noqa: SIM905


@dataclass
class Target:
    url: str
    key: str
    until: float  # on the monotonic clock


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
            async with asyncio.timeout(target.until - time.monotonic()):
                while await reader.read(4096) if reads else await asyncio.sleep(1, True):
                    """It still listens."""
    finally:
        writer.transport.abort()


async def post(target: Target, http: aiohttp.ClientSession, path: str, body: dict, headers=None) -> object:
    async with http.post(f"{target.url}{path}", json=body, headers=headers) as answer:
        return await answer.json()


async def silent(target, _):
    await raw(target)


async def drip(target, _):
    """Send a head byte by byte."""
    await raw(target, *(bytes([byte]) for byte in b"GET /health HTTP/1.1\r\nX: " + b"x" * 900), pause_s=0.1)


async def half(target, _):
    """Send a part of a body, to open routes and to those that need the key."""
    unknown = b"/play/00000000-0000-0000-0000-000000000000/guess"
    path = random.choice([b"/play", b"/mcp", b"/sessions", unknown])
    await raw(target, b"POST " + path + b" HTTP/1.1\r\nHost: w\r\n" + JSON + b"Content-Length: 99\r\n\r\n{")


async def endless(target, _):
    """Send a head or a body without end."""
    heads = [(b"GET / HTTP/1.1\r\nX: ", b"x"), (b"GET / HTTP/1.1\r\n", b"a: b\r\n"), (b"GET /", b"x")]
    bodies = [(CHUNKED, b"1\r\n \r\n"), (CHUNKED + b"0\r\nX: ", b"x"), (b"", HEALTH)]
    begun, more = random.choice(heads + bodies)
    await raw(target, begun, more * (ENDLESS // len(more)))


async def deaf(target, _):
    """Ask for much and read nothing."""
    await raw(target, WORDS * 8, reads=False)


async def malformed(target, _):
    body = random.choice(MALFORMED)[0]
    path = random.choice([b"/play", b"/mcp", b"/sessions", b"/%2e%2e/etc/passwd", b"*", b"/\xff"])
    sent = b"POST " + path + b" HTTP/1.1\r\n" + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body
    await raw(target, random.choice([sent, UPGRADE, random.randbytes(99), b"BREW / HTCPCP/1.0\r\n\r\n"]))


async def look(target, http):
    """Read everything that is open, and try a route that is not."""
    async with http.get(f"{target.url}/{random.choice(LOOKS).removeprefix('/')}") as answer:
        await answer.read()
    await post(target, http, "/sessions", {"seed": 1}, {"X-Space-Key": "guessed"})


async def play(target, http):
    """Take games of the page from forged addresses, and never end one."""
    forged = {"X-Forwarded-For": f"{random.randrange(256)}.1.1.{random.randrange(256)}"}
    game = (await post(target, http, "/play", {"seed": 1}, forged)).get("session")
    for _ in range(9):
        await post(target, http, f"/play/{game}/guess", {"word": NOVEL, "turn": 1})


async def keyed(target, http):
    """Play complete games of endless words with the key."""
    own = {"X-Space-Key": target.key}
    game = (await post(target, http, "/sessions", {"seed": 1}, own)).get("session")
    for turn in range(1, 7):
        await post(target, http, f"/sessions/{game}/guess", {"word": NOVEL, "turn": turn}, own)


AT_ONCE = {silent: 1100, drip: 50, half: 50, endless: 6, deaf: 20, malformed: 12, look: 24}
AT_ONCE |= {play: 12, keyed: 12}


async def run(target: Target) -> Counter[str]:
    """Run all attacks at the same time; returns how often each was tried."""
    tried: Counter[str] = Counter()

    async def repeat(attack) -> None:
        while time.monotonic() < target.until:
            with suppress(OSError, aiohttp.ClientError, TimeoutError, ValueError):
                tried[attack.__name__] += 1
                await attack(target, http)
            await asyncio.sleep(PAUSE_S)

    options = {"timeout": aiohttp.ClientTimeout(total=10), "connector": aiohttp.TCPConnector(limit=0)}
    async with aiohttp.ClientSession(**options) as http, asyncio.TaskGroup() as group:
        for attack, times in AT_ONCE.items():
            for _ in range(times):
                group.create_task(repeat(attack))
    return tried


def main() -> None:
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
