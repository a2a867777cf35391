"""Settings come from WORDLE_ variables; a Space that lacks one says so on its page."""

import httpx
import pytest

from env_space.app import SETUP, find_problems
from env_space.settings import Settings
from space_guard.setup import SettingsError
from tests.env_space.service import PATIENCE_S, Space, sentence


def test_variables_are_parsed():
    settings = Settings.read({"WORDLE_ANSWERS": "300", "WORDLE_SESSION_TTL_S": "2.5", "WORDLE_PORT": "8000"})
    assert settings == Settings(answers=300, session_ttl_s=2.5, port=8000)


def test_an_unknown_variable_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError) as refusal:
        Settings.read({"WORDLE_ANSWER": "3"})
    assert str(refusal.value) == (
        "set these variables: WORDLE_ANSWER: there is no such variable; the variables are WORDLE_ANSWERS, "
        "WORDLE_LENGTH, WORDLE_HARD_MODE, WORDLE_INVALID_COST, WORDLE_REPEATED_COST, WORDLE_MAX_SESSIONS, "
        "WORDLE_SESSION_TTL_S, WORDLE_REPLICA_URL, WORDLE_REPLICA_PROMPT, WORDLE_REPLICA_KEY, WORDLE_KEY, "
        "WORDLE_OPEN, WORDLE_HOST, WORDLE_PORT"
    )


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
    with pytest.raises(SettingsError, match=f"^set these variables: {variable}: "):
        Settings.read({variable: value})


SET_UP = {"SPACE_ID": "me/wordle-env", "WORDLE_KEY": "four-random-words-in-a-row"}


@pytest.mark.parametrize(
    ("variables", "name", "said"),
    [
        ({"WORDLE_KEY": ""}, "WORDLE_KEY", "not set"),
        ({"WORDLE_KEY": "1234"}, "WORDLE_KEY", "shorter than 16 characters"),
        ({"WORDLE_ANSWERS": "a lot"}, "WORDLE_ANSWERS", "valid integer"),
        ({"WORDLE_ANSWERS": "1000000"}, "WORDLE_ANSWERS", "There are "),
        ({"WORDLE_ANSWER": "3"}, "WORDLE_ANSWER", "there is no such variable"),
    ],
)
def test_a_space_that_is_not_set_up_names_what_it_lacks(variables, name, said):
    problems = find_problems(SET_UP | variables)
    assert list(problems) == [name]
    assert said in problems[name]
    assert find_problems(SET_UP) == {}
    assert find_problems({"WORDLE_OPEN": "true"}) == {}


@pytest.mark.full
def test_a_duplicated_space_shows_how_to_set_it_up_and_says_so_once(tmp_path):
    """As on the Hub, where a duplicate has the variables, but no secret."""
    running = Space(tmp_path / "space.log", SPACE_ID="me/wordle-env", WORDLE_LENGTH="9")
    try:
        running.wait()
        with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client:
            home, health = client.get("/"), client.get("/health")
            refused = [client.get("/ready"), client.post("/sessions", json={"seed": 1}), client.get("/docs")]
    finally:
        log = running.stop()
    assert (home.status_code, health.status_code) == (200, 200)
    for wanted in ("not set", "secret", "WORDLE_LENGTH", "less than or equal to 7", "Variables and secrets"):
        assert wanted in home.text
    assert "https://huggingface.co/spaces/me/wordle-env/settings" in home.text
    assert all("WORDLE_KEY: not set" in sentence(answer, 503) for answer in refused)
    assert log.count("This Space is not set up") == 1
    assert "Traceback" not in log


@pytest.mark.full
def test_the_set_up_page_fits_a_phone_in_both_schemes(browser, tmp_path):
    problems = {"WORDLE_KEY": "not set", "WORDLE_X": f"{'x' * 90} is not a number"}
    path = tmp_path / "page.html"
    path.write_text(SETUP.page(problems))
    for scheme in ("light", "dark"):
        phone = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme)
        phone.goto(path.as_uri())
        assert phone.evaluate("document.documentElement.scrollWidth") == 360
