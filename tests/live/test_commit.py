"""A commit happens between two steps: requests go on, and every answer names the versions of its tokens.

test_engine.py makes commits at chosen moments; here they come from a trainer, while clients ask over HTTP.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

from tests.live.conftest import BLOCK
from tests.live.replica import HEADERS, PATIENCE_S, Answer, Replica, ask, body
from tests.live.run import Trainer, update

pytestmark = pytest.mark.live

PROMPT = [3 + 37 * i % 200 for i in range(2 * BLOCK)]
LONG = 800  # tokens
CLIENTS = 16
COMMITS = 4


def test_every_request_in_flight_finishes_through_a_stream_of_commits(trainer, replica):
    """Clients ask without a break, so whenever a commit comes some of them are being answered."""
    first = trainer.publisher.version
    enough = Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask_until, enough, replica, [*PROMPT, i]) for i in range(CLIENTS)]
        for _ in range(COMMITS):
            update(trainer, replica)
        enough.set()
        answers = [answer for future in asked for answer in future.result()]
    for answer in answers:
        versions = [version for version, _, _ in answer.spans]
        assert len(answer.tokens) == LONG
        assert [start for _, start, _ in answer.spans] == [0, *(end for _, _, end in answer.spans[:-1])]
        assert answer.spans[-1][2] == LONG
        assert versions == sorted(set(versions))
        syncs = [(weights["version"], weights["sync"]) for weights in answer.weights]
        assert syncs == [(version, version + 1) for version in versions], "what `Trainer.publish` counts"
    assert max(len(answer.spans) for answer in answers) > 1
    commits = replica.status(after=first)["commits"]
    assert len(commits) == COMMITS
    assert not any(commit["joined"] for commit in commits)
    assert all(commit["commit_ms"] <= commit["pause_ms"] for commit in commits)


def ask_until(enough: Event, replica: Replica, prompt: list[int]) -> list[Answer]:
    answers = [ask(replica.url, prompt, LONG)]
    while not enough.is_set():
        answers.append(ask(replica.url, prompt, LONG))
    return answers


def test_a_commit_that_fails_changes_nothing(trainer: Trainer, replica: Replica) -> None:
    """Versions, cached prefixes and the running request are as if it had not been tried; the next works."""
    version = trainer.publisher.version
    replica.wait_for(version)
    ask(replica.url, PROMPT, 1)
    undisturbed = ask(replica.url, PROMPT, LONG)
    commit = trainer.writer.commit
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as fault:
        wrong = {"digest": "0" * 16}
        fault.setattr(trainer.writer, "commit", lambda *args, **facts: commit(*args, **facts | wrong))
        asked = pool.submit(ask, replica.url, PROMPT, LONG)
        trainer.step()
        trainer.publish()
        status = replica.wait_until(lambda status: "0" * 16 in (status["error"] or ""), "wrong digest")
        answer = asked.result()
    assert (status["version"], status["state"]) == (version, "serving")
    assert answer.spans == [(version, 0, LONG)]
    assert (answer.tokens, answer.logprobs) == (undisturbed.tokens, undisturbed.logprobs)
    computed = len(PROMPT) + LONG - 1  # the last token is sampled, but never fed
    assert ask(replica.url, [*PROMPT, *answer.tokens], 1).cached == computed // BLOCK * BLOCK

    assert update(trainer, replica) == version + 2
    assert replica.status()["status"]["digest"] == trainer.writer.newest.digest
    assert ask(replica.url, PROMPT, 4).spans == [(version + 2, 0, 4)]
    (event,) = replica.status(after=version)["commits"]
    assert not event["joined"]


def test_a_request_that_needs_newer_weights_is_refused(trainer, replica):
    replica.wait_for(trainer.publisher.version)
    for sync, status in ((trainer.syncs, 200), (trainer.syncs + 1, 503), ("new", 400)):
        asked = {"json": body([PROMPT], 1), "headers": HEADERS | {"x-policy-min-sync": str(sync)}}
        answer = httpx.post(f"{replica.url}/v1/completions", **asked, timeout=PATIENCE_S)
        assert answer.status_code == status, answer.text
        assert status != 503 or f"needs sync {sync}: use another server" in answer.json()["error"]["message"]


def test_every_choice_of_every_kind_of_answer_has_its_spans(trainer, replica):
    term = trainer.writer.writer.term
    weights = {"version": trainer.publisher.version, "term": term, "sync": trainer.syncs}
    replica.wait_for(trainer.publisher.version)
    chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    chat |= {"ignore_eos": True}
    with httpx.Client(base_url=replica.url, headers=HEADERS, timeout=PATIENCE_S) as client:
        two_of_two = {**body([PROMPT, PROMPT[:9]], 3), "n": 2, "temperature": 1}
        answer = client.post("/v1/completions", json=two_of_two)
        assert len(answer.json()["choices"]) == 4
        tokens = [[choice, 0, 3] for choice in range(4)]
        assert made_by(answer) == [{"weights": weights, "tokens": tokens}]
        answer = client.post("/v1/chat/completions", json=chat)
        assert made_by(answer) == [{"weights": weights, "tokens": [[0, 0, 5]]}]
        with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as stream:
            assert made_by(stream) == [{"weights": weights}], "tokens are not known before the last one"
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert made_by(client.get("/v1/models")) == [{"weights": weights}]


def made_by(answer: httpx.Response) -> Any:
    return json.loads(answer.headers["x-policy-versions"])
