"""The tasks: Wordle as TRL sees it and its held-out games, on a real environment, and reverse-text."""

import asyncio
import contextlib
import itertools
import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from string import ascii_lowercase
from types import SimpleNamespace

import httpx
import pytest
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync import ConfigError
from env_space import app
from env_space.app import create_app
from env_space.sessions import Sessions
from env_space.settings import Settings
from tests.support import tiny_policy as tiny
from tests.support.http_server import Request, answering
from tests.support.serving import serving
from trainer.demo.processes import Processes, free_port
from trainer.policies.tokens import build_tokenizer
from trainer.settings import Settings as TrainerSettings
from trainer.tasks import make_task, reverse_text, wordle
from trainer.tasks.wordle import GameLostError, WordleEnv, make_dataset


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
        first = factory()
        second = factory()
        for env in (first, second):
            env.reset(**row)
        games.append((solve(first, words), solve(second, words), reward(first), reward(second)))
    assert all(a == b and x == y for a, b, x, y in games)
    assert len({secret for secret, *_ in games}) > 4


def test_a_solved_game_pays_and_is_over_and_giving_up_costs(url, words):
    """One instance plays game after game."""
    env = WordleEnv(url)
    env.reset(seed=3)
    with pytest.raises(ValueError, match="refused"):
        guess(env, 12345)  # takes no turn
    assert solve(env, words)
    assert reward(env) > 1.0
    with pytest.raises(ValueError, match="the game is over"):
        guess(env, words[0])
    env.reset(seed=3)
    assert reward(env) < 0
    env.reset(seed=3)
    guess(env, "zzzzz")
    assert reward(env) < 0


def test_every_guess_is_counted_but_not_those_of_a_lost_game(words):
    with serving(create_app(Settings(answers=128))) as url:
        env = WordleEnv(url)
        env.reset(seed=3)
        assert env.rates == {}
        guess(env, "zzzzz")
        secret = solve(env, words)
        assert env.rates == {"games/solve_rate": (bool(secret), 1), "games/invalid_rate": (1, env._turn)}
        env.reset(seed=3)
        guess(env, secret)
        assert reward(env)
        assert env.rates == {"games/solve_rate": (True, 1), "games/invalid_rate": (0, 1)}
        env.reset(seed=4)
        guess(env, "zzzzz")
    with serving(create_app(Settings(answers=128))) as url:  # it has lost its games
        env._entry = url
        assert reward(env) is None
        assert env.rates == {}


@pytest.fixture
def six_letters() -> Iterator[str]:
    with serving(create_app(Settings(answers=128, length=6))) as url:
        yield url


def test_words_of_another_length_than_the_prompt_says_end_the_run(six_letters):
    places = {"model": "m", "bucket": "file:///b", "run": "first", "replicas": ["http://x"]}
    sentence = "has words of 6 letters, but the prompt says 5: write one with --prompt"
    for prompt in ("", "Find a word of six letters."):
        settings = TrainerSettings(**places, env_url=six_letters, prompt=prompt)
        env = wordle.make_task(settings, 1, seed=0).environment()
        for play in (lambda env: guess(env, "planet"), reward):
            env.reset(seed=1)
            with contextlib.nullcontext() if prompt else pytest.raises(ConfigError, match=sentence):
                play(env)


def test_a_game_goes_on_at_the_address_that_its_file_names_now(url, tmp_path, monkeypatch):
    """A Job that was started again has another URL."""
    file = tmp_path / "env"
    file.write_text(f"http://127.0.0.1:{free_port()}\n")

    async def moved(_: float) -> None:
        (tmp_path / "new").write_text(f"{url}\n")
        (tmp_path / "new").replace(file)

    env = WordleEnv(str(file))
    env.reset(seed=3)
    monkeypatch.setattr(wordle, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": moved}))
    assert guess(env, "crane")


@pytest.mark.full
def test_a_restarted_environment_fails_its_games_but_not_the_run(words, tmp_path):
    port = free_port()
    env = WordleEnv(f"http://127.0.0.1:{port}")
    settings = {"WORDLE_HOST": "127.0.0.1", "WORDLE_PORT": str(port), "WORDLE_ANSWERS": "128"}
    env.reset(seed=1)
    with Processes(tmp_path) as space:
        space.start("env", ["env_space.app"], settings)
        guess(env, "zzzzz")  # waits until the server is up
    with ThreadPoolExecutor(1) as pool, Processes(tmp_path) as space:
        lost = pool.submit(guess, env, words[0])  # waits for the server to come back
        space.start("env", ["env_space.app"], settings)
        with pytest.raises(ValueError, match="Session"):
            lost.result(timeout=300)
        assert reward(env) is None, "not scored, rather than scored wrongly"
        env.reset(seed=2)
        assert guess(env, words[0])


def test_a_game_that_expired_before_its_first_turn_is_not_scored(monkeypatch):
    """A refused guess takes no turn, so the next request opens the session again."""
    clock = [0.0]
    monkeypatch.setattr(app, "Sessions", partial(Sessions, clock=lambda: clock[0]))
    with serving(create_app(Settings(answers=128, session_ttl_s=600))) as url:
        for play in (lambda env: guess(env, "crane"), reward):
            env = WordleEnv(url)
            env.reset(seed=1)
            with pytest.raises(ValueError, match="refused"):
                guess(env, 12345)
            clock[0] += 601
            with pytest.raises(GameLostError) if play is not reward else contextlib.nullcontext():
                play(env)
            assert reward(env) is None


GAME = {"done": False, "solved": False, "observation": "c1-", "reward": 0.5}
ODD = [GAME | {"reward": odd} for odd in (float("inf"), float("nan"), 1e300, "a lot", None, True)]
ODD += [GAME | {"observation": "x" * 1001}, [], "game", {}, GAME | {"observation": "x" * (1 << 20)}]
NESTED = b"[" * 60_000  # deeper than Python's parser goes


@pytest.mark.finding("N5")
@pytest.mark.parametrize("answer", [*ODD, NESTED], ids=lambda answer: str(answer)[:40])
@pytest.mark.parametrize("to_a_guess", [True, False], ids=["guess", "end"])
def test_what_is_no_games_answer_loses_the_game_and_is_not_scored(answer, to_a_guess):
    def answers(request: Request):
        odd = request.path.count("/") == (3 if to_a_guess else 2)
        return 200, {}, answer if odd and answer is NESTED else json.dumps(answer if odd else GAME).encode()

    with answering(answers) as somebody:
        env = WordleEnv(somebody)
        env.reset(seed=3)
        with pytest.raises(GameLostError) if to_a_guess else contextlib.nullcontext():
            guess(env, "crane")
        assert reward(env) is None


@pytest.mark.finding("N5")
def test_a_busy_environment_is_asked_again_whatever_pause_it_asks_for(monkeypatch):
    monkeypatch.setattr(asyncio, "sleep", partial(asyncio.sleep, 0))
    starts = [(200, {}, b"\n<!DOCTYPE html>"), (500, {}, b"<html>"), (408, {}, b"")]
    busy = iter([(201, {}, b"{}"), (503, {"Retry-After": "1e9"}, b"{}"), (429, {}, b""), *starts])
    with answering(lambda request: next(busy, (200, {}, json.dumps(GAME).encode()))) as somebody:
        env = WordleEnv(somebody)
        env.reset(seed=3)
        assert guess(env, "crane") == GAME["observation"]


def test_a_refusal_is_quoted():
    with answering(lambda request: (401, {}, b'{"detail": "send the key"}')) as somebody:
        env = WordleEnv(somebody)
        env.reset(seed=3)
        with pytest.raises(ValueError, match=f"^{somebody} refused: send the key$"):
            reward(env)


@pytest.mark.finding("M13")
def test_a_refusal_that_cannot_be_parsed_is_one_sentence():
    with answering(lambda request: (401, {}, b'{"detail": ' + NESTED)) as somebody:
        env = WordleEnv(somebody)
        env.reset(seed=3)
        with pytest.raises(ValueError, match=r"answered 401 and is not the Wordle Space: check --env_url"):
            guess(env, "crane")


WORDS = ["".join(letters) for letters in itertools.product(ascii_lowercase[:5], repeat=3)]
TOKENIZER = build_tokenizer([f"Ġ{word}" for word in WORDS])


def test_the_texts_of_a_seed_are_always_the_same_and_those_of_another_are_others():
    rows, again, other = (reverse_text.make_dataset(TOKENIZER, 50, seed) for seed in (3, 3, 4))
    assert rows["text"][:] == again["text"][:] != other["text"][:]
    assert {len(text.split()) for text in rows["text"]} == {3}
    assert set(" ".join(rows["text"]).split()) <= set(WORDS)
    system, user = rows[0]["prompt"]
    assert (system["role"], system["content"]) == ("system", reverse_text.PROMPT)
    assert (user["role"], user["content"]) == ("user", rows[0]["text"])


def test_held_out_texts_share_no_word_with_those_of_training():
    trained = set(" ".join(reverse_text.texts(TOKENIZER, 500, seed=1)).split())
    held_out = set(" ".join(reverse_text.texts(TOKENIZER, 500, seed=1, held_out=True)).split())
    assert trained | held_out == set(WORDS)
    assert not trained & held_out


def test_words_that_are_not_one_token_are_not_asked():
    tokenizer = build_tokenizer([*(f"Ġ{word}" for word in WORDS), "abc", "Ġa", "ĠAbc", "Ġab1"])
    assert reverse_text.words_of(tokenizer) == reverse_text.words_of(TOKENIZER)


@pytest.mark.parametrize(
    ("said", "earned"),
    [
        ("<reversed_text>xof der</reversed_text>", 1.0),
        ("Sure! <reversed_text> xof der\n</reversed_text> Anything else?", 1.0),
        ("<reversed_text>xof ded</reversed_text>", 6 / 7),
        ("xof der", 0.0),
        ("<reversed_text>xof der", 0.0),
        ("<reversed_text></reversed_text>", 0.0),
    ],
)
def test_an_answer_earns_its_likeness_in_the_first_tags(said, earned):
    completions = [[{"role": "assistant", "content": said}]]
    assert reverse_text.reward_reversed(completions, text=["red fox"]) == [pytest.approx(earned)]


@pytest.mark.parametrize(
    ("options", "prompts"),
    [({"max_steps": 3}, 6), ({"max_steps": 3, "gradient_accumulation_steps": 4}, 24), ({}, 2000)],
    ids=["each step has two", "a step of four batches", "no limit of steps"],
)
def test_a_task_has_the_prompts_that_the_run_trains_on(tmp_path, monkeypatch, options, prompts):
    asked = []
    monkeypatch.setattr(reverse_text, "make_task", lambda _, prompts, __: asked.append(prompts))
    config = AsyncGRPOConfig(
        str(tmp_path), per_device_train_batch_size=8, num_generations=4, use_cpu=True, **options
    )
    places = {"bucket": "file:///b", "run": "first", "replicas": ["http://x"]}
    make_task(TrainerSettings(model="m", task="reverse_text", **places), config)
    assert asked == [prompts]


def test_a_model_whose_tokenizer_knows_no_words_is_refused_by_name(tmp_path):
    tiny.build(tmp_path / "base", tie=True, seed=0)
    places = {"bucket": "file:///b", "run": "first", "replicas": ["http://x"]}
    script = TrainerSettings(model=str(tmp_path / "base"), task="reverse_text", **places)
    with pytest.raises(SystemExit, match=r"--task reverse_text: .* only 0 English words"):
        make_task(script, AsyncGRPOConfig(str(tmp_path), max_steps=1, use_cpu=True))
