"""What the trainer sends to its Spaces: the key to all of them, a token that reads to those on the Hub."""

import asyncio
import contextlib
import contextvars
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import aiohttp
import pytest

from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket
from trainer import observer, rollouts, space_access
from trainer.cold_spaces import ColdSpaces, SpacesUnavailableError
from trainer.observer import ReplicaWatch
from trainer.rollouts import ReplicaRolloutLoop
from trainer.token_syncs import Conversation
from trainer.wordle import WordleEnv

KEY, TOKEN = "four-random-words-in-a-row", "hf_secret"


@pytest.fixture(autouse=True)
def secrets(monkeypatch):
    monkeypatch.setenv("SPACE_KEY", KEY)
    monkeypatch.setenv("SPACE_HF_TOKEN", TOKEN)


@contextlib.contextmanager
def server(status: int = 200, body: object = None, headers: dict[str, str] | None = None) -> Iterator[tuple]:
    """A Space that always gives the same answer; yields its URL and the headers of each request."""
    asked: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append({name.lower(): value for name, value in self.headers.items()})
            self.rfile.read(int(self.headers.get("content-length", 0)))
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json" if "{" in content.decode() else "text/html")
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET  # noqa: N815 - the names that http.server asks for

        def log_message(self, *_):
            """Say nothing."""

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}", asked
    finally:
        serving.shutdown()
        serving.server_close()


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("https://me-wordle-replica-1.hf.space", True),
        ("https://me-wordle-env.HF.Space/sessions", True),
        ("http://me-wordle-replica-1.hf.space", False),
        ("https://replica.example", False),
        ("http://127.0.0.1:8000", False),
        ("https://hf.space.evil.example", False),
        ("https://evilhf.space", False),
        ("https://me-wordle.hf.space:8443", False),
        ("http://[::1]:8000/", False),
    ],
)
def test_the_key_goes_to_all_that_is_named_and_the_token_to_spaces_of_the_hub(monkeypatch, url, token):
    monkeypatch.setenv("SPACES", f"http://127.0.0.1:1 {url.lower()} http://127.0.0.1:2")
    expected = {"X-Space-Key": KEY} | ({"Authorization": f"Bearer {TOKEN}"} if token else {})
    assert space_access.headers(url) == expected


def test_without_secrets_nothing_is_sent(monkeypatch):
    monkeypatch.setenv("SPACES", "https://me-wordle-replica-1.hf.space")
    monkeypatch.delenv("SPACE_KEY")
    monkeypatch.setenv("SPACE_HF_TOKEN", "")
    assert space_access.headers("https://me-wordle-replica-1.hf.space") == {}


def test_what_was_pasted_with_a_line_end_is_sent_without_it(monkeypatch):
    monkeypatch.setenv("SPACES", "http://127.0.0.1")
    monkeypatch.setenv("SPACE_KEY", f" {KEY}\n")
    assert space_access.headers("http://127.0.0.1") == {"X-Space-Key": KEY}


@pytest.mark.parametrize("key", ["two words", "schlüssel", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_told(monkeypatch, key):
    monkeypatch.setenv("SPACES", "http://127.0.0.1")
    monkeypatch.setenv("SPACE_KEY", key)
    with pytest.raises(ValueError, match="SPACE_KEY cannot be sent in a header") as refused:
        space_access.headers("http://127.0.0.1")
    assert key not in str(refused.value)


def test_every_request_to_a_space_carries_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(observer, "_POLL_S", 0.02)
    with server(body={"state": "serving"}) as (url, asked):
        monkeypatch.setenv("SPACES", url)
        ColdSpaces([url]).wait()
        log = RunLogWriter(open_bucket(tmp_path.as_uri(), create=True), "run")
        watch = ReplicaWatch([url], log)
        assert watch.wait_for(None, timeout_s=300.0), "it has asked, and understood no version"
        watch.close()
        log.close()
        post(url)
        env = WordleEnv(url)
        env.reset(seed=1)
        asyncio.run(env._open())
    assert len(asked) >= 5
    assert {request.get("x-space-key") for request in asked} == {KEY}
    assert not any("authorization" in request for request in asked)


def post(url: str) -> object:
    """One request of TRL's rollout loop."""

    async def ask() -> object:
        async with aiohttp.ClientSession() as session:
            loop = object.__new__(ReplicaRolloutLoop)
            loop.session, loop._writer_term = session, 1
            loop._model_version_value = SimpleNamespace(inherited=0)
            rollouts._conversation.set(Conversation())
            return await loop._ask(f"{url}/v1/completions", {}, 10.0)

    return contextvars.copy_context().run(asyncio.run, ask())


def test_no_redirect_takes_the_key_along(monkeypatch):
    with server() as (elsewhere, asked_there):
        moved = {"location": f"{elsewhere}/v1/completions"}
        with server(status=307, headers=moved) as (url, asked_here):
            monkeypatch.setenv("SPACES", url)
            with pytest.raises(aiohttp.ClientResponseError, match="307"):
                post(url)
            env = WordleEnv(url)
            env.reset(seed=1)
            with pytest.raises(ValueError, match="answered 307"):
                asyncio.run(env.get_reward())
            with pytest.raises(SpacesUnavailableError, match="answers 307"):
                ColdSpaces([url]).knock()
    assert [request["x-space-key"] for request in asked_here] == [KEY] * 3
    assert asked_there == []


def test_a_refused_key_is_quoted_and_not_told(monkeypatch):
    refusal = {"error": {"message": "this key is not that of this Space"}}
    with server(status=401, body=refusal) as (url, _):
        monkeypatch.setenv("SPACES", url)
        with pytest.raises(aiohttp.ClientResponseError) as refused:
            post(url)
    assert "this key is not that of this Space" in str(refused.value)
    assert KEY not in f"{refused.value!s}{refused.value!r}"


def test_what_is_not_a_wordle_space_is_named_so():
    """As a private Space answers whoever may not read it."""
    with server(status=404, body="<html>Sorry, we can't find the page</html>") as (url, _):
        env = WordleEnv(url)
        env.reset(seed=1)
        with pytest.raises(ValueError, match=r"not the Wordle Space: check --env_url, and .* SPACE_HF_TOKEN"):
            asyncio.run(env.get_reward())
