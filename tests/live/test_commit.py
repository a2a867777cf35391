"""A commit happens between two steps: requests go on, and every answer names the versions of its tokens.

test_engine.py makes commits at chosen moments; here they come from a trainer, while clients ask over HTTP.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from openai import OpenAI

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


def test_a_request_that_needs_other_weights_is_refused(trainer, replica):
    replica.wait_for(trainer.publisher.version)
    now = trainer.syncs
    newer = f"has sync {now}, but the request needs sync {now + 1}: use another server"
    exact = f"has sync {now}, but the request needs sync {now - 1} alone: use another server"
    number = "must be the number of a sync"
    for header, sync, status, sentence in (
        ("x-policy-min-sync", now, 200, ""),
        ("x-policy-min-sync", now + 1, 503, newer),
        ("x-policy-min-sync", "new", 400, number),
        ("x-policy-exact-sync", now, 200, ""),
        ("x-policy-exact-sync", now + 1, 503, newer),
        ("x-policy-exact-sync", now - 1, 409, exact),
        ("x-policy-exact-sync", "new", 400, number),
    ):
        asked = {"json": body([PROMPT], 1), "headers": HEADERS | {header: str(sync)}}
        answer = httpx.post(f"{replica.url}/v1/completions", **asked, timeout=PATIENCE_S)
        assert answer.status_code == status, answer.text
        assert sentence in answer.text
        assert ("retry-after" in answer.headers) == (status == 503)


def test_an_answer_that_must_be_exact_has_tokens_of_one_version_or_is_an_error(trainer, replica):
    """Commits come all the time. Unless an answer was finished before the next one, it is refused."""
    replica.wait_for(trainer.publisher.version)
    enough = Event()
    told: list[tuple[bool, str]] = []
    limit = time.monotonic() + PATIENCE_S

    def was_refused(streams: bool) -> bool:
        return any("changed while it answered" in text for streamed, text in told if streamed is streams)

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask_exactly, enough, replica, i % 2 == 0, told) for i in range(CLIENTS // 4)]
        try:
            while not (was_refused(True) and was_refused(False)) and time.monotonic() < limit:
                update(trainer, replica)
        finally:
            enough.set()
        for future in asked:
            future.result()
    assert was_refused(True)
    assert was_refused(False)
    # Now nothing changes, so the same requests are answered.
    for streams in (True, False):
        told.clear()
        ask_exactly(enough, replica, streams, told)
        assert told == [(streams, "")]


def ask_exactly(enough: Event, replica: Replica, streams: bool, told: list[tuple[bool, str]]) -> None:
    """Ask for tokens of the sync that is served, at least once; adds to `told` what each request was told, ""
    for an answer."""
    asks = True
    while asks:
        sync = made_by(httpx.get(f"{replica.url}/v1/models", headers=HEADERS))[0]["weights"]["sync"]
        headers = HEADERS | {"x-policy-exact-sync": str(sync)}
        asked = {**body([PROMPT], LONG), "stream": streams}
        answer = httpx.post(f"{replica.url}/v1/completions", json=asked, headers=headers, timeout=PATIENCE_S)
        if streams and answer.status_code == 200:
            *_, last, done = filter(None, answer.text.splitlines())
            assert done == "data: [DONE]"
            ended = json.loads(last.removeprefix("data: "))
            versions = ended.get("policy_versions")
        else:
            ended = answer.json()
            versions = made_by(answer) if answer.status_code == 200 else None
        if error := ended.get("error"):
            assert error["code"] in (409, 503), "409: a commit came before the request"
            told.append((streams, error["message"]))
        else:
            ((weights, tokens),) = ((entry["weights"], entry["tokens"]) for entry in versions)
            assert (weights["sync"], tokens) == (sync, [[0, 0, LONG]])
            told.append((streams, ""))
        asks = not enough.is_set()


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
            assert last_of(stream)["policy_versions"] == [{"weights": weights, "tokens": [[0, 0, 5]]}]
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json={**two_of_two, **counted}) as stream:
            last = last_of(stream)
        assert last["policy_versions"] == [{"weights": weights, "tokens": tokens}]
        assert last["usage"]["completion_tokens"] == 12
        assert made_by(client.get("/v1/models")) == [{"weights": weights}]
    with OpenAI(base_url=f"{replica.url}/v1", api_key="unused", default_headers=HEADERS) as openai:
        asked = {"model": "policy", "prompt": "hi", "max_tokens": 5, "extra_body": {"ignore_eos": True}}
        *_, last = openai.completions.create(**asked, stream=True)
        assert last.policy_versions == [{"weights": weights, "tokens": [[0, 0, 5]]}]


def made_by(answer: httpx.Response) -> Any:
    return json.loads(answer.headers["x-policy-versions"])


def last_of(stream: httpx.Response) -> Any:
    """The last chunk of a stream; no other has versions."""
    *chunks, last, done = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert done == "[DONE]"
    assert not any("policy_versions" in json.loads(chunk) for chunk in chunks)
    return json.loads(last)
