"""One hostile client on loopback attacks a replica in many ways at the same time.

    python -m tests.inference_space.attack PORT KEY SECONDS

prints how often each attack got each answer. `bench.attacks` measures each kind alone.
"""

import asyncio
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx

PATIENCE_S = 5.0
HOST = "127.0.0.1"
EVENT = "/gradio_api/run/predict"
COMPLETIONS = "/v1/completions"
PLAIN = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4}
# What a stolen key might be used for: bodies that cost vLLM minutes, gigabytes or megabytes of log.
BODIES = [
    PLAIN | {"structured_outputs": {"choice": [f"choice {number}" for number in range(200_000)]}},
    PLAIN | {"prompt": "x" * 7_200_000, "truncate_prompt_tokens": 8},
    PLAIN | {"stop": [f"{number}" for number in range(300_000)]},
    PLAIN | {"n": 1_000_000},
    PLAIN | {"prompt": [[1]] * 10_000},
    PLAIN | {"structured_outputs": {"regex": "(((a{99}){99}){99}){99}"}, "truncate_prompt_tokens": 1},
    PLAIN | {"best_of": 1000, "use_beam_search": True},
]
# Shapes that vLLM's own models would check value by value, and prompts whose logprobs take gigabytes.
CHATS = [
    {"model": "policy", "messages": [{}] * 100_000},
    {"model": "policy", "messages": [{"role": "user", "content": [1] * 100_000}]},
    {"model": "policy", "messages": [{"role": "user", "tool_calls": [{}] * 100_000}]},
    {"model": "policy", "messages": [{"role": "user", "content": "a", "name": "b" * 100_000}]},
]
BODIES += [PLAIN | {"prompt": "x" * 100_000, "echo": True, "logprobs": 20}]
UPGRADES = [
    "GET / HTTP/1.1\r\n{}\r\n",
    "GET / HTTP/1.1\r\n{}Content-Length: 5\r\n\r\n",
    "GET / HTTP/1.1\r\n{}Transfer-Encoding: chunked\r\n\r\n",
    "POST /gradio_api/run/predict HTTP/1.1\r\n{}Content-Length: 2\r\n\r\n",
    "GET / HTTP/1.0\r\n{}\r\n",
]
NO_EVENTS: list[dict] = [{"data": [1] * 4000}]
NO_EVENTS += [{"fn_index": 9999, "data": []}, {"fn_index": 0, "data": [{"path": "/etc"}]}]

Kind = Callable[[], Awaitable[object]]


class Attack:
    """One client with many connections."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self.answers: Counter[str] = Counter()
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=PATIENCE_S, limits=limits)
        self._sessions = map("session{}".format, itertools.count())

    async def go_on(self, seconds: float) -> None:
        kinds = [(self.page, 0.01), (self.tick, 0.02), (self.no_event, 0.02), (self.view, 0.1)]
        kinds += [(self.big_head, 0.5), (self.no_key, 0.5), (self.body, 1.0), (self.hang_up, 1.0)]
        kinds += [(self.silence, 0.02), (self.half_a_head, 0.02), (self.half_a_body, 0.05)]
        kinds += [(self.open_page, 0.05), (self.upgrade, 0.02), (self.chat, 0.5)]
        async with self._http, asyncio.TaskGroup() as tasks:
            page = (await self._http.get("/", timeout=60.0)).text.replace("location.origin", "null")
            config = json.loads(re.search(r"window\.gradio_config = ({.*?});</script>", page)[1])
            # The event by which the page is kept up to date: the one with one input.
            self._live = next(event["id"] for event in config["dependencies"] if len(event["inputs"]) == 1)
            for kind, every in kinds:
                tasks.create_task(self._repeat(kind, every, seconds))

    async def _repeat(self, kind: Kind, every: float, seconds: float) -> None:
        """At most 64 of a kind run at the same time; those that never end are cancelled with the attack."""
        end = asyncio.get_running_loop().time() + seconds
        running = set()
        while asyncio.get_running_loop().time() < end:
            if len(running) < 64:
                running.add(asyncio.create_task(self._try(kind)))
            await asyncio.sleep(every)
            running = {task for task in running if not task.done()}
        for task in running:
            task.cancel()
            self.answers[f"{kind.__name__}: held to the end"] += 1
        await asyncio.gather(*running, return_exceptions=True)

    async def _try(self, kind: Kind) -> None:
        try:
            outcome = await kind()
        except (httpx.HTTPError, OSError, EOFError, TimeoutError) as error:
            outcome = type(error).__name__
        self.answers[f"{kind.__name__}: {outcome}"] += 1

    async def page(self) -> int:
        return (await self._http.get("/")).status_code

    async def tick(self) -> int:
        call = {"fn_index": self._live, "data": [None], "session_hash": next(self._sessions)}
        return (await self._http.post(EVENT, json=call)).status_code

    async def no_event(self) -> int:
        call = NO_EVENTS[self.answers.total() % len(NO_EVENTS)] | {"session_hash": "x"}
        return (await self._http.post(EVENT, json=call)).status_code

    async def view(self) -> int:
        paths = ("bucket", "verify?version=0", "delta?version=1", "object?key=runs/live/run.json", "explain")
        return (await self._http.get(f"/dashboard/{paths[self.answers.total() % len(paths)]}")).status_code

    async def big_head(self) -> str:
        return await self._say(b"GET / HTTP/1.1\r\n", b"X-Long: " + b"x" * 100_000 + b"\r\n", times=40)

    async def no_key(self) -> int:
        return (await self._http.post(COMPLETIONS, json=PLAIN | {"prompt": "x" * 7_000_000})).status_code

    async def body(self) -> int:
        asked = BODIES[self.answers.total() % len(BODIES)]
        keyed = {"X-Space-Key": self._key}
        return (await self._http.post(COMPLETIONS, json=asked, headers=keyed)).status_code

    async def chat(self) -> int:
        asked = CHATS[self.answers.total() % len(CHATS)]
        keyed = {"X-Space-Key": self._key}
        return (await self._http.post("/v1/chat/completions", json=asked, headers=keyed)).status_code

    async def upgrade(self) -> str:
        asked = "Host: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        head = UPGRADES[self.answers.total() % len(UPGRADES)].format(asked)
        return await self._say(head.encode(), b"", times=100)

    async def hang_up(self) -> str:
        """Ask for the longest possible answer, and disconnect."""
        body = json.dumps(PLAIN | {"n": 8, "max_tokens": 100_000, "ignore_eos": True}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nX-Space-Key: {self._key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self._say(head.encode() + body, b"", times=1)

    async def silence(self) -> str:
        return await self._say(b"", b"", times=100)

    async def half_a_head(self) -> str:
        return await self._say(b"GET / HTTP/1.1\r\nHost: x\r\n", b"X-Slow: 1\r\n", times=100)

    async def half_a_body(self) -> str:
        chunked = "Host: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
        paths = (f"POST {EVENT}", "GET /v1/models", "GET /dashboard/bucket")
        head = f"{paths[self.answers.total() % 3]} HTTP/1.1\r\n{chunked}"
        return await self._say(head.encode(), b"1\r\n \r\n", times=100)

    async def open_page(self) -> str:
        head = f"GET /gradio_api/heartbeat/{next(self._sessions)} HTTP/1.1\r\nHost: x\r\n\r\n"
        return await self._say(head.encode(), b"", times=100)

    async def _say(self, first: bytes, then: bytes, times: int) -> str:
        """Send `first`, then `then` each second, until an answer or the end of the connection."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(first)
            for _ in range(times):
                writer.write(then)
                await writer.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        line = await reader.readline()
                    return line[9:12].decode("latin-1") if line else "cut off"
            return "left"
        finally:
            writer.close()


def main() -> None:
    port, key, seconds = sys.argv[1:]
    attack = Attack(int(port), key)
    asyncio.run(attack.go_on(float(seconds)))
    print(json.dumps(dict(sorted(attack.answers.items()))))


if __name__ == "__main__":
    main()
