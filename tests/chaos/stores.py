"""The stores that scenes play on: a folder, the simulated Hub, and a simulated S3."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.actor import PATIENCE_S
from tests.support.hubsim import HubSim
from trainer.demo.processes import free_port

_QUICK = {"HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms"}  # production waits for seconds


@dataclass(frozen=True)
class Store:
    """Where a bucket is, and what its clients need in their environment."""

    url: str
    environ: Mapping[str, str] = field(default_factory=dict)
    hub: HubSim | None = None


@contextlib.contextmanager
def folder(place: Path) -> Iterator[Store]:
    yield Store((place / "bucket").as_uri())


@contextlib.contextmanager
def hub(place: Path) -> Iterator[Store]:
    (place / "hub").mkdir()
    with HubSim(place / "hub") as sim:
        yield Store("hf://buckets/team/chaos/runs", sim.env(place / "home") | _QUICK, sim)


@contextlib.contextmanager
def s3(place: Path) -> Iterator[Store]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        _until_it_listens(port)
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}
        yield Store(f"s3://chaos/{place.name}", keys | endpoint)
    finally:
        server.kill()
        server.wait()


def _until_it_listens(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline, "the simulated S3 does not listen"
        time.sleep(0.1)


STORES = {"file": folder, "hub": hub, "s3": s3}
