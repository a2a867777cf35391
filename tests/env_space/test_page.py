"""The page as a person's browser shows it: games by keyboard and by touch, and the policy to watch."""

import json
import re
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import expect

from tests.env_space.service import BRIDE, sentence, service, space
from tests.support.browser import shows_scheme, watched_page
from tests.support.http_server import answering

MARKS = re.compile(r"^[-+?]{5}$")
DESK = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
PHONE = {"viewport": {"width": 390, "height": 844}, "reduced_motion": "reduce", "has_touch": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A Space with a key. A person on the page needs none, and takes no place of the API."""
    variables = {"WORDLE_REPLICA_URL": "http://127.0.0.1:9", "WORDLE_KEY": "four-random-words-in-a-row"}
    with space(tmp_path_factory.mktemp("page"), **variables) as running:
        yield running.url
        assert httpx.get(f"{running.url}/health").json()["sessions"] == 0


@pytest.fixture
def page(browser, url):
    """The game whose word is "bride", on a desktop; whatever the page complains about fails the test."""
    with watched_page(browser, **DESK) as page:
        page.goto(f"{url}/#seed={BRIDE}")
        expect(says(page)).to_have_text("Guess a word of 5 letters.")
        yield page


def says(page):
    return page.locator("#play .says")


def rows(page):
    return page.locator("#play .board li")


def guess(page, turn, word):
    page.keyboard.type(word)
    page.keyboard.press("Enter")
    marks = "invalid" if word == "slote" else MARKS
    expect(rows(page).nth(turn - 1)).to_have_attribute("data-feedback", marks)


def part(page, name):
    row = page.locator("#play .reward div", has=page.get_by_text(name, exact=True))
    return row.locator("dd").inner_text()


@pytest.mark.full
def test_a_game_won_by_keyboard(page):
    page.keyboard.type("crate")
    page.keyboard.press("Backspace")
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    expect(says(page)).to_have_text("A guess has 5 letters.")
    guess(page, 1, "ne")
    label = "Guess 1: C not in the word, R right place, A not in the word, N not in the word, E right place"
    expect(rows(page).first).to_have_attribute("aria-label", label)
    expect(says(page)).to_contain_text("5 guesses left.")
    guess(page, 2, "bride")
    expect(says(page)).to_contain_text("On the second guess! The word is BRIDE.")
    assert page.locator("#play .tile.place").count() == 2 + 5
    assert (part(page, "Solved"), part(page, "Sum")) == ("+1.20", "+1.40")
    log = page.locator("#play .log code").all_inner_texts()
    assert log == ["c1-r2+a3-n4-e5+", "b1+r2+i3+d4+e5+ game over"]
    page.keyboard.type("extra")
    assert rows(page).nth(2).inner_text() == ""


@pytest.mark.full
def test_a_game_lost_by_keyboard_and_another_begun(page):
    for turn, word in enumerate(["zonal", "slote", "zonal", "crane", "gripe", "pride"], 1):
        guess(page, turn, word)
        if word == "slote":
            expect(says(page)).to_contain_text("'slote' is not in the word list. 4 guesses left.")
        if turn == 3:
            expect(says(page)).to_contain_text("'zonal' was already guessed in turn 1.")
    expect(says(page)).to_contain_text("Not this time. The word was BRIDE.")
    assert (part(page, "Not a word"), part(page, "Repeated"), part(page, "Solved")) == ("−0.05", "−0.05", "0")
    page.get_by_role("button", name="New game").click()
    expect(says(page)).to_have_text("Guess a word of 5 letters.")
    assert page.locator("#play .tile.place, #play .keys [data-mark]").count() == 0
    assert page.evaluate("location.hash") == ""
    guess(page, 1, "crane")
    page.emulate_media(reduced_motion="no-preference")
    page.reload()
    expect(says(page)).to_have_text("Guess a word of 5 letters.")
    page.keyboard.type("crane")
    page.keyboard.press("Enter")
    page.locator("#play .turned").first.wait_for()
    page.get_by_role("button", name="New game").click()
    expect(page.locator("#play .turned")).to_have_count(0)
    for turn in (1, 2):
        guess(page, turn, "crane")


@pytest.mark.full
def test_nothing_on_the_page_comes_from_elsewhere_and_a_link_names_the_game(browser, url):
    asked = []
    with watched_page(browser, **DESK) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/#seed={BRIDE}")
        expect(page.get_by_role("link", name=f"#{BRIDE}")).to_have_attribute("href", f"#seed={BRIDE}")
    assert {urlsplit(one).hostname for one in asked} == {"127.0.0.1"}


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_board_and_the_keyboard_at_once(browser, url, scheme):
    with watched_page(browser, **PHONE, color_scheme=scheme) as page:
        page.goto(f"{url}/#seed={BRIDE}")
        expect(says(page)).to_have_text("Guess a word of 5 letters.")
        for letter in "crane":
            page.get_by_role("button", name=letter, exact=True).tap()
        page.get_by_role("button", name="Enter").tap()
        expect(rows(page).first).to_have_attribute("data-feedback", "-+--+")
        expect(page.get_by_role("button", name="r, right place")).to_be_visible()
        expect(page.get_by_role("button", name="c, not in the word")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.locator("#play .keys").bounding_box()["y"] < 844 - 160
        assert shows_scheme(page, scheme, "body", "body")


@pytest.mark.full
def test_seven_letters_fit_a_small_phone(browser, tmp_path):
    small = PHONE | {"viewport": {"width": 360, "height": 640}}
    with space(tmp_path, WORDLE_LENGTH="7") as running, watched_page(browser, **small) as page:
        page.goto(running.url)
        expect(says(page)).to_have_text("Guess a word of 7 letters.")
        board, keys = (page.locator(f"#play {part}").bounding_box() for part in (".board", ".keys"))
    assert board["x"] >= 0
    assert board["x"] + board["width"] <= 360
    assert keys["y"] + keys["height"] <= 640


@pytest.mark.full
def test_tabs_move_by_arrow_keys_and_an_absent_replica_is_said_in_words(page):
    page.get_by_role("tab", name="You play").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Watch the policy")).to_be_focused()
    expect(page.locator("#watch .says")).to_contain_text("The replica cannot be reached.")
    expect(page.get_by_role("button", name="Try again")).to_be_enabled()
    page.keyboard.type("crane")
    page.get_by_role("tab", name="You play").click()
    assert rows(page).first.inner_text() == "", "what is typed while watching is no guess"


@pytest.mark.full
def test_a_lost_connection_is_said_and_the_same_guess_can_be_sent_again(page):
    page.context.set_offline(True)
    page.keyboard.type("crane")
    page.keyboard.press("Enter")
    expect(says(page)).to_contain_text("Press Enter to send the guess again.")
    page.context.set_offline(False)
    page.keyboard.press("Enter")
    expect(rows(page).first).to_have_attribute("data-feedback", "-+--+")


def watch(**settings):
    """The events of one watched game as (kind, data), and how many games are in play afterwards."""
    client = service(**settings)
    answer = client.get("/watch")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    playing = client.get("/health").json()["sessions"]
    return [(kind[7:], json.loads(data[6:])) for kind, data in events], playing


@contextmanager
def broken_replica(*answers):
    """A replica of version 3 that gives these answers, (status, body), in turn, and keeps the requests."""
    answers = list(answers)
    asked = []

    def answer(request):
        asked.append(request)
        status, body = answers.pop(0)
        weights = {"version": 3, "term": 1, "sync": 2}
        return status, {"x-policy-versions": json.dumps([{"weights": weights}])}, body

    with answering(answer) as url:
        yield url, asked


def answer_of(text):
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def test_without_a_replica_the_refusal_names_the_setting():
    assert "set WORDLE_REPLICA_URL" in sentence(service().get("/watch"), 404)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((503, b'{"error": {"message": "no version is served yet: joining"}}'), "no version is served yet"),
        ((503, b"<html>Your space is waking up</html>"), "cannot play now: it answered with status 503."),
        ((404, b'{"error": "nothing here"}'), "cannot play now: it answered with status 404."),
        ((200, b"<html>"), "answer is not one of vLLM's."),
        ((200, b'{"choices": []}'), "answer is not one of vLLM's."),
        pytest.param((200, b"[" * 60_000), "answer is not one of vLLM's.", id="nested"),
        pytest.param((503, b"[" * 60_000), "it answered with status 503.", id="nested refusal"),
    ],
)
def test_a_replica_that_does_not_play_is_quoted(answer, reason):
    with broken_replica(answer) as (url, _):
        events, playing = watch(replica_url=url, replica_key="the-replica's-own")
    assert "the-replica's-own" not in str(events)
    assert reason in events[-1][1]["detail"]
    assert events[-1][1]["detail"].endswith("try again in a few minutes.")
    assert playing == 0


def test_a_policy_that_calls_no_tool_ends_its_game():
    with broken_replica(answer_of("I would rather not.")) as (url, _):
        events, _ = watch(replica_url=url)
    assert [kind for kind, _ in events] == ["opened", "turn", "ended"]
    assert events[1][1] == {"text": "I would rather not.", "version": "3", "move": None}
    assert events[2][1]["solved"] is False


def test_the_policy_gets_the_prompt_the_key_but_no_token_and_the_result_of_its_guess():
    call = '<tool_call>\n{"name": "guess", "arguments": {"word": "zzzzz"}}\n</tool_call>'
    with broken_replica(answer_of(call), answer_of("")) as (url, asked):
        events, _ = watch(replica_url=url, replica_prompt="Find the word.", replica_key="the-replica's-own")
    assert asked[0].headers["x-space-key"] == "the-replica's-own"
    assert "authorization" not in asked[0].headers
    assert "the-replica's-own" not in str(events)
    assert events[1][1]["move"]["message"] == "'zzzzz' is not in the word list."
    messages = json.loads(asked[1].body)["messages"]
    assert [message["content"] for message in messages] == ["Find the word.", call, "not a word"]
