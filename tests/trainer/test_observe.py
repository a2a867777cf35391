"""Pokes reach every replica with the key; a slow or missing replica delays no other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trainer import observe
from trainer.observe import Pokes

KEY = "the-key-of-this-deployment"


class Replica:
    """Takes pokes; while `gate` is closed it does not answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.gate, self.came = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def take(self, path: str, key: str) -> None:
        self.asked.append((path, key))
        self.came.release()
        self.gate.wait(60.0)

    def is_poked(self) -> bool:
        return self.came.acquire(timeout=60.0)


@contextlib.contextmanager
def serving(replica: Replica) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            replica.take(self.path, self.headers["x-space-key"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        replica.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_KEY", KEY)


def test_every_replica_is_poked_though_one_is_gone_and_one_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "POKE_TIMEOUT_S", 60.0)
    well, slow = Replica(), Replica()
    slow.gate.clear()
    with serving(well) as url, serving(slow) as slow_url:
        monkeypatch.setenv("SPACES", f"{url} {slow_url}")
        sent = Pokes(["http://127.0.0.1:9", slow_url, url])
        for _ in range(3):
            sent.send()
            assert well.is_poked()
        assert well.asked == [("/delta_weight_sync/poke", KEY)] * 3
        assert slow.is_poked()
        assert len(slow.asked) == 1, "one at a time"
        slow.gate.set()
        assert slow.is_poked(), "and one more for all that came meanwhile"
        sent.close()
    assert len(slow.asked) == 2


def test_a_refusal_is_ignored() -> None:
    class Refusing(Replica):
        def take(self, path: str, key: str) -> None:
            super().take(path, key)
            raise ConnectionAbortedError  # hang up

    replica = Refusing()
    with serving(replica) as url:
        sent = Pokes([url])
        sent.send()
        assert replica.is_poked()
        sent.send()
        assert replica.is_poked()
        sent.close()
