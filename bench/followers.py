"""Followers without vLLM, in a process of their own: `python -m bench.followers COUNT RUN`.

A follower does what a worker of a replica does: it keeps live weights, fetches each delta, decodes it, finds
its places, computes the digest that will result, and writes. The process prints its port, and `GET /` says
for each follower when it had staged each version (unix seconds). It ends with its standard input.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import torch

from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.digest import to_hex
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import POLL_S, Manifest
from delta_weight_sync.vllm.worker import Ranks, commit
from delta_weight_sync.watch import Watcher
from tests.support.live_weights import live

_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Followers:
    """Where a process of followers answers."""

    port: int

    def staged(self, version: int) -> list[float]:
        """When each of them had staged `version`, once all have."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            said = httpx.get(f"http://127.0.0.1:{self.port}/").json()
            if all(str(version) in one for one in said):
                return [one[str(version)] for one in said]
            time.sleep(0.2)
        raise TimeoutError(f"not every follower had staged version {version} after {_PATIENCE_S:.0f} s")


@contextlib.contextmanager
def following(count: int, url: str, **environment: str) -> Iterator[Followers]:
    """So many followers of the run at `url`, with these environment variables."""
    command = [sys.executable, "-m", "bench.followers", str(count), url]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=os.environ | environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout
        try:
            yield Followers(int(process.stdout.readline()))
        finally:
            process.kill()


class Plain(torch.nn.Module):
    """A model whose parameters are laid out as its checkpoint's."""

    def __init__(self, state: dict[str, Bits]) -> None:
        super().__init__()
        self.named = {
            name: torch.nn.Parameter(torch.from_numpy(bits).view(torch.bfloat16))
            for name, bits in state.items()
        }
        for number, parameter in enumerate(self.named.values()):
            self.register_parameter(f"p{number}", parameter)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As vLLM's models."""
        for name, tensor in weights:
            self.named[name].copy_(tensor)


class Following(threading.Thread):
    """Does what a replica does until it has staged a version, and then commits it."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.reader = open_run(url)
        self.held = None
        self.watcher = Watcher(self.reader)
        self.staged = dict[int, float]()

    def run(self) -> None:
        """For ever."""
        with tempfile.TemporaryDirectory() as folder:
            while True:
                try:
                    self.watcher.check(lambda manifest: self._take(manifest, Path(folder)))
                except DeltaWeightSyncError as error:
                    print(error, file=sys.stderr)
                self.watcher.wait(POLL_S)

    def _take(self, manifest: Manifest, folder: Path) -> None:
        if self.held is None:
            state = self.reader.checkout(manifest, folder)
            self.live = live(Plain(state), {name: bits.shape for name, bits in state.items()})
            self.live.digest()
            self.held = manifest
            self.staged.setdefault(manifest.version, time.time())
            return
        _, deltas = self.reader.recipe(manifest, self.held.version)
        paths = [self.reader.fetch(delta, folder) for delta in deltas]
        ready = self.live.stage(paths, int(self.held.digest, 16))
        staged = time.time()
        assert to_hex(ready.digest) == manifest.digest
        self.staged.setdefault(manifest.version, staged)
        commit(ready.steps, Ranks(1))
        self.held = manifest
        for path in paths:
            path.unlink()


def main(count: int, url: str) -> None:
    """Follow until nobody wants to know any more."""
    followers = [Following(url) for _ in range(count)]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps([follower.staged for follower in followers]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    for place, follower in enumerate(followers):
        time.sleep(POLL_S / count if place else 0.0)  # nor do replicas look all at one moment
        follower.start()
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
