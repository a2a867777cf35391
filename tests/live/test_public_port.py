"""The public port: detours around the routes lead nowhere, and no secret leaves."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.inference_space.test_routes import DETOURS
from tests.live.conftest import TOKEN
from tests.live.replica import HEADERS as RIGHT
from tests.live.replica import KEY, Replica
from tests.support.waiting import soon

pytestmark = pytest.mark.live


def sent(replica: Replica, head: str) -> tuple[int, bytes]:
    """Status and the rest of the answer to a request whose head goes out exactly as it stands here."""
    with socket.create_connection(("127.0.0.1", replica.port), timeout=30) as link:
        link.sendall(head.replace("\n", "\r\n").encode("latin-1"))
        received = b"".join(iter(lambda: link.recv(1 << 16), b""))
    status = re.match(rb"HTTP/1.1 (\d+)", received)
    return int(status[1]) if status else 0, received


@pytest.mark.parametrize("target", [*DETOURS, "/pause#/v1/models", "http://evil.example/pause"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_detour_leads_anywhere(replica, method, target):
    fields = f"Host: replica\nX-Space-Key: {KEY}\nConnection: close\nContent-Length: 0\n\n"
    status, received = sent(replica, f"{method} {target} HTTP/1.1\n{fields}")
    assert status in (400, 404, 405), received[:200]
    assert b"root:" not in received


def test_it_is_no_proxy(replica):
    head = "CONNECT 127.0.0.1:22 HTTP/1.1\nHost: replica\nConnection: close\n\n"
    assert sent(replica, head)[0] in (400, 404, 405)


@pytest.mark.parametrize("path", ["/", "/v1/realtime", "/health", "/gradio_api/queue/join"])
def test_no_socket_is_upgraded(replica, path):
    upgrade = "Connection: Upgrade, close\nUpgrade: websocket\nSec-WebSocket-Version: 13\n"
    upgrade += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\n"
    status, _ = sent(replica, f"GET {path} HTTP/1.1\nHost: replica\nX-Space-Key: {KEY}\n{upgrade}\n")
    assert status in (400, 404)


def test_the_owners_events_need_the_key_and_with_it_are_obeyed(replica):
    """Every event of the page, sent as a visitor could: without the key none of them does anything."""

    def call(event: int, key: str | None) -> str:
        sent = {"fn_index": event, "session_hash": "visitor", "data": [key, "0"]}
        return httpx.post(f"{replica.url}/gradio_api/run/predict", json=sent, headers=RIGHT).text

    page = httpx.get(replica.url).text.replace("location.origin", "null")
    config = json.loads(re.search(r"window\.gradio_config = ({.*?});</script>", page)[1])
    events = config["dependencies"]
    assert len(events) >= 5
    refused = 0
    for event in events:
        for key in ("", "a-guess-that-is-wrong", None):
            answer = call(event["id"], key)
            refused += "Only the owner may do this" in answer
            assert "paused" not in answer
            assert "It stays at" not in answer
    assert refused == 4 * 3
    pause, resume, heal, pin = (event["id"] for event in events if len(event["inputs"]) == 2)
    joined = joins(replica)
    assert "It is <b>paused</b>" in call(pause, KEY)
    assert "It stays at <b>v0</b>" in call(pin, KEY)
    assert "follows the newest version" in call(resume, KEY)
    call(heal, KEY)
    soon(lambda: joins(replica) == joined + 1)


def joins(replica: Replica) -> int:
    """How often all weights were compared with a checkpoint."""
    return sum(commit["joined"] for commit in replica.status()["commits"])


def test_no_secret_can_be_seen(replica):
    """Logs, reports, pages, errors, command lines; and the engine is started without them."""
    texts = {str(path): path.read_bytes().decode("latin-1") for path in replica.folder.glob("*.*")}
    assert any(name.endswith("replica.log") for name in texts)
    for path in ("/", "/ready", "/status", "/v1/models", "/dashboard/bucket", "/pause"):
        texts[path] = httpx.get(f"{replica.url}{path}").text
    for given in ({}, {"X-Space-Key": KEY[:-1]}, RIGHT):
        texts[str(len(texts))] = httpx.post(f"{replica.url}/v1/completions", json={}, headers=given).text
    space, *children = family(replica)
    for process in (space, *children):
        texts[f"{process}"] = " ".join(process.cmdline())
    # Of the engine and its helper; vLLM's process title lies over the engine's own variables.
    variables = [json.dumps(child.environ()) for child in children]
    assert any("HF_HUB_OFFLINE" in text for text in variables)
    texts["the variables of the children"] = "".join(variables)
    assert [place for place, text in texts.items() if KEY in text or TOKEN in text] == []
    assert KEY in json.dumps(space.environ()), "it was planted"


def family(replica: Replica) -> list[psutil.Process]:
    space = psutil.Process(replica.pid)
    return [space, *space.children(recursive=True)]


def test_nothing_listens_but_the_public_port(replica):
    """But in the engine torch.distributed, on loopback, with a store of its own that holds no weights."""
    space, *engine = [
        {link.laddr for link in process.net_connections("inet") if link.status == psutil.CONN_LISTEN}
        for process in family(replica)
    ]
    assert {address.port for address in space} == {replica.port}
    assert {address.ip for addresses in engine for address in addresses} <= {"127.0.0.1"}


# Tries to connect to each socket named on its command line, as user nobody; prints those that let it.
CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid({0}); os.setuid({0})
for path in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print(path)
    except PermissionError:
        pass
"""


def test_no_other_user_reaches_vllms_engine(replica):
    """The server and the engine talk over sockets in /tmp, which any user can list."""
    links = [link for process in family(replica) for link in process.net_connections("unix")]
    paths = {link.laddr for link in links if link.laddr and Path(link.laddr).is_socket()}
    assert paths
    assert {oct(stat.S_IMODE(Path(path).stat().st_mode)) for path in paths} == {"0o700"}
    if os.geteuid() == 0:
        command = [sys.executable, "-c", CONNECT.format(65534), *paths]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_no_other_user_reads_what_a_replica_keeps(replica):
    kept = [path for path in replica.folder.rglob("*") if path.name != "replica.log"]  # that is the test's
    assert any(path.suffix == ".safetensors" for path in kept)
    assert [path for path in kept if path.stat().st_mode & 0o077] == []
