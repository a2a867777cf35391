"""The game as TRL sees it, against the real environment service on loopback."""

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from env_space.app import create_app
from env_space.settings import Settings
from tests.support.serving import serving
from trainer.demo.__main__ import env_settings
from trainer.demo.processes import Processes, free_port
from trainer.tasks.wordle import WordleEnv, make_dataset


@pytest.fixture(scope="module")
def url():
    with serving(create_app(Settings(answers=128))) as url:
        yield url


@pytest.fixture(scope="module")
def words(url):
    return httpx.get(f"{url}/words").json()["answers"]


def guess(env: WordleEnv, word: str) -> str:
    return asyncio.run(env.guess(word))


def reward(env: WordleEnv) -> float | None:
    return asyncio.run(env.get_reward())


def solve(env: WordleEnv, words: list[str]) -> str:
    """Play until the secret is found, by elimination; returns it."""
    left = list(words)
    while True:
        word = left[0]
        observation = guess(env, word)
        marks = observation.split()[0][2::3]
        if marks == "+++++":
            return word
        if observation.endswith("game over"):
            return ""
        left = [w for w in left[1:] if all((w[i] == word[i]) == (m == "+") for i, m in enumerate(marks))]


def test_members_of_a_group_play_the_same_secret(url, words):
    rows = make_dataset("Play Wordle.", 30, seed=7)
    assert len(set(rows["seed"])) == 30
    factory = pickle.loads(pickle.dumps(partial(WordleEnv, url)))  # TRL spawns its worker
    games = []
    for row in rows.select(range(12)):
        first, second = factory(), factory()
        for env in (first, second):
            env.reset(**row)
        games.append((solve(first, words), solve(second, words), reward(first), reward(second)))
    assert all(a == b and x == y for a, b, x, y in games)
    assert len({secret for secret, *_ in games}) > 4


def test_a_solved_game_pays_and_is_over(url, words):
    env = WordleEnv(url)
    env.reset(seed=3)
    assert solve(env, words)
    assert reward(env) > 1.0
    with pytest.raises(ValueError, match="the game is over"):
        guess(env, words[0])


def test_giving_up_costs(url):
    env = WordleEnv(url)
    env.reset(seed=3)
    assert reward(env) < 0
    env.reset(seed=3)
    guess(env, "zzzzz")
    assert reward(env) < 0


def test_an_instance_is_reused_for_the_next_game(url, words):
    env = WordleEnv(url)
    for seed in (1, 2):
        env.reset(seed=seed)
        solve(env, words)
        assert reward(env) is not None


@pytest.mark.full
def test_a_restarted_environment_fails_its_games_but_not_the_run(words, tmp_path):
    port = free_port()
    env = WordleEnv(f"http://127.0.0.1:{port}")
    settings = env_settings(port) | {"WORDLE_ANSWERS": "128"}
    env.reset(seed=1)
    with Processes(tmp_path) as space:
        space.start("env", ["env_space.app"], settings)
        guess(env, "zzzzz")  # waits until the server is up
    with ThreadPoolExecutor(1) as pool, Processes(tmp_path) as space:
        lost = pool.submit(guess, env, words[0])  # waits for the server to come back
        space.start("env", ["env_space.app"], settings)
        with pytest.raises(ValueError, match="session"):
            lost.result(timeout=300)
        assert reward(env) is None, "not scored, rather than scored wrongly"
        env.reset(seed=2)
        assert guess(env, words[0])
