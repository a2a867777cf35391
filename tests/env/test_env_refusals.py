"""Whatever is sent, the answer is below 500, in a sentence, and costs no turn."""

import pytest

from tests.env.service import sentence, serve, start

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
    (b'{"word": "\\ud800", "turn": 1}', 422, "not JSON"),
    (b'{"word": "crane", "turn": 1, "\\ud800": 1}', 422, "not JSON"),
    (b"{", 422, "not JSON"),
    (b"\xff\xfe\x00", 422, "not JSON"),
    (b"", 422, "not JSON"),
    (b"null", 422, "JSON object"),
    (b"[]", 422, "JSON object"),
    (b'{"word": "crane", "turn": ' + b"9" * 5000 + b"}", 422, "not JSON"),
    (b"[" * 9000, 422, "not JSON"),
    (b" " * 100_000, 413, "at most 16384 bytes"),
]


@pytest.mark.parametrize(("body", "status", "names"), MALFORMED)
def test_a_malformed_guess_is_refused_with_a_sentence_and_costs_no_turn(body, status, names):
    async def scenario(client):
        game = await start(client)
        refusal = await client.post(f"{game}/guess", content=body, headers=JSON)
        return sentence(refusal, status), (await client.delete(game)).json()["turns"]

    detail, turns = serve(scenario)
    assert names in detail
    assert turns == 0


@pytest.mark.parametrize(
    ("opening", "names"),
    [
        ({}, "'seed'"),
        ({"seed": True}, "'seed'"),
        ({"seed": 1.5}, "'seed'"),
        ({"seed": 2**53}, "'seed'"),
        ({"seed": 1, "id": "mine"}, "'id'"),
        ({"seed": 1, "split": "test"}, "'split'"),
        ({"seed": 1, "sead": 2}, "'sead'"),
    ],
)
def test_a_malformed_opening_is_refused_with_a_sentence(opening, names):
    async def scenario(client):
        return sentence(await client.post("/sessions", json=opening), 422)

    assert names in serve(scenario)


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        (b"{", 422, "not JSON"),
        (b"\xff\xfe\x00", 400, "could not be parsed"),
        (b"[" * 9000, 400, "could not be parsed"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "could not be parsed"),
        (b" " * 100_000, 413, "at most 16384 bytes"),
    ],
)
def test_an_opening_that_is_no_json_is_refused_with_a_sentence(body, status, names):
    async def scenario(client):
        return sentence(await client.post("/sessions", content=body, headers=JSON), status)

    assert names in serve(scenario)


def test_a_body_without_its_content_type_is_told_so():
    async def scenario(client):
        return sentence(await client.post("/sessions", content=b'{"seed": 1}'), 422)

    assert "Content-Type: application/json" in serve(scenario)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/sessions", 405), ("DELETE", "/sessions/mine", 422)],
)
def test_a_wrong_address_is_refused_with_a_sentence(method, path, status):
    async def scenario(client):
        return sentence(await client.request(method, path), status)

    assert "GET /docs" in serve(scenario)
