"""The trainer waits for Spaces that are cold, and ends with a sentence where waiting does not help."""

import socket

import httpx
import pytest

from trainer import cold_spaces
from trainer.cold_spaces import ColdSpaces, SpacesUnavailableError
from trainer.train import main

SERVING = {"state": "serving", "error": None}


@pytest.fixture(autouse=True)
def keyless(monkeypatch):
    monkeypatch.setenv("SPACE_KEY", "")


@pytest.mark.full
def test_it_waits_with_progress_until_replica_and_environment_are_up(apps, server):
    said: list[str] = []
    states = [{"state": "starting"}, {"state": "fetching version 7"}, SERVING]
    with server({"/ready": states}) as replica:
        spaces = ColdSpaces([replica], apps.env, say=said.append)
        spaces.knock()
        spaces.wait(poll_s=0.0)
    assert [line for line in said if "fetching version 7" in line and "healthy" in line]


@pytest.mark.full
def test_one_serving_replica_is_enough(apps, server):
    with server({"/ready": SERVING}) as ready:
        ColdSpaces([apps.replica, ready], apps.env, say=lambda line: None).wait(poll_s=0.0)


@pytest.mark.full
def test_the_environment_is_waited_for_as_well(apps, server):
    said: list[str] = []
    health = [503, 503, {"status": "healthy"}]
    with server({"/ready": SERVING, "/health": health}) as url:
        ColdSpaces([url], url, say=said.append).wait(poll_s=0.0)
    assert "not up yet (503)" in said[0]


def test_a_sleeping_space_is_woken_by_the_knock(world):
    """Through the simulated Hub's own door: a page with 503 until the app runs."""
    world.up("--public")
    world.hub.set_space(world.env, upstream=world.apps.env, stage="SLEEPING")
    door = world.hub.space(world.env)["door"]
    assert cold_spaces.look(door, "env").state == "not up yet (503)"
    answers = [cold_spaces.look(door, "env").state for _ in range(3)]
    assert answers[-1] == "healthy"


def test_a_private_space_that_this_token_may_not_see_is_not_waited_for(world):
    world.up()
    door = world.hub.space(world.env)["door"]
    with pytest.raises(SpacesUnavailableError, match=r"no env, .*404.*--env_url.*HF_TOKEN"):
        ColdSpaces([], door).knock()


@pytest.mark.full
def test_a_url_of_something_else_is_not_waited_for(apps):
    with pytest.raises(SpacesUnavailableError, match=r"no replica, .*--replicas"):
        ColdSpaces([apps.env]).knock()
    with pytest.raises(SpacesUnavailableError, match="no env"):
        ColdSpaces([apps.replica], apps.replica).wait(poll_s=0.0)


@pytest.mark.parametrize("url", ["me-wordle.hf.space", "ftp://me.hf.space", "https://"])
def test_what_is_no_url_is_not_waited_for(url):
    with pytest.raises(SpacesUnavailableError, match=r"write https://"):
        ColdSpaces([url]).knock()


def test_a_host_that_does_not_exist_is_not_waited_for(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(SpacesUnavailableError, match="no such host"):
        ColdSpaces(["https://me-wordle.example"]).knock()


def test_a_resolver_that_fails_for_now_is_waited_for(monkeypatch):
    def busy(*args, **kwargs):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", busy)
    assert cold_spaces.look("https://me-wordle.example", "env").state == "not reachable (ConnectError)"


def test_a_machine_that_is_starting_is_waited_for():
    assert cold_spaces.look("http://127.0.0.1:9", "replica").state == "not reachable (ConnectError)"


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_may_not_read_is_not_waited_for(server, status):
    with (
        server({"/ready": status}) as url,
        pytest.raises(SpacesUnavailableError, match=rf"\({status}\): set SPACE_HF_TOKEN"),
    ):
        ColdSpaces([url]).knock()


def test_a_space_without_its_secrets_is_not_waited_for(server):
    with server(
        {"/ready": {"state": "not set up", "error": "..."}, "/health": {"status": "not set up"}}
    ) as url:
        for spaces in (ColdSpaces([url]), ColdSpaces([], url)):
            with pytest.raises(SpacesUnavailableError, match="its page says which"):
                spaces.knock()


@pytest.mark.full
def test_a_wrong_key_ends_the_run_at_once_and_the_right_one_does_not(keyed_apps, monkeypatch):
    monkeypatch.setenv("SPACES", f"{keyed_apps.replica} {keyed_apps.env}")
    for key in ("", "wrong"):
        monkeypatch.setenv("SPACE_KEY", key)
        for spaces in (ColdSpaces([keyed_apps.replica]), ColdSpaces([], keyed_apps.env)):
            with pytest.raises(SpacesUnavailableError, match="set SPACE_KEY"):
                spaces.knock()
    monkeypatch.setenv("SPACE_KEY", keyed_apps.key)
    ColdSpaces([keyed_apps.replica], keyed_apps.env).knock()


@pytest.mark.full
def test_a_space_that_wants_a_key_and_is_not_known_to_be_ones_own_ends_the_run_at_once(
    keyed_apps, monkeypatch
):
    monkeypatch.setenv("SPACE_KEY", keyed_apps.key)
    with pytest.raises(SpacesUnavailableError, match=r"\(401\) and is not one of SPACES: add it .* yours$"):
        ColdSpaces([keyed_apps.replica]).knock()
    with pytest.raises(
        SpacesUnavailableError, match="is yours, or set ENV_KEY to the key that you were given"
    ):
        ColdSpaces([], keyed_apps.env).knock()
    monkeypatch.setenv("ENV_KEY", keyed_apps.key)
    ColdSpaces([], keyed_apps.env).knock()


@pytest.mark.full
def test_the_key_check_opens_no_game(keyed_apps, monkeypatch):
    monkeypatch.setenv("SPACES", f"{keyed_apps.replica} {keyed_apps.env}")
    monkeypatch.setenv("SPACE_KEY", keyed_apps.key)
    ColdSpaces([keyed_apps.replica], keyed_apps.env).knock()
    assert httpx.get(f"{keyed_apps.env}/health", trust_env=False).json()["sessions"] == 0


def test_patience_ends(server, clock, monkeypatch):
    monkeypatch.setattr(cold_spaces, "time", clock)
    with (
        server({"/ready": {"state": "starting", "error": "the Hub refused read access"}}) as url,
        pytest.raises(SpacesUnavailableError, match=r"starting \(the Hub refused read access\)"),
    ):
        ColdSpaces([url], say=lambda line: None).wait(poll_s=600.0)


@pytest.mark.full
def test_the_trainer_ends_with_the_sentence(apps, tmp_path, monkeypatch):
    options = ["--config", "trainer/configs/wordle_tiny.yaml", "--model", "trainer/policies/wordle-tiny"]
    options += ["--bucket", (tmp_path / "b").as_uri(), "--run", "r", "--output_dir", str(tmp_path)]
    options += ["--replicas", apps.env, "--env_url", apps.env, "--use_cpu", "true"]
    monkeypatch.setattr("sys.argv", ["trainer.train", *options])
    with pytest.raises(SystemExit, match=f"^trainer: {apps.env} is no replica"):
        main()
    assert not (tmp_path / "b").exists(), "nothing was written"
