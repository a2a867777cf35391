"""A dashboard that is mounted with controls, on loopback, and controls that remember what they were told."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import uvicorn
from fastapi import FastAPI

from delta_weight_sync.store import Bucket, open_bucket
from inference_space.dashboard.page import mount

KEY = "a-long-secret"
REFUSED = "#dws-owner-answer [role=alert]"  # on the page


class RecordedControls:
    """A replica's controls; the run has versions up to 9."""

    def __init__(self) -> None:
        self.paused, self.pinned, self.calls = False, None, list[str]()

    def pause(self) -> None:
        self.calls.append("pause")
        self.paused, self.pinned = True, None

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused, self.pinned = False, None

    def pin(self, version: int) -> None:
        if version > 9:
            raise ValueError(f"the run has no version {version}")
        self.calls.append(f"pin {version}")
        self.paused, self.pinned = False, SimpleNamespace(version=version)

    def heal(self) -> None:
        self.calls.append("heal")


def mounted(bucket: Bucket, app: FastAPI | None = None, **options) -> FastAPI:
    """A dashboard of `bucket` in an app; outside of a loop Gradio would make its own and leave them open."""

    async def make() -> FastAPI:
        return mount(app or FastAPI(), bucket, None, **options)

    return asyncio.run(make())


@contextmanager
def controlled(bucket: Bucket, told: RecordedControls, key: str = KEY) -> Iterator[str]:
    """The URL of a dashboard of `bucket` whose owner's tab speaks to `told`."""
    with served(lambda _: mount(FastAPI(), bucket, None, controls=told, key=key)) as url:
        yield f"{url}/"


@contextmanager
def dashboard(bucket: Bucket) -> Iterator[str]:
    """The URL of a dashboard of `bucket` that nobody controls."""
    with served(lambda _: mount(FastAPI(), bucket, None)) as url:
        yield f"{url}/"


@contextmanager
def served(make: Callable[[str], FastAPI]) -> Iterator[str]:
    started = threading.Event()
    servers: list[uvicorn.Server] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def serve() -> None:  # outside of a loop Gradio makes its own and leaves them open
            config = uvicorn.Config(make(url), log_level="error", timeout_graceful_shutdown=1)
            servers.append(uvicorn.Server(config))
            started.set()
            await servers[0].serve(sockets=[listening])

        thread = threading.Thread(target=asyncio.run, args=[serve()])
        thread.start()
        assert started.wait(60)
        try:
            while not servers[0].started:
                time.sleep(0.02)
            yield url
        finally:
            servers[0].should_exit = True
            thread.join()


def main() -> None:
    with controlled(open_bucket(sys.argv[1]), RecordedControls()) as url:
        print(url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
