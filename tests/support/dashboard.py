"""A dashboard that is mounted with controls, on loopback, and controls that remember what they were told."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from fastapi import FastAPI

from delta_weight_sync.store import Bucket, open_bucket
from inference_space.dashboard.page import mount
from tests.support.serving import serving

KEY = "a-long-secret"
REFUSED = "#dws-owner-answer [role=alert]"  # on the page


class RecordedControls:
    """A replica's controls; the run has versions up to 9."""

    def __init__(self) -> None:
        self.paused = False
        self.pinned = None
        self.calls = list[str]()

    def pause(self) -> None:
        self.calls.append("pause")
        self.paused = True
        self.pinned = None

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False
        self.pinned = None

    def pin(self, version: int) -> None:
        if version > 9:
            raise ValueError(f"the run has no version {version}")
        self.calls.append(f"pin {version}")
        self.paused = False
        self.pinned = SimpleNamespace(version=version)

    def heal(self) -> None:
        self.calls.append("heal")


def mounted(bucket: Bucket, app: FastAPI | None = None, **options) -> FastAPI:
    """A dashboard of `bucket` in an app; outside of a loop Gradio would make its own and leave them open."""

    async def make() -> FastAPI:
        return mount(app or FastAPI(), bucket, None, **options)

    return asyncio.run(make())


@contextmanager
def dashboard(bucket: Bucket, told: RecordedControls | None = None, key: str = KEY) -> Iterator[str]:
    """The URL of a dashboard of `bucket`; its owner's tab, if it has one, speaks to `told`."""

    def make() -> FastAPI:
        return mount(FastAPI(), bucket, None, controls=told, key=key)

    with serving(make, factory=True, timeout_graceful_shutdown=1) as url:
        yield f"{url}/"


def main() -> None:
    with dashboard(open_bucket(sys.argv[1]), RecordedControls()) as url:
        print(url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
