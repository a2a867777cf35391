"""OpenEnv's messages on a socket, valid and invalid, and what OpenEnv's real client and validator say."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import venv
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from env_space.app import create_app
from env_space.game import Rules, feedback
from env_space.openenv import MAX_IDLE
from env_space.settings import Settings
from tests import idle_time
from tests.env_space.service import BRIDE, ROOT, service, space


@contextmanager
def connection(**settings):
    with service(**settings).websocket_connect("/ws") as socket:
        yield socket


def say(socket, kind, **data):
    socket.send_text(json.dumps({"type": kind, "data": data}))
    return socket.receive_json()


def problem(answer, code):
    """The message of an error, which must be a sentence."""
    assert (answer["type"], answer["data"]["code"]) == ("error", code)
    assert answer["data"]["message"].endswith((".", "send."))
    return answer["data"]["message"]


def playing(client):
    return client.get("/health").json()["sessions"]


def test_a_move_has_everything_that_plain_http_has():
    with service() as client, client.websocket_connect("/ws") as socket:
        opened = say(socket, "reset", seed=BRIDE)["data"]
        moved = say(socket, "step", message="Maybe [crane]?")["data"]
        session = client.post("/sessions", json={"seed": BRIDE}).json()["session"]
        move = client.post(f"/sessions/{session}/guess", json={"word": "crane", "turn": 1}).json()
    assert (opened["reward"], opened["done"], opened["observation"]["info"]) == (None, False, {})
    assert moved["observation"]["info"] == move
    assert (moved["reward"], moved["done"]) == (move["reward"], move["done"])
    text = moved["observation"]["messages"][0]["content"]
    assert text.startswith(opened["observation"]["messages"][0]["content"])
    assert text.endswith("[GAME] Feedback:\nC R A N E\nX G X X G\nYou have 5 guesses left.")


@pytest.mark.parametrize(
    "message", ["[bride]", "bride", " BRIDE\n", "not [crane] but [bride]", "<b>[bride]</b>"]
)
def test_the_guess_is_the_last_text_in_brackets_or_the_whole_message(message):
    with connection() as socket:
        say(socket, "reset", seed=BRIDE)
        moved = say(socket, "step", message=message)["data"]
    assert moved["done"]
    assert moved["reward"] == pytest.approx(1.45)


def test_a_lost_game_reveals_the_word_and_accepts_no_guess():
    with connection() as socket:
        say(socket, "reset", seed=BRIDE)
        for word in ["zonal", "zonal", "zzzzz", "", "\ud800" * 900, "[a"]:
            moved = say(socket, "step", message=word)["data"]
        late = say(socket, "step", message="bride")
    text = moved["observation"]["messages"][0]["content"]
    assert text.count("You attempted an invalid move.") == 4
    assert "'zonal' was already guessed in turn 1." in text
    assert text.endswith("The game is over; the word was bride.")
    assert moved["observation"]["info"]["reward_parts"]["invalid"] == pytest.approx(-0.2)
    assert problem(late, "EXECUTION_ERROR").startswith("The game ended after turn 6")


def test_the_state_counts_the_steps_since_the_reset():
    with connection() as socket:
        early = say(socket, "step", message="[crane]")
        empty = say(socket, "state")["data"]
        say(socket, "reset", seed=1, episode_id="first", difficulty="unknown parameters are ignored")
        say(socket, "step", message="[crane]")
        first = say(socket, "state")["data"]
        say(socket, "reset", seed=1)
        second = say(socket, "state")["data"]
    without = "No game is in play on this connection: send a reset first."
    assert problem(early, "EXECUTION_ERROR") == without
    assert (empty["episode_id"], empty["step_count"]) == (None, 0)
    assert (first["episode_id"], first["step_count"], first["last_info"]["word"]) == ("first", 1, "crane")
    assert (second["step_count"], second["last_info"]) == (0, {})
    assert second["episode_id"] != "first"


def test_games_without_a_seed_have_different_secrets():
    with connection(answers=1000) as socket:
        words = set()
        for _ in range(5):
            say(socket, "reset")
            for _ in range(6):
                last = say(socket, "step", message="[zonal]")
            words.add(last["data"]["observation"]["info"]["secret"])
    assert len(words) > 1


@pytest.mark.parametrize(
    ("raw", "code", "names"),
    [
        ("{", "INVALID_JSON", "JSON object"),
        ("null", "INVALID_JSON", "JSON object"),
        ("[" * 9000, "INVALID_JSON", "JSON object"),
        ("9" * 9000, "INVALID_JSON", "JSON object"),
        ('{"data": {}}', "UNKNOWN_TYPE", "reset, step, state, close"),
        ('{"type": ["step"]}', "UNKNOWN_TYPE", "reset, step, state, close"),
        ('{"type": "step"}', "VALIDATION_ERROR", "'message'"),
        ('{"type": "step", "data": 3}', "VALIDATION_ERROR", "'data'"),
        ('{"type": "step", "data": {"message": 3}}', "VALIDATION_ERROR", "'message'"),
        ('{"type": "step", "data": {"message": "crane", "word": "crane"}}', "VALIDATION_ERROR", "'word'"),
        ('{"type": "reset", "data": {"seed": "three"}}', "VALIDATION_ERROR", "'seed'"),
        ('{"type": "reset", "data": {"split": "test"}}', "VALIDATION_ERROR", "'split'"),
    ],
)
def test_a_malformed_message_is_refused_in_a_sentence_and_costs_no_turn(raw, code, names):
    with connection() as socket:
        say(socket, "reset", seed=BRIDE)
        socket.send_text(raw)
        assert names in problem(socket.receive_json(), code)
        assert say(socket, "state")["data"]["step_count"] == 0


def test_a_connection_counts_as_a_game_from_its_reset_to_its_end():
    with service() as client:
        with client.websocket_connect("/ws") as socket:
            before = playing(client)
            say(socket, "reset", seed=1)
            say(socket, "reset", seed=2)
            during = playing(client)
        with client.websocket_connect("/ws") as socket:
            say(socket, "reset", seed=1)
            socket.send_text('{"type": "close"}')
            with pytest.raises(WebSocketDisconnect):
                socket.receive_json()
        after = playing(client)
    assert (before, during, after) == (0, 1, 0)


def test_a_full_service_answers_with_openenvs_code_until_a_game_ends():
    with service(max_sessions=1) as client, client.websocket_connect("/ws") as second:
        with client.websocket_connect("/ws") as first:
            say(first, "reset", seed=1)
            full = say(second, "reset", seed=1)
        assert problem(full, "CAPACITY_REACHED").startswith("1 games are in play")
        assert (full["data"]["active_sessions"], full["data"]["max_sessions"]) == (1, 1)
        assert say(second, "reset", seed=1)["type"] == "observation"


@pytest.mark.finding("N17")
def test_connections_that_are_only_held_open_make_room_for_new_ones():
    with service(max_sessions=1) as client, ExitStack() as opened:  # one event loop for all
        player, *held = (opened.enter_context(client.websocket_connect("/ws")) for _ in range(MAX_IDLE))
        say(player, "reset")
        held += [opened.enter_context(client.websocket_connect("/ws")) for _ in range(2)]
        assert say(held[-1], "state")["type"] == say(player, "state")["type"] == "state"
        with pytest.raises(WebSocketDisconnect) as closed:
            held[0].receive_json()
        assert closed.value.code == 1013


def test_an_idle_connection_is_closed_with_a_sentence_and_its_game_given_up():
    """The app runs in a loop in which ten minutes take no time."""
    app = create_app(Settings())
    sent = []
    reset = json.dumps({"type": "reset", "data": {"seed": 1}})
    said = iter([{"type": "websocket.connect"}, {"type": "websocket.receive", "text": reset}])

    async def receive():
        return next(said, None) or await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    socket = {"type": "websocket", "path": "/ws", "raw_path": b"/ws", "query_string": b"", "headers": []}
    idle_time.run(app(socket, receive, send))
    assert [message["type"] for message in sent] == ["websocket.accept", "websocket.send", "websocket.close"]
    assert sent[-1]["reason"] == "Closed after 600 s without a message: connect again and send a reset."
    assert playing(TestClient(app)) == 0


def test_the_prompt_names_the_length_and_hard_mode():
    with connection(length=7, hard_mode=True) as socket:
        prompt = say(socket, "reset", seed=1)["data"]["observation"]["prompt"]
    assert "an English word of 7 letters" in prompt
    assert "like [strange]" in prompt
    assert "must use every hint" in prompt


@pytest.mark.finding("M10")
def test_the_routes_that_openenvs_tools_need():
    with service() as client:
        schema = client.get("/schema").json()
        about = client.get("/metadata").json()
        tools = client.post("/mcp", json={"jsonrpc": "2.0", "id": 7, "method": "tools/list"}).json()
        given = (b'"a"', b'"\\ud800"', b"NaN", b"true", b"[" * 300 + b"]" * 300, b"{}")
        ids = [client.post("/mcp", content=b'{"id":' + each + b"}").json()["id"] for each in given]
        refused = [client.post("/mcp", content=body).json() for body in (b"{}", b"[", b"[]", b"\xff")]
    assert {"seed", "split"} <= schema["reset"]["properties"].keys()
    assert schema["action"]["required"] == ["message"]
    assert {"messages", "reward", "done"} <= schema["observation"]["properties"].keys()
    assert "step_count" in schema["state"]["properties"]
    assert (about["name"], about["version"]) == ("wordle", "0.1.0")
    assert tools == {"jsonrpc": "2.0", "id": 7, "result": {"tools": []}}
    assert ids == ["a", None, None, None, None, None]
    assert {answer["error"]["code"] for answer in refused} == {-32601}


OPENENV = "openenv==0.10.0"
RULES = Rules(Settings(answers=60))


@pytest.fixture(scope="module")
def openenv(request):
    """The `bin` folder of an environment that holds OpenEnv; made once and kept in pytest's cache."""
    folder = Path(request.config.cache.mkdir(OPENENV))
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder)
        venv.create(folder)
        pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(folder / "bin" / "python"), "install"]
        subprocess.run([*pip, OPENENV], check=True, capture_output=True)
        done.touch()
    return folder / "bin"


@pytest.fixture(scope="module")
def seen(openenv, tmp_path_factory):
    """What OpenEnv's client and validator saw of the service."""
    with space(tmp_path_factory.mktemp("openenv"), WORDLE_ANSWERS="60") as running:
        words = ["-m", "tests.env_space.openenv_client", running.url, ROOT / "env_space", *RULES.train]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("WORDLE_")}
        command = [openenv / "python", *words]
        result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_full_game_as_trl_plays_it(seen):
    game = seen["trl"]
    assert "5 letters" in game["prompt"]
    assert "You attempted an invalid move. 'zzzzz' is not in the word list. You have 5" in game["invalid"][0]
    assert game["invalid"][1] == 0
    assert game["done"]
    assert (game["state"]["step_count"], game["state"]["max_turns"]) == (1 + len(game["turns"]), 6)
    *_, (last, answer) = game["turns"]
    assert last in RULES.train
    assert answer.endswith("You found the word.")
    for word, marked in game["turns"]:
        marks = feedback(word, last).translate(str.maketrans("+?-", "GYX"))
        assert f"\n{' '.join(word.upper())}\n{' '.join(marks)}\n" in marked
    assert game["reward"] > 1
    assert game["again"] == {"reward": 0.0, "done": False}, "the same client starts another game"


@pytest.mark.long
def test_openenvs_checks_pass_the_running_service_and_the_folder(seen):
    (code, output) = seen["validate_url"]
    (folder_code, folder_output) = seen["validate_folder"]
    assert code == 0, output
    assert output.count("PASS ") == 6
    assert output.endswith("Verdict: PASS\n")
    assert folder_code == 0, folder_output
    assert "PASS  static.manifest" in folder_output


@pytest.mark.long
def test_many_games_at_once_with_openenvs_client(seen):
    assert seen["errors"] == []
