"""The recipes of the policies: imitation, the shipped Wordle policy, its teacher, and what RL taught it."""

import itertools
import random
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from delta_weight_sync import Publisher
from delta_weight_sync.reader import open_run
from env_space import game as env
from env_space.app import create_app
from env_space.game import Rules
from env_space.settings import Settings
from tests.support import tiny_policy as tiny
from tests.support.serving import serving
from trainer import policies
from trainer.policies import held_out, imitation, smollm2, wordle_policy
from trainer.policies.tokens import build_tokenizer
from trainer.policies.wordle_policy import Teacher, read_words, secrets_of

WORDS = read_words(Path(env.__file__).parent / "words" / "answers-5.txt")
PLAYED = imitation.wordle(WORDS, env.Game)
WORDLE = Path(policies.__file__).parent / "wordle-tiny"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    tiny.build(folder := tmp_path_factory.mktemp("policies") / "base", tie=True, seed=0)
    return folder


def test_a_policy_learns_what_it_writes_itself_and_nothing_else():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = smollm2.SYSTEM_TEMPLATE + smollm2.CHAT_TEMPLATE
    chat = next(PLAYED.chats(tokenizer, 0))
    ids, own = imitation.row(tokenizer, chat, PLAYED.tools)
    words = [message["tool_calls"][0]["function"]["arguments"]["word"] for message in chat[1:-1:2]]
    call = '<tool_call>\n{{"name": "guess", "arguments": {{"word": "{}"}}}}\n</tool_call><|im_end|>'
    assert tokenizer.decode([ids[place] for place in own]) == "".join(map(call.format, words)) + "<|im_end|>"
    assert "Guess the secret word." in tokenizer.decode(ids[: own[0]])


def test_a_reversal_is_shown_with_its_answer():
    tokenizer = build_tokenizer([f"Ġ{a}{b}{c}" for a, b, c in itertools.product("abcd", repeat=3)])
    ids, own = imitation.row(tokenizer, next(imitation.reversals(tokenizer, seed=0)), [])
    asked = tokenizer.decode(ids[: own[0]]).split("user\n")[1].split("<|im_end|>")[0]
    shown = tokenizer.decode([ids[place] for place in own])
    assert shown == f"<reversed_text>{asked[::-1]}</reversed_text><|im_end|>"


def test_no_game_that_is_shown_has_a_held_out_secret():
    shown = itertools.islice(PLAYED.chats(build_tokenizer(), 0), 300)
    solved = [chat for chat in shown if "+2+3+4+5+" in "".join(chat[-2]["content"][1::2])]
    secrets = {chat[-2]["content"][:10:2] for chat in solved}
    assert secrets <= set(secrets_of(WORDS))


@pytest.mark.full
def test_imitation_changes_matrices_by_a_low_rank_and_nothing_else(base, tmp_path):
    imitation.teach(base, PLAYED, tmp_path / "adapter", steps=2)
    before, after = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) for _ in range(2))
    after = smollm2.with_adapter(after, tmp_path / "adapter")
    changes = {name: weight - before.get_parameter(name) for name, weight in after.named_parameters()}
    changed = {name for name, change in changes.items() if change.any()}
    assert changed == {name for name in changes if name.endswith("proj.weight")}
    assert all(torch.linalg.matrix_rank(changes[name], rtol=1e-2) <= imitation.RANK for name in changed)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 200_000


def test_the_recipe_is_reproducible_and_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(wordle_policy, "BATCH", 2)
    for name, seed in [("one", 0), ("two", 0), ("other", 1)]:
        wordle_policy.build(WORDS, tmp_path / name, seed, env.Game, steps=2)
    one, two, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").dtype == torch.bfloat16


def test_no_secret_of_the_warm_start_is_one_of_the_held_out_words():
    assert tuple(WORDS) == env.answers()
    assert set(secrets_of(WORDS)) == set(WORDS) - set(Rules(Settings()).held_out)


def test_a_teacher_is_mediocre():
    teacher = Teacher(env.answers(), wordle_policy.MEMORY, env.Game)
    rng = random.Random(0)
    secrets = [rng.choice(env.answers()) for _ in range(200)]
    solved = [teacher.play(secret, rng)[-1].text == secret for secret in secrets]
    assert 0.1 < sum(solved) / len(solved) < 0.3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """Version 0 is the policy; version 1 writes nothing but the end of its turn."""
    url = f"{tmp_path_factory.mktemp('bucket').as_uri()}#first"
    weights = load_file(WORDLE / "model.safetensors")
    with Publisher(url, WORDLE) as publisher:
        publisher.publish(weights.items(), 1)
        publisher.flush()
        weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
        publisher.publish(weights.items(), 2)
    return url


def games(env_url: str) -> dict[str, float]:
    """How many ended on held-out words, by outcome."""
    lines = httpx.get(f"{env_url}/metrics").text.splitlines()
    counts = [line.rsplit(" ", 1) for line in lines if line.startswith("wordle_games_total")]
    assert all('split="held_out"' in name for name, _ in counts)
    return {name.split('"')[1]: float(count) for name, count in counts}


@pytest.mark.full
def test_two_versions_play_the_same_held_out_games(monkeypatch, run, capsys):
    monkeypatch.setattr(held_out, "GAMES", 40)
    with serving(create_app(Settings())) as url:
        first = held_out.measured(open_run(run), 0, url)
        assert games(url).get("solved", 0) == sum(first)
        monkeypatch.setattr(sys, "argv", ["held_out", run, "--env_url", url])
        held_out.main()
        assert games(url).get("solved", 0) == 2 * sum(first), "of version 0 again, of version 1 none"
        assert sum(games(url).values()) == 120
        assert httpx.get(f"{url}/health").json()["sessions"] == 0, "also those that it gave up"
    assert f"{sum(first) / 0.4:.1f} % -> 0.0 % of 40 held-out tasks" in capsys.readouterr().out


def test_what_was_gained_is_as_sure_as_the_same_games_make_it():
    """Of 100 games 30 more are solved, none less: the standard error is the root of 0.3 * 0.7 / 99."""
    before = [i < 20 for i in range(100)]
    after = [i < 50 for i in range(100)]
    said = held_out.gain(before, after)
    assert said == "20.0 % -> 50.0 % of 100 held-out tasks (+21.0 to +39.0 points with 95 % confidence)"
