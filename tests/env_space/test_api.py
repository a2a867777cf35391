"""The HTTP API as a trainer uses it, the refusals of wrong requests, and the settings of the Space."""

import json
import re
from uuid import UUID, uuid4

import httpx
import pytest

from env_space.app import SETUP, create_app
from env_space.game import answers
from env_space.settings import Settings
from space_guard.setup import SettingsError
from tests.env_space.service import BRIDE, PATIENCE_S, guess, sentence, service, space, start

NOTHING = dict.fromkeys(["solved", "greens", "yellows", "repetition", "invalid", "gave_up"], 0)


def test_a_game_from_opening_to_reward():
    client = service()
    opened = client.post("/sessions", json={"seed": BRIDE}).json()
    game = f"/sessions/{opened['session']}"
    first = guess(client, game, "crane", 1).json()
    last = guess(client, game, "bride", 2).json()
    closed = client.delete(game).json()
    assert (opened["observation"], opened["max_guesses"], opened["length"]) == ("Play Wordle.", 6, 5)
    assert first == {
        "turn": 1,
        "word": "crane",
        "observation": "c1-r2+a3-n4-e5+",
        "feedback": "-+--+",
        "message": "",
        "valid": True,
        "done": False,
        "solved": False,
        "reward": pytest.approx(0.08),
        "reward_parts": {**NOTHING, "greens": pytest.approx(0.08)},
        "secret": "",
    }
    assert (last["done"], last["solved"], last["secret"]) == (True, True, "bride")
    assert last["reward"] == pytest.approx(1.4)
    assert closed == {
        "solved": True,
        "turns": 2,
        "reward": last["reward"],
        "reward_parts": last["reward_parts"],
        "secret": "bride",
    }


def test_a_retried_opening_and_move_and_close_happen_once():
    """A move also after the end of its game, in which no other move is possible."""
    client = service()
    opening = {"seed": BRIDE, "id": str(uuid4())}
    game = f"/sessions/{opening['id']}"
    opened = [client.post("/sessions", json=opening).json() for _ in range(2)]
    first = [guess(client, game, word, 1).json() for word in ("crane", "CRANE")]
    playing = client.get("/health").json()["sessions"]
    last = [guess(client, game, "bride", 2).json() for _ in range(2)]
    first.append(guess(client, game, "crane", 1).json())
    closed = [client.delete(game).json() for _ in range(2)]
    assert opened[0] == opened[1]
    assert first == first[:1] * 3
    assert last[0] == last[1]
    assert playing == 1
    assert closed[0] == closed[1]
    assert closed[0]["turns"] == 2


def test_a_full_service_says_when_to_retry():
    client = service(max_sessions=1)
    game = start(client)
    full = client.post("/sessions", json={"seed": 1})
    assert sentence(full, 503).startswith("1 games are in play")
    assert int(full.headers["Retry-After"]) >= 1
    guess(client, game, "bride", 1)
    client.delete(start(client))
    start(client)


def test_words_are_the_possible_secrets():
    assert service(answers=20).get("/words").json() == {
        "answers": list(answers(20)),
        "held_out": list(answers(20)[18:]),
        "length": 5,
        "max_guesses": 6,
    }


def test_what_the_service_offers_is_documented():
    client = service()
    assert client.get("/docs").status_code == 200
    paths = client.get("/openapi.json").json()["paths"]
    sessions = {"/sessions", "/sessions/{session}/guess", "/sessions/{session}"}
    assert paths.keys() == sessions | {"/words", "/health", "/schema", "/metadata", "/watch"}
    move = paths["/sessions/{session}/guess"]["post"]
    assert move["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Guess")
    assert move["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Move")


def test_each_refused_request_has_its_status_and_names_the_fix():
    client = service()
    unknown = f"/sessions/{UUID(int=0)}"
    game = start(client)
    guess(client, game, "crane", 1)
    changed = sentence(guess(client, game, "bride", 1), 409)
    skipped = sentence(guess(client, game, "bride", 3), 409)
    guess(client, game, "bride", 2)
    late = sentence(guess(client, game, "crane", 3), 409)
    assert "already played with another word, 'crane'" in changed
    assert "the next turn is 2" in skipped
    assert late == "The game ended after turn 2; start a new one to guess again."
    for missing in (guess(client, unknown, "crane", 1), client.delete(unknown)):
        assert "start a new one" in sentence(missing, 404)


JSON = {"Content-Type": "application/json"}
MALFORMED = [
    (b'{"word": "crane"}', 422, "'turn'"),
    (b'{"turn": 1}', 422, "'word'"),
    (b'{"word": null, "turn": 1}', 422, "'word'"),
    (b'{"word": "crane", "turn": 0}', 422, "'turn'"),
    (b'{"word": "crane", "turn": "1"}', 422, "'turn'"),
    (b'{"word": "crane", "turn": NaN}', 422, "'turn'"),
    (b'{"word": "crane", "turn": 1e999}', 422, "'turn'"),
    (b'{"word": "crane", "turn": 1, "extra": 1}', 422, "'extra'"),
    (b'{"word": "\\ud800", "turn": 1}', 422, "'word'"),
    (b'{"word": "crane", "turn": 1, "\\ud800": 1}', 422, "JSON object"),
    (b"{", 422, "not JSON"),
    (b"", 422, "JSON object"),
    (b"null", 422, "JSON object"),
    (b"\xff\xfe\x00", 400, "could not be parsed"),
    (b'{"word": "crane", "turn": ' + b"9" * 5000 + b"}", 400, "could not be parsed"),
    (b"[" * 9000, 400, "could not be parsed"),
    (b" " * 100_000, 413, "at most 16384 bytes"),
]


@pytest.mark.parametrize(("body", "status", "names"), MALFORMED)
def test_a_malformed_guess_is_refused_with_a_sentence_and_costs_no_turn(body, status, names):
    client = service()
    game = start(client)
    refusal = client.post(f"{game}/guess", content=body, headers=JSON)
    assert names in sentence(refusal, status)
    assert client.delete(game).json()["turns"] == 0


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"{}", "'seed'"),
        (b'{"seed": true}', "'seed'"),
        (b'{"seed": 1.5}', "'seed'"),
        (b'{"seed": 9007199254740992}', "'seed'"),
        (b'{"seed": 1, "id": "mine"}', "'id'"),
        (b'{"seed": 1, "split": "test"}', "'split'"),
        (b'{"seed": 1, "sead": 2}', "'sead'"),
    ],
)
def test_a_malformed_opening_is_refused_with_a_sentence(body, names):
    assert names in sentence(service().post("/sessions", content=body, headers=JSON), 422)
    plain = service().post("/sessions", content=b'{"seed": 1}')
    assert "Content-Type: application/json" in sentence(plain, 422)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/sessions", 405), ("DELETE", "/sessions/mine", 422)],
)
def test_a_wrong_address_is_refused_with_a_sentence(method, path, status):
    assert "GET /docs" in sentence(service().request(method, path), status)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WORDLE_ANSWERS", "0"),
        ("WORDLE_ANSWERS", "many"),
        ("WORDLE_MAX_SESSIONS", "0"),
        ("WORDLE_SESSION_TTL_S", "0"),
        ("WORDLE_SESSION_TTL_S", "nan"),
        ("WORDLE_SESSION_TTL_S", "inf"),
        ("WORDLE_LENGTH", "8"),
        ("WORDLE_HARD_MODE", "maybe"),
        ("WORDLE_INVALID_COST", "-0.1"),
        ("WORDLE_INVALID_COST", "nan"),
        ("WORDLE_REPEATED_COST", "2"),
        ("WORDLE_REPLICA_URL", "replica.example"),
        ("WORDLE_HOST", ""),
        ("WORDLE_PORT", "70000"),
    ],
)
def test_an_unusable_value_is_named(variable, value):
    with pytest.raises(SettingsError, match=f"^correct these variables: {variable}: "):
        Settings.read({variable: value})


SET_UP = {"SPACE_ID": "me/wordle-env", "WORDLE_KEY": "four-random-words-in-a-row"}


def test_a_space_that_is_not_set_up_names_what_it_lacks():
    with pytest.raises(SettingsError) as refused:
        Settings.read(SET_UP | {"WORDLE_KEY": "", "WORDLE_ANSWER": "3"})
    key, unknown = refused.value.problems.items()
    assert key == ("WORDLE_KEY", "not set")
    assert "no such variable; the variables are WORDLE_ANSWERS, " in unknown[1]
    with pytest.raises(SettingsError, match="WORDLE_ANSWERS: there are only "):
        create_app(Settings.read(SET_UP | {"WORDLE_ANSWERS": "1000000"}))
    without_key = {"SPACE_ID": "me/wordle-env"}
    with pytest.raises(SettingsError, match="variables: WORDLE_KEY: not set"):
        Settings.read(without_key | {"WORDLE_OPEN": "0"})
    for fine in (SET_UP, *(without_key | {"WORDLE_OPEN": said} for said in ("true", "1", "yes"))):
        create_app(Settings.read(fine))


@pytest.mark.parametrize(
    ("url", "foreign"),
    [
        ("https://team-wordle-replica-1.hf.space", True),
        ("https://Me-wordle-replica-1.hf.space", False),
        ("http://10.0.0.7:7860", False),
    ],
)
def test_the_page_of_a_duplicate_names_the_replica_of_another_owner(monkeypatch, url, foreign):
    for name, value in (SET_UP | {"WORDLE_REPLICA_URL": url, "WORDLE_REPLICA_KEY": "geheimnis"}).items():
        monkeypatch.setenv(name, value)
    page = SETUP.page({"WORDLE_KEY": "not set"})
    assert ("It is not a replica of me" in page) == foreign
    assert f"<code>{url}</code>" in page
    assert "geheimnis" not in page


def test_a_program_that_reads_agents_md_can_play():
    with service() as client:
        text = client.get("/agents.md").text
        opening, guessing = (json.loads(found) for found in re.findall(r"POST /\S+ ({.+?})", text))
        session = client.post("/sessions", json=opening).json()["session"]
        assert client.post(f"/sessions/{session}/guess", json=guessing).json()["valid"]
        assert client.delete(f"/sessions/{session}").json().keys() >= {"reward", "secret"}


@pytest.mark.full
def test_a_duplicated_space_shows_how_to_set_it_up_and_says_so_once(tmp_path):
    """As on the Hub, where a duplicate has the variables, but no secret."""
    with (
        space(tmp_path, SPACE_ID="me/wordle-env", WORDLE_LENGTH="9") as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        home = client.get("/")
        health = client.get("/health")
        refused = [client.get("/ready"), client.post("/sessions", json={"seed": 1}), client.get("/docs")]
    log = (tmp_path / "space.log").read_text()
    assert (home.status_code, health.status_code) == (200, 200)
    for wanted in ("not set", "secret", "WORDLE_LENGTH", "less than or equal to 7", "Variables and secrets"):
        assert wanted in home.text
    assert "https://huggingface.co/spaces/me/wordle-env/settings" in home.text
    assert [answer.status_code for answer in refused] == [503] * 3
    assert all("WORDLE_KEY: not set" in answer.json()["detail"] for answer in refused)
    assert log.count("This Space is not set up") == 1


@pytest.mark.full
def test_the_set_up_page_fits_a_phone_in_both_schemes(browser, tmp_path):
    problems = {"WORDLE_KEY": "not set", "WORDLE_X": f"{'x' * 90} is not a number"}
    path = tmp_path / "page.html"
    path.write_text(SETUP.page(problems))
    for scheme in ("light", "dark"):
        phone = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme)
        phone.goto(path.as_uri())
        assert phone.evaluate("document.documentElement.scrollWidth") == 360
