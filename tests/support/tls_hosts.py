"""Two hosts below .hf.space that answer over TLS, one the trainer's own and one a stranger's.

Only the resolving of names, and who vouches for the certificate, is not real.
"""

import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from werkzeug.serving import make_ssl_devcert

from tests.support import http_server
from trainer import observe

OWN = "me-wordle-replica-1.hf.space"
STRANGER = "stranger-wordle-env.hf.space"
ANSWERS = {"/ready": {"state": "serving"}, "/health": {"status": "healthy"}}


@dataclass
class Hosts:
    """Of each host: the headers of what it was asked, and whether it sends everybody to the stranger's."""

    asked: dict[str, list[dict[str, str]]] = field(default_factory=lambda: {OWN: [], STRANGER: []})
    moved: set[str] = field(default_factory=set)
    poked: threading.Event = field(default_factory=threading.Event)

    def answer(self, request: http_server.Request) -> tuple[int, dict[str, str], bytes]:
        host = request.headers["host"]
        path = request.path
        self.asked[host].append(request.headers)
        if path == observe.POKE_PATH:
            self.poked.set()
        place = {"location": f"https://{STRANGER}{path}", "content-type": "application/json"}
        return 307 if host in self.moved else 200, place, json.dumps(ANSWERS.get(path, {})).encode()


@contextmanager
def answering(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Both hosts, found by their names; `folder` is for the certificate."""
    hosts = Hosts()
    (file, key) = make_ssl_devcert(str(folder / "tls"), host="hf.space")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file, key)
    with http_server.answering(hosts.answer, context) as url:
        monkeypatch.setenv("SSL_CERT_FILE", file)  # which httpx reads for each client, and aiohttp never
        trusting = ssl.create_default_context(cafile=file)
        monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting)
        _resolve(monkeypatch, int(url.rpartition(":")[2]))
        yield hosts


def _resolve(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    real = socket.getaddrinfo

    def fake(host: str | bytes, service: object, *rest: object, **more: object):
        name = host.decode() if isinstance(host, bytes) else host
        if name in (OWN, STRANGER):
            return real("127.0.0.1", port, *rest, **more)
        assert ipaddress.ip_address(name).is_loopback, f"nothing here is to be sent to {name}"
        return real(host, service, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", fake)
