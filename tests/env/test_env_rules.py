"""What the settings make of a game: the split of the secrets, their length, hard mode, costs."""

import json
import subprocess
import sys

import pytest

from env_space.rules import SplitError, rules_from
from env_space.settings import Settings
from tests.env.service import ROOT, sentence, serve


@pytest.mark.parametrize(("answers", "held_out"), [(None, 353), (128, 12), (10, 1), (9, 0), (1, 0)])
def test_a_tenth_of_the_secrets_is_held_out(answers, held_out):
    rules = rules_from(Settings(answers=answers))
    assert len(rules.held_out) == held_out
    assert not set(rules.train) & set(rules.held_out)


def test_no_training_game_has_a_held_out_secret_and_the_other_way_round():
    rules = rules_from(Settings(answers=30))
    trained = {rules.deal(seed).secret for seed in range(500)}
    held_out = {rules.deal(seed, "held_out").secret for seed in range(500)}
    assert trained == set(rules.train)
    assert held_out == set(rules.held_out)


def test_without_held_out_words_such_a_game_is_refused_with_a_sentence():
    async def scenario(client):
        return sentence(await client.post("/sessions", json={"seed": 1, "split": "held_out"}), 422)

    assert serve(scenario, answers=9) == "No answer is held out of 9; WORDLE_ANSWERS=10 holds out one."
    with pytest.raises(SplitError):
        rules_from(Settings(answers=9)).deal(1, "held_out")


def test_another_process_plays_the_same_game_for_the_same_seed():
    script = (
        "import json; from dataclasses import asdict; from env_space.rules import rules_from\n"
        "from env_space.settings import Settings\n"
        "def game(seed, split):\n"
        "    game = rules_from(Settings()).deal(seed, split)\n"
        "    return [asdict(game.guess(word)) for word in ('crane', 'slote', 'moist', 'crane')]\n"
        "print(json.dumps([game(seed, split) for seed in range(5) for split in ('train', 'held_out')]))"
    )
    environ = {"PYTHONHASHSEED": "1", "LANG": "tr_TR.UTF-8"}, {"PYTHONHASHSEED": "2", "LANG": "C"}
    told = [
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, check=True)
        for env in environ
    ]
    games = json.loads(told[0].stdout)
    assert told[0].stdout == told[1].stdout
    assert len({json.dumps(game) for game in games}) > 5


def test_length_and_hard_mode_and_costs_reach_the_games():
    async def scenario(client):
        opened = (await client.post("/sessions", json={"seed": 3})).json()
        game = f"/sessions/{opened['session']}"
        words = ["cranes", "cranes", "zzzzzz", "crane"]
        moves = [
            (await client.post(f"{game}/guess", json={"word": word, "turn": turn})).json()
            for turn, word in enumerate(words, 1)
        ]
        return opened, moves, (await client.get("/words")).json()

    settings = {"length": 6, "hard_mode": True, "invalid_cost": 0.3, "repeated_cost": 0.2}
    opened, moves, words = serve(scenario, **settings)
    assert (opened["length"], opened["hard_mode"], words["length"]) == (6, True, 6)
    assert {len(word) for word in words["answers"]} == {6}
    assert len(moves[0]["feedback"]) == 6
    assert moves[-1]["reward_parts"]["repetition"] == pytest.approx(-0.2)
    assert moves[-1]["reward_parts"]["invalid"] == pytest.approx(-0.6)


def test_more_answers_than_a_length_has_are_refused():
    with pytest.raises(ValueError, match="There are 1904 answers"):
        rules_from(Settings(answers=2000, length=4))
