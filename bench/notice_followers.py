"""Followers without vLLM, for `bench.notice` and `bench.hub`: `bench.notice_followers COUNT RUN [stage]`.

Prints its port. `POST /<n>/delta_weight_sync/poke` pokes the follower n, `GET /` says of each one when it
began to look, found and staged each version (unix seconds). With `stage` a follower also does what a worker
of a replica does: it keeps live weights, fetches each delta, decodes it, finds its places, computes the
digest that will result, and writes. It ends with its standard input.
"""

import functools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.digest import to_hex
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import POLL_S, Manifest
from delta_weight_sync.vllm.worker import Ranks, commit
from delta_weight_sync.watch import Watcher
from tests.support.live_weights import live


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
    """Does what a replica does until it knows a version, or has staged it."""

    def __init__(self, url: str, *, stages: bool) -> None:
        super().__init__(daemon=True)
        self.reader, self.stages, self.held = open_run(url), stages, None
        self.watcher, self.known = Watcher(self.reader), dict[int, tuple[float, float, float]]()

    def run(self) -> None:
        """For ever."""
        with tempfile.TemporaryDirectory() as folder:
            while True:
                began = time.time()
                try:
                    self.watcher.check(functools.partial(self._know, began, Path(folder)))
                except DeltaWeightSyncError as error:
                    print(error, file=sys.stderr)
                self.watcher.wait(POLL_S)

    def _know(self, began: float, folder: Path, manifest: Manifest) -> None:
        found = time.time()
        staged = self._take(manifest, folder) if self.stages else found
        self.known.setdefault(manifest.version, (began, found, staged))

    def _take(self, manifest: Manifest, folder: Path) -> float:
        if self.held is None:
            state = self.reader.checkout(manifest, folder)
            self.live = live(Plain(state), {name: bits.shape for name, bits in state.items()})
            self.live.digest()
            self.held = manifest
            return time.time()
        _, deltas = self.reader.recipe(manifest, self.held.version)
        paths = [self.reader.fetch(delta, folder) for delta in deltas]
        ready = self.live.stage(paths, int(self.held.digest, 16))
        staged = time.time()
        assert to_hex(ready.digest) == manifest.digest
        commit(ready.steps, Ranks(1))
        self.held = manifest
        for path in paths:
            path.unlink()
        return staged


def main(count: int, url: str, *options: str) -> None:
    """Follow until nobody wants to know any more."""
    followers = [Following(url, stages="stage" in options) for _ in range(count)]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # whoever pokes keeps its connection

        def do_POST(self) -> None:
            followers[int(self.path.split("/")[1])].watcher.poke()
            self._say(b"")

        def do_GET(self) -> None:
            self._say(json.dumps([follower.known for follower in followers]).encode())

        def _say(self, body: bytes) -> None:
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
    main(int(sys.argv[1]), *sys.argv[2:])
