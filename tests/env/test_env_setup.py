"""A Space on the Hub that lacks its key, or has a variable that cannot be used, says so on its page."""

import httpx
import pytest

from env_space import setup_page
from tests.env.service import PATIENCE_S, Space, sentence

SET_UP = {"SPACE_ID": "me/wordle-env", "WORDLE_KEY": "four-random-words-in-a-row"}


@pytest.mark.parametrize(
    ("variables", "name", "said"),
    [
        ({"WORDLE_KEY": ""}, "WORDLE_KEY", "WORDLE_KEY is not set."),
        ({"WORDLE_KEY": "1234"}, "WORDLE_KEY", "shorter than 16 characters"),
        ({"WORDLE_ANSWERS": "a lot"}, "WORDLE_ANSWERS", "WORDLE_ANSWERS=a lot cannot be used"),
        ({"WORDLE_ANSWERS": "1000000"}, "WORDLE_ANSWERS", "There are "),
        ({"WORDLE_ANSWER": "3"}, "WORDLE_ANSWER", "WORDLE_ANSWER is not a setting"),
    ],
)
def test_a_space_that_is_not_set_up_names_what_it_lacks(variables, name, said):
    problems = setup_page.problems_of(SET_UP | variables)
    assert list(problems) == [name]
    assert problems[name].startswith(said) or said in problems[name]
    assert setup_page.problems_of(SET_UP) == {}
    assert setup_page.problems_of({"WORDLE_OPEN": "true"}) == {}


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
    for wanted in ("WORDLE_KEY is not set.", "secret", "WORDLE_LENGTH=9 cannot", "Variables and secrets"):
        assert wanted in home.text
    assert "https://huggingface.co/spaces/me/wordle-env/settings" in home.text
    assert all("WORDLE_KEY is not set." in sentence(answer, 503) for answer in refused)
    assert log.count("This Space is not set up") == 1
    assert "Traceback" not in log


@pytest.mark.full
def test_the_set_up_page_fits_a_phone_in_both_schemes(browser, tmp_path):
    problems = {"WORDLE_KEY": "WORDLE_KEY is not set.", "WORDLE_X": f"WORDLE_X={'x' * 90} is not a setting."}
    path = tmp_path / "page.html"
    path.write_text(setup_page.page(problems))
    for scheme in ("light", "dark"):
        phone = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme)
        phone.goto(path.as_uri())
        assert phone.evaluate("document.documentElement.scrollWidth") == 360
