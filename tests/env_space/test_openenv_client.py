"""OpenEnv's real client, its validation command and TRL's way to play, from an environment of their own.

`openenv` cannot share an environment with vLLM: they need different releases of MCP.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import env_space
from env_space.game import feedback, rules_from
from env_space.settings import Settings
from tests.env_space.service import ROOT, space

pytestmark = pytest.mark.long  # it installs a hundred packages

OPENENV = "openenv==0.10.0"
FOLDER = Path(env_space.__file__).parent
RULES = rules_from(Settings(answers=60))


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
def url(tmp_path_factory):
    with space(tmp_path_factory.mktemp("openenv"), WORDLE_ANSWERS="60") as running:
        yield running.url


@pytest.fixture(scope="module")
def seen(openenv, url):
    """What OpenEnv's client and validator saw of the service."""
    command = [openenv / "python", "-m", "tests.env_space.openenv_client", url, FOLDER, *RULES.train]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WORDLE_")}
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_full_game_as_trl_plays_it(seen):
    game = seen["trl"]
    assert "5 letters" in game["prompt"]
    assert "You attempted an invalid move. 'zzzzz' is not in the word list. You have 5" in game["invalid"][0]
    assert game["invalid"][1] == 0
    assert game["done"]
    *_, (last, answer) = game["turns"]
    assert last in RULES.train
    assert answer.endswith("You found the word.")
    assert game["reward"] > 1
    assert game["again"] == {"reward": 0.0, "done": False}, "the same client starts another game"


def test_the_feedback_of_the_whole_game_is_that_of_the_found_word(seen):
    secret = seen["trl"]["turns"][-1][0]
    for word, answer in seen["trl"]["turns"]:
        marks = feedback(word, secret).translate(str.maketrans("+?-", "GYX"))
        assert f"\n{' '.join(word.upper())}\n{' '.join(marks)}\n" in answer


def test_a_seed_is_the_same_game_for_every_client_and_over_both_protocols(seen):
    assert seen["seeded"]["same"]
    assert seen["seeded"]["feedback"] == feedback("crane", RULES.deal(11).secret)


def test_the_state_names_the_episode_and_hides_the_secret(seen):
    state = seen["seeded"]["state"]
    assert (state["episode_id"], state["step_count"], state["max_turns"]) == ("mine", 1, 6)
    assert RULES.deal(11).secret not in json.dumps(state)


def test_a_step_without_a_reset_is_refused(seen):
    assert seen["refusal"] == (
        "Server error: No game is in play on this connection; send a reset first. (code: EXECUTION_ERROR)"
    )


@pytest.mark.parametrize("check", ["startup", "reward_well_formed", "observation_schema", "state_contract"])
def test_openenvs_runtime_checks_pass(seen, check):
    assert seen["runtime"][f"runtime.{check}"][0] == "pass", seen["runtime"]


def test_openenvs_command_passes_the_running_service_and_the_folder(seen):
    (code, output), (folder_code, folder_output) = seen["validate_url"], seen["validate_folder"]
    assert code == 0, output
    assert output.count("PASS ") == 6
    assert output.endswith("Verdict: PASS\n")
    assert folder_code == 0, folder_output
    assert "PASS  static.manifest" in folder_output


def test_many_games_at_once_with_openenvs_client(seen):
    report = seen["load"]
    assert (report["errors"], report["first_errors"]) == (0, [])
    assert report["games"] == 64
