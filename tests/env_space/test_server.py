"""`python -m env_space.app` as a Space runs it: real processes and sockets, many games, metrics, logs."""

import asyncio
import json
import os
import re
import socket
import subprocess

import httpx
import pytest

from tests.env_space import load
from tests.env_space.service import COMMAND, PATIENCE_S, ROOT, space

pytestmark = pytest.mark.full


def read_log(folder):
    return [json.loads(line) for line in (folder / "space.log").read_text().splitlines()]


def metric(url, name):
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_S).text
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def play(client, secret, *words, seed=5):
    session = client.post("/sessions", json={"seed": seed}).json()["session"]
    for turn, word in enumerate([*words, secret], 1):
        move = client.post(f"/sessions/{session}/guess", json={"word": word, "turn": turn}).json()
    return move


def test_games_are_counted_for_prometheus_and_logged_as_one_line_of_json_each(tmp_path):
    with (
        space(tmp_path, WORDLE_ANSWERS="1") as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        [secret] = client.get("/words").json()["answers"]
        assert play(client, secret)["reward_parts"]["solved"] == 1.25
        play(client, secret, "zonal", "zonal", "zzzzz")
        play(client, "zonal", *["zzzzz"] * 5)
        client.delete(f"/sessions/{client.post('/sessions', json={'seed': 1}).json()['session']}")
        client.post("/sessions", json={"seed": 1})
        games = 'wordle_games_total{{outcome="{}",split="train",via="http"}}'.format
        counted = {how: metric(running.url, games(how)) for how in ("solved", "lost", "gave_up")}
        guesses = {
            kind: metric(running.url, f'wordle_guesses_total{{kind="{kind}"}}')
            for kind in ("new", "repeated", "invalid")
        }
        active = metric(running.url, "wordle_active_sessions"), metric(running.url, "wordle_max_sessions")
        moves = metric(running.url, 'wordle_move_seconds_count{via="http"}')
    assert counted == {"solved": 2, "lost": 1, "gave_up": 1}
    assert guesses == {"new": 4, "repeated": 1, "invalid": 6}
    assert active == (1, 1024)
    assert moves == 11

    lines = read_log(tmp_path)
    games = [line for line in lines if line["message"] == "game ended"]
    assert [game["outcome"] for game in games] == ["solved", "solved", "lost", "gave_up"]
    assert (games[1]["turns"], games[1]["repeated"], games[1]["invalid"], games[1]["seed"]) == (4, 1, 1, 5)
    assert games[1]["reward"] == pytest.approx(sum(games[1]["reward_parts"].values()))
    assert "stopped with 1 games in play" in [line["message"] for line in lines]


def test_a_stop_lets_the_request_in_hand_finish_and_is_quick(tmp_path):
    with space(tmp_path) as running:
        host, port = running.url.removeprefix("http://").split(":")
        body = b'{"seed": 1}'
        head = (
            f"POST /sessions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
        )
        with socket.create_connection((host, port)) as link:
            link.settimeout(PATIENCE_S)
            link.sendall(head.encode() + body[:5])
            assert link.recv(100).startswith(b"HTTP/1.1 100"), "it has the request in hand and asks for more"
            running.process.terminate()
            running.says("Shutting down")
            link.sendall(body[5:])
            assert link.recv(100).startswith(b"HTTP/1.1 201")
        running.process.wait(PATIENCE_S)
    assert "timeout graceful shutdown exceeded" not in (tmp_path / "space.log").read_text()


def test_many_games_at_once_over_plain_http(tmp_path):
    with space(tmp_path, WORDLE_MAX_SESSIONS="128") as running:
        report = asyncio.run(load.run(running.url, "http", games=128, seconds=0))
    assert (report["errors"], report["first_errors"]) == (0, [])
    assert report["games"] == 128


def test_a_wrong_setting_stops_the_start_with_a_sentence():
    environ = os.environ | {"WORDLE_ANSWERS": "1000000"}
    stopped = subprocess.run(COMMAND, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert stopped.returncode == 1
    assert stopped.stderr.startswith("The Wordle Space cannot start: There are ")
    assert "Traceback" not in stopped.stderr
