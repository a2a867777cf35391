"""What a trainer sends to whom: its own Spaces get key and a token that reads, everybody else nothing."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from delta_weight_sync.runlog import RunLogWriter
from delta_weight_sync.store import open_bucket
from tests.security.tls_hosts import OWN, STRANGER, Hosts, answering
from tests.trainer.test_space_access import post
from trainer import observer, pokes, space_access
from trainer.cold_spaces import ColdSpaces, SpacesUnavailableError
from trainer.observer import ReplicaWatch
from trainer.wordle import WordleEnv

KEY, READ, WRITE = "the-key-of-my-own-spaces", "hf_reads", "hf_writes"
SECRETS = (KEY, READ, WRITE)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with answering(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever owns a deployment has them."""
    for name, value in {"SPACE_KEY": KEY, "SPACE_HF_TOKEN": READ, "HF_TOKEN": WRITE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPACES", f"https://{OWN} https://me-wordle-env.hf.space")
    monkeypatch.setattr(observer, "_POLL_S", 0.02)


def everything(hosts: Hosts, folder: Path, replica: str, env: str) -> None:
    """One of each kind of request that a trainer sends."""
    for send in every_kind(hosts, folder, replica, env):
        send()


def every_kind(hosts: Hosts, folder: Path, replica: str, env: str) -> list[Callable[[], object]]:
    game = WordleEnv(env)
    game.reset(seed=1)
    return [
        ColdSpaces([replica]).knock,
        ColdSpaces([], env).knock,
        lambda: watch(folder, replica),
        lambda: poke(hosts, replica),
        lambda: post(replica),
        lambda: asyncio.run(game._open()),
    ]


def watch(folder: Path, replica: str) -> None:
    log = RunLogWriter(open_bucket(folder.as_uri(), create=True), "run")
    asking = ReplicaWatch([replica], log)
    assert asking.wait_for(None, timeout_s=300.0), "it has asked, and understood no version"
    asking.close()
    log.close()


def poke(hosts: Hosts, replica: str) -> None:
    sender = pokes.Pokes([replica])
    sender.send()
    assert hosts.poked.wait(60.0)
    sender.close()


def carried(requests: list[dict[str, str]]) -> set[tuple[str | None, str | None]]:
    """Key and token."""
    return {(request.get("x-space-key"), request.get("authorization")) for request in requests}


def test_a_strangers_environment_gets_no_key_and_no_token(hosts, tmp_path):
    everything(hosts, tmp_path / "bucket", f"https://{OWN}", f"https://{STRANGER}")
    assert len(hosts.asked[STRANGER]) >= 3
    assert carried(hosts.asked[STRANGER]) == {(None, None)}
    assert not [secret for secret in SECRETS if secret in str(hosts.asked[STRANGER])]
    assert len(hosts.asked[OWN]) >= 4
    assert carried(hosts.asked[OWN]) == {(KEY, f"Bearer {READ}")}, (
        "the token that writes leaves for the Hub only"
    )


def test_a_replica_whose_name_was_mistyped_gets_no_key_and_no_token(hosts, tmp_path):
    everything(hosts, tmp_path / "bucket", f"https://{STRANGER}", f"https://{OWN}")
    assert carried(hosts.asked[STRANGER]) == {(None, None)}
    assert carried(hosts.asked[OWN]) == {(KEY, f"Bearer {READ}")}


def test_a_strangers_environment_may_have_a_key_of_its_own(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("ENV_KEY", "the-key-that-the-stranger-gave-me")
    everything(hosts, tmp_path / "bucket", f"https://{OWN}", f"https://{STRANGER}")
    assert carried(hosts.asked[STRANGER]) == {("the-key-that-the-stranger-gave-me", None)}
    assert carried(hosts.asked[OWN]) == {(KEY, f"Bearer {READ}")}


def test_no_redirect_is_followed(hosts, tmp_path):
    hosts.moved.add(OWN)
    for send in every_kind(hosts, tmp_path / "bucket", f"https://{OWN}", f"https://{OWN}"):
        with contextlib.suppress(SpacesUnavailableError, aiohttp.ClientError, ValueError):
            send()
    assert len(hosts.asked[OWN]) >= 6
    assert carried(hosts.asked[OWN]) == {(KEY, f"Bearer {READ}")}
    assert hosts.asked[STRANGER] == []


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
