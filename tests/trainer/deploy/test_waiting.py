"""The trainer waits for Spaces that sleep or build, and ends with a sentence if waiting cannot help."""

import socket
from unittest import mock

import httpx
import pytest

from tests.trainer.deploy.conftest import KEY
from trainer import spaces
from trainer.spaces import Fleet, Spaces, SpacesUnavailableError
from trainer.train import main


@pytest.fixture(autouse=True)
def keyless(monkeypatch):
    monkeypatch.setenv("SPACE_KEY", "")


@pytest.mark.full
def test_it_waits_with_progress_until_one_replica_and_the_environment_are_up(apps, server, capsys):
    states = [{"state": "starting"}, {"state": "fetching version 7"}, {"state": "serving"}]
    with server({"/ready": states, "/health": [503, 503, {"status": "healthy"}]}) as url:
        several = Spaces(Fleet([apps.replica, url]), url)
        several.wake()
        several.wait(poll_s=0.0)
    said = capsys.readouterr().out.splitlines()
    assert "fetching version 7" in said[0]
    assert "not up yet (503)" in said[0]
    assert len(said) == 1, "the next states are good"


def test_wake_wakes_a_sleeping_space(world):
    """At the simulated Hub's address for it, which answers 503 until the app runs."""
    world.up("--public")
    world.hub.set_space(world.env, upstream=world.apps.env, stage="SLEEPING")
    url = world.hub.space(world.env)["address"]
    assert spaces.probe(url, "env").state == "not up yet (503)"
    answers = [spaces.probe(url, "env").state for _ in range(3)]
    assert answers[-1] == "healthy"


def test_a_private_space_that_this_token_may_not_see_is_not_waited_for(world):
    world.up()
    url = world.hub.space(world.env)["address"]
    with pytest.raises(SpacesUnavailableError, match=r"404, so it is not the env.*--env_url.*HF_TOKEN"):
        Spaces(Fleet([]), url).wake()


@pytest.mark.full
def test_a_url_of_something_else_is_not_waited_for(apps):
    with pytest.raises(SpacesUnavailableError, match=r"not the replica: .*--replicas"):
        Spaces(Fleet([apps.env])).wake()
    with pytest.raises(SpacesUnavailableError, match="not the env"):
        Spaces(Fleet([apps.replica]), apps.replica).wait(poll_s=0.0)


@pytest.mark.parametrize("url", ["me-wordle.hf.space", "ftp://me.hf.space", "https://"])
def test_what_is_no_url_is_not_waited_for(url):
    with pytest.raises(SpacesUnavailableError, match=r"write https://"):
        Spaces(Fleet([url])).wake()


def test_a_host_that_does_not_exist_is_not_waited_for_and_one_that_cannot_be_reached_now_is(monkeypatch):
    assert spaces.probe("http://127.0.0.1:9", "replica").state == "not reachable (ConnectError)"
    resolver = mock.Mock(side_effect=socket.gaierror(socket.EAI_AGAIN, "Temporary failure"))
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    assert spaces.probe("https://me-wordle.example", "env").state == "not reachable (ConnectError)"
    resolver.side_effect = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(SpacesUnavailableError, match="no such host"):
        Spaces(Fleet(["https://me-wordle.example"])).wake()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (401, r"\(401\): set SPACE_HF_TOKEN"),
        (403, r"\(403\): set SPACE_HF_TOKEN"),
        ({"state": "not set up", "status": "not set up"}, "its page says which"),
    ],
)
def test_a_space_that_the_owner_has_to_change_is_not_waited_for(server, answer, words):
    with server({"/ready": answer, "/health": answer}) as url:
        for asleep in (Spaces(Fleet([url])), Spaces(Fleet([]), url)):
            with pytest.raises(SpacesUnavailableError, match=words):
                asleep.wake()


@pytest.mark.full
def test_a_wrong_key_ends_the_run_and_the_right_one_does_not(keyed_apps, monkeypatch):
    monkeypatch.setenv("SPACES", f"{keyed_apps.replica} {keyed_apps.env}")
    for key in ("", "wrong"):
        monkeypatch.setenv("SPACE_KEY", key)
        for asleep in (Spaces(Fleet([keyed_apps.replica])), Spaces(Fleet([]), keyed_apps.env)):
            with pytest.raises(SpacesUnavailableError, match="set SPACE_KEY"):
                asleep.wait()  # not `wake`, to which a busy app may not answer in time
    monkeypatch.setenv("SPACE_KEY", KEY)
    Spaces(Fleet([keyed_apps.replica]), keyed_apps.env).wake()
    health = httpx.get(f"{keyed_apps.env}/health", trust_env=False).json()
    assert health["sessions"] == 0, "the check of the key opens no game"


@pytest.mark.full
def test_a_foreign_space_that_wants_a_key_ends_the_run(keyed_apps, monkeypatch):
    monkeypatch.setenv("SPACE_KEY", KEY)
    with pytest.raises(SpacesUnavailableError, match=r"\(401\) and is not in SPACES: add the URL .* yours$"):
        Spaces(Fleet([keyed_apps.replica])).wait()
    fix = "is yours, or set ENV_KEY to the key that you were given"
    with pytest.raises(SpacesUnavailableError, match=fix):
        Spaces(Fleet([]), keyed_apps.env).wait()
    monkeypatch.setenv("ENV_KEY", KEY)
    Spaces(Fleet([]), keyed_apps.env).wake()


def test_the_wait_has_a_limit(server, clock, monkeypatch):
    monkeypatch.setattr(spaces, "time", clock)
    with (
        server({"/ready": {"state": "starting", "error": "the Hub refused read access"}}) as url,
        pytest.raises(SpacesUnavailableError, match=r"starting \(the Hub refused read access\)"),
    ):
        Spaces(Fleet([url])).wait(poll_s=600.0)


@pytest.mark.full
def test_the_trainer_ends_with_the_sentence(apps, tmp_path, monkeypatch):
    options = ["--config", "trainer/configs/wordle_tiny.yaml", "--model", "trainer/policies/wordle-tiny"]
    options += ["--bucket", (tmp_path / "b").as_uri(), "--run", "r", "--output_dir", str(tmp_path)]
    options += ["--replicas", apps.env, "--env_url", apps.env, "--use_cpu", "true"]
    monkeypatch.setattr("sys.argv", ["trainer.train", *options])
    with pytest.raises(SystemExit, match=f"^trainer: {apps.env} answers "):
        main()
    assert not (tmp_path / "b").exists(), "nothing was written"
