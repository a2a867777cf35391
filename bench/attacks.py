"""What attackers cost a trainer: `python -m bench.attacks [replica|env] [--seconds 8] [--only NAME,...]`.

Starts the replica's real app, with an engine that answers after 20 ms, or the environment, as a process under
uvicorn. A trainer with the key asks again and again: alone, and while another process attacks, in one way
after the other. Prints for each attack the trainer's p95 as a multiple of the quiet one, by how much the
attacked process grew, and its open files. Compare only numbers of one run: all share the machine's cores.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from trainer.demo.processes import free_port

ROOT = Path(__file__).parents[1]
KEY = "planted-key-of-this-space"
KEYED = {"X-Space-Key": KEY}
ANSWER_S = 0.02  # how long the replica's engine takes for a completion
WARM = 200  # requests before anything is measured
CONNECTIONS = 4096  # held open by one address, if the server lets it
REOPENED = 256  # of attacks whose connections the server closes: each is opened again after a second
ADDED_S = 5.0
RATE = 100  # requests a second of a flood; with `_UNLIMITED`, as fast as the clients can
CLIENTS = 16
PATIENCE_S = 60.0
_JSON = "Content-Type: application/json\r\n"
_UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
_COMPLETION = {"model": "policy", "prompt": [1, 5, 9], "max_tokens": 4}


def _request(method: str, path: str, headers: str = "", body: bytes = b"") -> bytes:
    """A whole request; its connection stays open."""
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}{length}\r\n".encode("latin-1") + body


def _keyed(body: object) -> bytes:
    headers = f"{_JSON}X-Space-Key: {KEY}\r\n"
    return _request("POST", "/v1/completions", headers, json.dumps(body).encode())


# How a connection attacks: what it sends first, and what it adds every `ADDED_S`.
_Held = tuple[bytes, bytes]
_CLOSED = ("upgrades", "upgrades with a body", "upgrades with a long head", "endless heads")
_UNLIMITED = " without a pause"
_CHUNKED = f"{_JSON}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n"


def _held(post: str) -> dict[str, _Held]:
    return {
        "silent": (b"", b""),
        "slow heads": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"X-Slow: 1\r\n"),
        "slow bodies": (f"POST {post} HTTP/1.1\r\nHost: x\r\n{_CHUNKED}".encode(), b"1\r\n \r\n"),
        "upgrades": (_request("GET", "/", _UPGRADE), b""),
        "upgrades with a body": (_request("POST", post, _UPGRADE + _JSON, b"{}"), b"x" * 1000),
        "upgrades with a long head": (_request("GET", "/", f"{_UPGRADE}X: {'a' * 9000}\r\n"), b""),
        "endless heads": (b"GET / HTTP/1.1\r\n", b"X: " + b"x" * 8000 + b"\r\n"),
        "keep-alive": (_request("GET", "/health"), b""),
    }


def _floods(kind: str) -> dict[str, list[bytes]]:
    """Whole requests, sent by clients that each wait for an answer before they send the next."""
    if kind == "env":
        ids = [b"NaN", b'"\\ud800"', b"[" * 300 + b"]" * 300, b"9" * 4000]
        return {
            "pages": [_request("GET", path) for path in ("/", "/page/play.js", "/words", "/metrics")],
            "odd JSON-RPC": [
                _request("POST", "/mcp", _JSON, b'{"method":"x","id":' + each + b"}") for each in ids
            ],
            "games of the page": [_request("POST", "/play", _JSON, b'{"seed":1}')],
            "without the key": [_request("POST", "/sessions", _JSON, b"x" * 16000)],
        }
    event = "/gradio_api/run/predict"
    empty = b'{"model":"policy","messages":[' + b"{}," * 32_000 + b"{}]}"
    return {
        "pages": [_request("GET", "/")],
        "views": [_request("GET", f"/dashboard/{view}") for view in ("bucket", "delta?version=1", "explain")],
        "events": [_request("POST", event, _JSON, b'{"fn_index":1,"data":["x"],"session_hash":"x"}')],
        "nested JSON": [_request("POST", event, _JSON, b"[" * 16_000)],
        "without the key": [_request("POST", "/v1/completions", _JSON, b"x" * 98_000)],
        "empty messages, with the key": [
            _request("POST", "/v1/chat/completions", f"{_JSON}X-Space-Key: {KEY}\r\n", empty)
        ],
        "echo with logprobs, with the key": [
            _keyed(_COMPLETION | {"prompt": "x" * 20_000, "echo": True, "logprobs": 1})
        ],
    }


class _Attacker:
    """One address. Each attack ends after some seconds, and closes its connections."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.seconds = seconds
        self.opened = 0
        self.requests = 0

    async def hold(self, count: int, first: bytes, then: bytes) -> None:
        """Keep `count` connections open, and open another for each that the server closes."""
        self.count = count
        self._handshakes = asyncio.Semaphore(64)
        await self._until_the_end([self._hold(first, then) for _ in range(count)])

    async def _hold(self, first: bytes, then: bytes) -> None:
        while True:
            async with self._handshakes:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                self.opened += 1
                writer.write(first)
            if self.opened == self.count:
                print("open", flush=True)
            with contextlib.suppress(OSError):
                while not reader.at_eof():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ADDED_S):
                            await reader.read(1 << 16)
                    writer.write(then)
                    await writer.drain()
            writer.close()
            await asyncio.sleep(1.0)

    async def flood(self, pause_s: float, requests: list[bytes]) -> None:
        """`CLIENTS` send these requests, each with a pause between an answer and the next request."""
        print("open", flush=True)
        await self._until_the_end([self._flood(pause_s, requests[n % len(requests)]) for n in range(CLIENTS)])

    async def _flood(self, pause_s: float, request: bytes) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            self.opened += 1
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                while True:
                    await asyncio.sleep(pause_s)
                    writer.write(request)
                    self.requests += 1
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                    if not length:  # chunked, or none: start again
                        break
                    await reader.readexactly(int(length))
            writer.close()

    async def _until_the_end(self, work: list[Awaitable[None]]) -> None:
        tasks = [asyncio.ensure_future(self._try(each)) for each in work]
        await asyncio.sleep(self.seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _try(self, work: Awaitable[None]) -> None:
        with contextlib.suppress(OSError):
            await work


def attack(kind: str, port: int, seconds: float, name: str) -> None:
    """The attacking process: one attack, and then how many connections and requests it made."""
    attacker = _Attacker(port, seconds)
    held = _held("/gradio_api/run/predict" if kind == "replica" else "/mcp")
    if name in held:
        count = REOPENED if name in _CLOSED else CONNECTIONS
        asyncio.run(attacker.hold(count, *held[name]))
    else:
        flood, more, _ = name.partition(_UNLIMITED)
        asyncio.run(attacker.flood(0.0 if more else CLIENTS / RATE, _floods(kind)[flood]))
    print(json.dumps([attacker.opened, attacker.requests]))


def serve_replica(port: int, bucket: str, folder: str) -> None:
    """The replica's app and guard as a Space runs them, but with an engine in memory that answers `ANSWER_S`
    after each request."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    from inference_space import public_port
    from inference_space.settings import Settings
    from tests.support.fake_vllm import InMemoryVllm

    async def answer(request: Request, _: Exception) -> JSONResponse:
        await asyncio.sleep(ANSWER_S)
        return JSONResponse({"choices": [{"text": "x"}]})

    class InMemory(InMemoryVllm):
        app = Starlette(exception_handlers={404: answer})
        context = 2048

        def __init__(self, _: Settings) -> None:
            super().__init__()

        def attach(self, loop: asyncio.AbstractEventLoop) -> None:
            pass

    public_port.VllmServer = InMemory  # type: ignore[assignment,misc]
    settings = Settings(bucket=bucket, run="test", host="127.0.0.1", port=port, key=KEY, folder=folder)
    public_port.listen(public_port.create_app(settings), settings.host, settings.port)


class _Trainer:
    """Asks with the key, one request after the other."""

    def __init__(self, kind: str, url: str) -> None:
        self._kind = kind
        self._http = httpx.Client(base_url=url, headers=KEYED, timeout=PATIENCE_S, trust_env=False)

    def ask(self) -> float:
        began = time.perf_counter()
        if self._kind == "replica":
            self._http.post("/v1/completions", json=_COMPLETION).raise_for_status()
        else:
            game = self._http.post("/sessions", json={"seed": 1}).raise_for_status().json()["session"]
            self._http.post(f"/sessions/{game}/guess", json={"word": "crane", "turn": 1}).raise_for_status()
            self._http.delete(f"/sessions/{game}").raise_for_status()
        return time.perf_counter() - began

    def while_(self, going_on: Callable[[int], bool]) -> list[float]:
        took = list[float]()
        while going_on(len(took)):
            took.append(self.ask())
        return took


@contextlib.contextmanager
def _served(kind: str, folder: Path) -> Iterator[tuple[psutil.Popen, int]]:
    port = free_port()
    environ = os.environ | {"WORDLE_HOST": "127.0.0.1", "WORDLE_PORT": f"{port}", "WORDLE_KEY": KEY}
    command = ["-m", "env_space.app"]
    if kind == "replica":
        from tests.support.published_run import write_run

        write_run((folder / "bucket").as_uri(), folder / "base", 3)
        bucket = (folder / "bucket").as_uri()
        command = ["-m", "bench.attacks", "serve", f"{port}", bucket, f"{folder / 'replica'}"]
    with (folder / "log").open("w") as log:
        process = psutil.Popen([sys.executable, *command], cwd=ROOT, env=environ, stdout=log, stderr=log)
    try:
        ready = f"http://127.0.0.1:{port}/{'ready' if kind == 'replica' else 'health'}"
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(ready, trust_env=False).is_success:
                    break
            time.sleep(0.1)
        else:
            raise SystemExit((folder / "log").read_text()[-3000:])
        yield process, port
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def measure(kind: str, seconds: float, only: list[str]) -> list[dict[str, Any]]:
    """One row for each attack."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, _served(kind, Path(folder)) as (process, port):
        trainer = _Trainer(kind, f"http://127.0.0.1:{port}")
        trainer.while_(lambda done: done < WARM)
        names = [*_held("/"), *_floods(kind), f"pages{_UNLIMITED}"]
        for name in only or names:  # fills buffers and caches for good
            _attacked(kind, port, 4.0, name, trainer, process)
        for name in only or names:
            quiet = trainer.while_(lambda done: done < WARM)
            row = _attacked(kind, port, seconds, name, trainer, process)
            time.sleep(1.0)  # until the connections are closed
            quiet += trainer.while_(lambda done: done < WARM)
            rows.append(row | {"quiet_ms": _p95(quiet)})
            rows[-1]["times"] = round(rows[-1]["p95_ms"] / rows[-1]["quiet_ms"], 2)
            print(json.dumps(rows[-1]), flush=True)
        log = Path(folder, "log").stat().st_size
        print(f"{kind}: log of {log} bytes; {Path(folder, 'log').read_text().count('Traceback')} tracebacks")
    return rows


def _attacked(
    kind: str, port: int, seconds: float, name: str, trainer: _Trainer, process: psutil.Popen
) -> dict[str, Any]:
    before = process.memory_info().rss
    command = [sys.executable, "-m", "bench.attacks", "attack", kind, f"{port}", f"{seconds}", name]
    files = []

    def going_on(_: int) -> bool:
        if not _ % 20:
            files.append(process.num_fds())
        return attacker.poll() is None

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()  # until its connections are open
        used = sum(process.cpu_times()[:2])
        began = time.monotonic()
        under = trainer.while_(going_on)
        busy = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
        opened, requests = json.loads(attacker.stdout.read())
    return {
        "attack": name,
        "p95_ms": _p95(under),
        "answered": len(under),
        "opened": opened,
        "requests": requests,
        "files": max(files),
        "cpu": round(busy, 2),
        "grown_mb": round((process.memory_info().rss - before) / 1e6, 1),
    }


def _p95(seconds: list[float]) -> float:
    return round(1e3 * statistics.quantiles(seconds, n=20)[-1], 1)


def main() -> None:
    """Command line; `serve` and `attack` are the processes that a measurement starts."""
    match sys.argv[1:]:
        case ["serve", port, bucket, folder]:
            serve_replica(int(port), bucket, folder)
        case ["attack", kind, port, seconds, name]:
            attack(kind, int(port), float(seconds), name)
        case _:
            _report()


def _report() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attacks", description=__doc__)
    parser.add_argument("kind", choices=("replica", "env"))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", default="", help="attacks, with commas between them")
    given = parser.parse_args()
    rows = measure(given.kind, given.seconds, [name for name in given.only.split(",") if name])
    slow = [row["attack"] for row in rows if row["times"] > 2]
    total = sum(row["opened"] for row in rows)
    print(f"{total} connections; more than twice the quiet p95: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    main()
