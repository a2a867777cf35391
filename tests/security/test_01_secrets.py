"""What a trainer sends to whom: its own Spaces get their key and a token that reads, everybody else nothing.

Two hosts below .hf.space answer here over TLS, one the trainer's own and one a stranger's, who may also be
anybody whose name is one letter away. Only the resolving of names is not real.
"""

import asyncio
import ipaddress
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket
from tests.trainer.test_space_access import post
from trainer import observer, space_access
from trainer.cold_spaces import ColdSpaces, SpacesUnavailableError
from trainer.observer import ReplicaWatch
from trainer.pokes import Pokes
from trainer.wordle import WordleEnv

KEY, READ, WRITE = "the-key-of-my-own-spaces", "hf_reads", "hf_writes"
OWN, STRANGER = "me-wordle-replica-1.hf.space", "stranger-wordle-env.hf.space"
SECRETS = (KEY, READ, WRITE)
ANSWERS = {"/ready": {"state": "serving"}, "/health": {"status": "healthy"}}
Requests = dict[str, list[dict[str, str]]]  # of each host: the headers of what it was asked


def certificate(folder: Path) -> Path:
    """A certificate for *.hf.space of nobody, with its key."""
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "t")]),
    )
    hosts = x509.SubjectAlternativeName([x509.DNSName("*.hf.space")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(datetime.now(UTC) - timedelta(days=1))
    made = made.not_valid_after(datetime.now(UTC) + timedelta(days=1)).add_extension(hosts, critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    file = folder / "hf.space.pem"
    secret = key.private_bytes(pem, form, serialization.NoEncryption())
    file.write_bytes(secret + made.sign(key, hashes.SHA256()).public_bytes(pem))
    return file


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """Both hosts answer; yields what they were asked."""
    found: Requests = {OWN: [], STRANGER: []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found[self.headers["host"]].append({name.lower(): value for name, value in self.headers.items()})
            self.rfile.read(int(self.headers.get("content-length", 0)))
            content = json.dumps(ANSWERS.get(self.path, {})).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET  # noqa: N815 - the names that http.server asks for

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    file = certificate(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(file))  # which httpx reads for each client, and aiohttp never
    trusting = ssl.create_default_context(cafile=file)
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting)
    _resolve(monkeypatch, server.server_port)
    yield found
    server.shutdown()
    server.server_close()


def _resolve(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Both names, and no others."""
    real = socket.getaddrinfo

    def fake(host: str | bytes, service: object, *rest: object, **more: object):
        name = host.decode() if isinstance(host, bytes) else host
        if name in (OWN, STRANGER):
            return real("127.0.0.1", port, *rest, **more)
        assert ipaddress.ip_address(name).is_loopback, f"nothing here is to be sent to {name}"
        return real(host, service, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", fake)


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever owns a deployment has them."""
    for name, value in {"SPACE_KEY": KEY, "SPACE_HF_TOKEN": READ, "HF_TOKEN": WRITE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPACES", f"https://{OWN} https://me-wordle-env.hf.space")
    monkeypatch.setattr(observer, "_POLL_S", 0.02)


def everything(folder: Path, replica: str, env: str) -> None:
    """One of each kind of request that a trainer sends."""
    ColdSpaces([replica], env).knock()
    log = RunLogWriter(open_bucket(folder.as_uri(), create=True), "run")
    watch, pokes = ReplicaWatch([replica], log), Pokes([replica])
    pokes.send()
    assert watch.wait_for(None, timeout_s=300.0), "it has asked, and understood no version"
    watch.close()
    pokes.close()
    log.close()
    post(replica)
    game = WordleEnv(env)
    game.reset(seed=1)
    asyncio.run(game._open())


def carried(requests: list[dict[str, str]]) -> set[tuple[str | None, str | None]]:
    """Key and token."""
    return {(request.get("x-space-key"), request.get("authorization")) for request in requests}


def test_a_strangers_environment_gets_no_key_and_no_token(asked, tmp_path):
    everything(tmp_path / "bucket", f"https://{OWN}", f"https://{STRANGER}")
    assert len(asked[STRANGER]) >= 3
    assert carried(asked[STRANGER]) == {(None, None)}
    assert not [secret for secret in SECRETS if secret in str(asked[STRANGER])]
    assert len(asked[OWN]) >= 4
    assert carried(asked[OWN]) == {(KEY, f"Bearer {READ}")}, "the token that writes leaves for the Hub only"


def test_a_replica_whose_name_was_mistyped_gets_no_key_and_no_token(asked, tmp_path):
    everything(tmp_path / "bucket", f"https://{STRANGER}", f"https://{OWN}")
    assert carried(asked[STRANGER]) == {(None, None)}
    assert carried(asked[OWN]) == {(KEY, f"Bearer {READ}")}


def test_a_strangers_environment_may_have_a_key_of_its_own(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("ENV_KEY", "the-key-that-the-stranger-gave-me")
    everything(tmp_path / "bucket", f"https://{OWN}", f"https://{STRANGER}")
    assert carried(asked[STRANGER]) == {("the-key-that-the-stranger-gave-me", None)}
    assert carried(asked[OWN]) == {(KEY, f"Bearer {READ}")}


@pytest.mark.parametrize(
    "url",
    [
        "https://me-wordle-replica-2.hf.space",  # mine, perhaps, and not named
        "https://me-wordle-replica-1.hf.space.evil.example",
        "https://me-wordle-replica-1.hf.space:8443",
        "http://me-wordle-replica-1.hf.space",
        "https://me-wordle-replica-1.hf.space.",
        "https://me-wordle-replica-1.hf.space@evil.example",
        "https://evil.example/https://me-wordle-replica-1.hf.space",
        "https://evil.example\\@me-wordle-replica-1.hf.space",
        "https://me-wordle-replica-1.hf.space\\@evil.example",
        "https://me-wordle-replica-1.hf.space#@evil.example",
        "https://me-wordle-replica-1.hf.space?@evil.example",
        " https://me-wordle-replica-1.hf.space",
        "https://me-wordle-replica-1.hf.spac\u212a",
        "",
    ],
)
def test_an_address_that_is_only_like_ones_own_gets_nothing(url):
    assert space_access.headers(url) == space_access.env_headers(url) == {}


def test_without_a_list_of_own_spaces_nothing_is_sent(monkeypatch):
    monkeypatch.delenv("SPACES")
    assert space_access.headers(f"https://{OWN}") == {}


def test_one_token_for_everything_is_refused(monkeypatch):
    monkeypatch.setenv("SPACE_HF_TOKEN", WRITE)
    with pytest.raises(
        SpacesUnavailableError, match=r"^SPACE_HF_TOKEN is HF_TOKEN, which may write"
    ) as refused:
        ColdSpaces([f"https://{OWN}"]).knock()
    assert WRITE not in str(refused.value)


def test_a_process_of_its_own_sends_the_same():
    """As the rollout worker's: all that it is told is in the environment."""
    told = f"from trainer import space_access as s; print(s.headers('https://{OWN}'), s.headers('https://{STRANGER}'))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{space_access.headers(f'https://{OWN}')} {{}}"
