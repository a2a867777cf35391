"""Watching the policy of a replica; a real replica plays in tests/trainer/deploy/test_dockerfile_steps.py."""

import json
from contextlib import contextmanager

import pytest

from tests.env_space.service import answering, sentence, service


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
    """A replica that gives these answers, (status, body), in turn, and keeps the requests."""
    answers, asked = list(answers), []

    def answer(request):
        length = int(request.headers.get("Content-Length", 0))
        asked.append(json.loads(request.rfile.read(length) or "null"))
        status, body = answers.pop(0)
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    with answering(answer) as url:
        yield url, asked


MODELS = (200, b'{"data": [{"id": "policy"}]}')


def says(text):
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def test_without_a_replica_the_refusal_names_the_setting():
    assert "set WORDLE_REPLICA_URL" in sentence(service().get("/watch"), 404)


def test_a_replica_that_cannot_be_reached_may_be_asleep():
    events, playing = watch(replica_url="http://127.0.0.1:9")
    assert [kind for kind, _ in events] == ["opened", "problem"]
    assert events[1][1]["detail"].startswith("The replica cannot be reached. If it is a Space that sleeps")
    assert playing == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((503, b'{"error": {"message": "no version is served yet: joining"}}'), "no version is served yet"),
        ((503, b"<html>Your space is waking up</html>"), "cannot play now: it answers 503."),
        ((404, b'{"error": "nothing here"}'), "cannot play now: it answers 404."),
        ((200, b"<html>"), "did not answer as vLLM does."),
        ((200, b'{"data": []}'), "did not answer as vLLM does."),
    ],
)
def test_a_replica_that_does_not_play_is_quoted(answer, reason):
    with broken_replica(answer) as (url, _):
        events, playing = watch(replica_url=url)
    assert reason in events[-1][1]["detail"]
    assert events[-1][1]["detail"].endswith("try again in a few minutes.")
    assert playing == 0


def test_a_policy_that_calls_no_tool_ends_its_game():
    with broken_replica(MODELS, says("I would rather not.")) as (url, _):
        events, _ = watch(replica_url=url)
    assert [kind for kind, _ in events] == ["opened", "turn", "ended"]
    assert (events[1][1]["text"], events[1][1]["move"]) == ("I would rather not.", None)
    assert events[2][1]["solved"] is False


def test_the_policy_gets_the_configured_prompt_and_the_result_of_its_guess():
    call = '<tool_call>\n{"name": "guess", "arguments": {"word": "zzzzz"}}\n</tool_call>'
    with broken_replica(MODELS, says(call), says("")) as (url, asked):
        events, _ = watch(replica_url=url, replica_prompt="Find the word.")
    assert events[1][1]["move"]["message"] == "'zzzzz' is not in the word list."
    assert [message["content"] for message in asked[2]["messages"]] == ["Find the word.", call, "not a word"]
