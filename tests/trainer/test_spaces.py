"""The credentials that a trainer sends to its Spaces: to its own only, and never where a redirect leads."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import httpx
import pytest

from delta_weight_sync.runlog import ReplicaReport, RunLogWriter
from delta_weight_sync.store import open_bucket
from tests.support.http_server import Request
from tests.support.http_server import answering as serving
from tests.support.records import WRITER, status
from tests.support.tls_hosts import OWN, STRANGER, Hosts, answering
from trainer import observe, spaces
from trainer.observe import ReplicaWatch
from trainer.rollouts import ReplicaRolloutLoop
from trainer.spaces import Fleet, Spaces, SpacesUnavailableError
from trainer.tasks.wordle import WordleEnv

KEY = "the-key-of-my-own-spaces"
READ = "hf_reads"
WRITE = "hf_writes"
SECRETS = (KEY, READ, WRITE)


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SPACE_KEY": KEY, "SPACE_HF_TOKEN": READ, "HF_TOKEN": WRITE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPACES", f"https://{OWN} https://me-wordle-env.hf.space")
    monkeypatch.setattr(observe, "_POLL_S", 0.02)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with answering(tmp_path, monkeypatch) as found:
        yield found


Sends = list[Callable[[], object]]


def every_request(folder: Path, replica: str, env: str, poked: Callable[[], object]) -> Sends:
    """One function for each kind of request that a trainer sends."""
    game = WordleEnv(env)
    game.reset(seed=1)
    return [
        Spaces(Fleet([replica])).wake,
        Spaces(Fleet([]), env).wake,
        lambda: watch(folder, replica),
        lambda: poke(replica, poked),
        lambda: post(replica),
        lambda: asyncio.run(game._call("POST", "/sessions", game._opening)),
    ]


def watch(folder: Path, replica: str, version: int | None = None) -> None:
    log = RunLogWriter(open_bucket(folder.as_uri(), create=True), "run", WRITER)
    asking = ReplicaWatch(Fleet([replica]), log)
    assert asking.wait_for(version, timeout_s=300.0), "it asks, and finds this version in the answer"
    asking.close()
    log.close()


def poke(replica: str, poked: Callable[[], object]) -> None:
    sender = observe.Pokes(Fleet([replica]))
    sender.send()
    assert poked()
    sender.close()


def post(url: str) -> object:
    """One request of the rollout loop."""

    async def ask() -> object:
        async with aiohttp.ClientSession() as session:
            loop = object.__new__(ReplicaRolloutLoop)
            loop.session = session
            loop._max_staleness = 4
            loop._syncs = SimpleNamespace(value=0)
            loop._config = {"request_timeout": 10.0}
            return await loop._request(f"{url}/v1/completions", {})

    return asyncio.run(ask())


def carried(requests: list[dict[str, str]]) -> set[tuple[str | None, str | None]]:
    """Key and token of each request."""
    return {(request.get("x-space-key"), request.get("authorization")) for request in requests}


@pytest.mark.finding(1)
@pytest.mark.parametrize(
    ("replica", "env", "env_key"),
    [(OWN, STRANGER, None), (STRANGER, OWN, None), (OWN, STRANGER, "the-key-that-the-stranger-gave-me")],
    ids=["a stranger's environment", "a mistyped replica", "an environment with a key of its own"],
)
def test_a_stranger_gets_no_key_and_no_token(hosts, tmp_path, monkeypatch, replica, env, env_key):
    if env_key:
        monkeypatch.setenv("ENV_KEY", env_key)
    urls = f"https://{replica}", f"https://{env}"
    for send in every_request(tmp_path / "bucket", *urls, lambda: hosts.poked.wait(60.0)):
        send()
    assert len(hosts.asked[replica]) >= 4
    assert len(hosts.asked[env]) >= 3
    assert carried(hosts.asked[STRANGER]) == {(env_key, None)}
    assert not [secret for secret in SECRETS if secret in str(hosts.asked[STRANGER])]
    assert carried(hosts.asked[OWN]) == {(KEY, f"Bearer {READ}")}, "only the Hub gets the token that writes"


@pytest.mark.finding("M13")
@pytest.mark.parametrize("answer", [b"[" * 60_000, b'{"state": ' + b"[" * 60_000])
def test_an_answer_that_cannot_be_parsed_is_not_the_apps(answer):
    with serving(lambda request: (200, {"content-type": "application/json"}, answer)) as url:
        with pytest.raises(SpacesUnavailableError, match="answers 200, so it is not the replica"):
            Spaces(Fleet([url])).wake()
        with pytest.raises(SpacesUnavailableError, match="answers 200, so it is not the env"):
            Spaces(Fleet([]), url).wake()
        with pytest.raises(aiohttp.ClientError, match="its answer is not JSON"):  # the next replica is asked
            post(url)


@pytest.mark.finding(1)
def test_no_redirect_is_followed(hosts, tmp_path):
    hosts.moved.add(OWN)
    url = f"https://{OWN}"
    errors = (SpacesUnavailableError, aiohttp.ClientError, ValueError)
    for send in every_request(tmp_path / "bucket", url, url, lambda: hosts.poked.wait(60.0)):
        with contextlib.suppress(*errors):
            send()
    assert len(hosts.asked[OWN]) >= 6
    assert carried(hosts.asked[OWN]) == {(KEY, f"Bearer {READ}")}
    assert hosts.asked[STRANGER] == []
    with pytest.raises(aiohttp.ClientResponseError, match="307"):
        post(url)


@pytest.mark.finding(1)
@pytest.mark.parametrize(
    "url",
    [
        "https://me-wordle-replica-2.hf.space",  # perhaps the owner's, but not in SPACES
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
def test_a_url_that_resembles_an_own_one_gets_nothing(url):
    assert spaces.headers(url) == spaces.headers(url, "env") == {}


@pytest.mark.finding(1)
def test_one_token_for_everything_is_refused(monkeypatch):
    monkeypatch.setenv("SPACE_HF_TOKEN", WRITE)
    with pytest.raises(SpacesUnavailableError, match=r"^SPACE_HF_TOKEN is HF_TOKEN, which may") as refused:
        Spaces(Fleet([f"https://{OWN}"])).wake()
    assert WRITE not in str(refused.value)


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
def test_all_own_servers_get_the_key_and_those_on_the_hub_the_token(monkeypatch, url, token):
    monkeypatch.setenv("SPACES", f"http://127.0.0.1:1 {url.lower()} http://127.0.0.1:2")
    expected = {"X-Space-Key": KEY} | ({"Authorization": f"Bearer {READ}"} if token else {})
    assert spaces.headers(url) == expected


def test_spaces_stay_the_owners_while_their_file_is_replaced(monkeypatch, tmp_path):
    own = tmp_path / "spaces.txt"
    monkeypatch.setenv("SPACES", f"{own}")
    with pytest.raises(ValueError, match="SPACES must have URLs or files with URLs"):
        spaces.headers("http://127.0.0.1")
    own.write_text("http://127.0.0.1/\n")
    assert spaces.expand([f"{own}"]) == ["http://127.0.0.1"], "paths are appended to it"
    assert spaces.headers("http://127.0.0.1") == {"X-Space-Key": KEY}
    for replaced in (lambda: own.write_text(""), own.unlink):
        replaced()
        assert spaces.headers("http://127.0.0.1") == {"X-Space-Key": KEY}


@pytest.mark.parametrize("key", ["two words", "schlüssel", "a\nb"])
def test_a_key_that_fits_no_header_is_refused_and_not_shown(monkeypatch, key):
    monkeypatch.setenv("SPACES", "http://127.0.0.1")
    monkeypatch.setenv("SPACE_KEY", f" {KEY}\n")
    assert spaces.headers("http://127.0.0.1") == {"X-Space-Key": KEY}, "without the line end"
    monkeypatch.setenv("SPACE_KEY", key)
    with pytest.raises(ValueError, match="SPACE_KEY cannot be sent in a header") as refused:
        spaces.headers("http://127.0.0.1")
    assert key not in str(refused.value)


def test_the_answer_to_a_refused_key_is_quoted_and_the_key_is_not_shown(monkeypatch):
    refusal = b'{"error": {"message": "this key is not that of this Space"}}'
    with serving(lambda _: (401, {"content-type": "application/json"}, refusal)) as url:
        monkeypatch.setenv("SPACES", url)
        with pytest.raises(aiohttp.ClientResponseError) as refused:
            post(url)
    assert "this key is not that of this Space" in str(refused.value)
    assert KEY not in f"{refused.value!s}{refused.value!r}"


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, r"not the Wordle Space: check --env_url; .* SPACE_HF_TOKEN"), (307, "answered 307")],
)
def test_a_server_that_is_no_space_is_reported(status, message):
    """A private Space answers 404 to a trainer that may not read it."""
    page = b"<html>Sorry, we can't find the page</html>"
    with serving(lambda _: (status, {"content-type": "text/html"}, page)) as url:
        env = WordleEnv(url)
        env.reset(seed=1)
        with pytest.raises(ValueError, match=message):
            asyncio.run(env.get_reward())
        with pytest.raises(SpacesUnavailableError, match=f"answers {status}, so it is not the replica"):
            Spaces(Fleet([url])).wake()


def test_a_vllm_with_the_plugin_is_refused_with_what_works_instead():
    report = ReplicaReport(status=status("r", 3), commits=()).model_dump_json().encode()

    def vllm(request: Request) -> tuple[int, dict[str, str], bytes]:
        if request.path == "/delta_weight_sync/status":
            return 200, {}, report
        return 404, {"content-type": "application/json"}, b'{"detail":"Not Found"}'

    sentence = "is a vLLM with the plugin.*start `python -m inference_space.app` .*BucketWeightTransfer"
    with serving(vllm) as url, pytest.raises(SpacesUnavailableError, match=sentence):
        Spaces(Fleet([url])).wake()


def test_a_job_s_url_without_a_listener_is_down_and_not_wrong(tmp_path):
    """The Hub's proxy answers for a Job that does not listen yet, or no longer."""
    job = "https://6eeac7c1e01344dea35f5632--7860.hf.jobs"
    assert all(spaces.is_ended_job(job, status) for status in (404, 410))
    assert not spaces.is_ended_job(job, 403)
    assert not spaces.is_ended_job(f"https://{OWN}", 404)
    answer = spaces._hub_answer(httpx.Response(404, json={"error": "Not Found"}), job, "replica")
    assert (answer.state, answer.up) == ("not up (404)", False)
    (tmp_path / "empty").touch()
    for entry in (str(tmp_path / "missing"), str(tmp_path / "empty")):
        with pytest.raises(SpacesUnavailableError, match="names no environment"):
            spaces.env_address(entry)
