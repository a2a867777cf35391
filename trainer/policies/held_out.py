"""Measures what a run has learned, on tasks that training never shows, in plain torch and without a replica.

    python -m trainer.policies.held_out file:///tmp/bucket#demo --env_url http://127.0.0.1:8000

With `--env_url` the policy plays Wordle on the environment's held-out words; otherwise it reverses texts of
words that no training text contains. Version 0 and the newest version get the same tasks.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, TypeVar

import aiohttp
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from delta_weight_sync.reader import RunReader, open_run
from trainer import spaces
from trainer.policies.tokens import TURN_TOKENS, WordleTokens
from trainer.tasks import reverse_text
from trainer.tasks.wordle import WordleEnv

GAMES = 600
TEXTS = 200
_CONFIDENCE = 1.96  # standard errors to each side contain the true value 95 times out of 100
ANSWER_TOKENS = 48  # a right answer has about 20
_T = TypeVar("_T")


class Reply(NamedTuple):
    """The game's answer to a guess."""

    observation: str
    done: bool
    solved: bool


@dataclass
class Game:
    """One conversation. It is also over if the policy wrote anything but a call."""

    number: int
    ids: list[int]
    own: list[int] = field(default_factory=list)  # positions of the tokens that the policy sampled
    guesses: list[str] = field(default_factory=list)
    solved: bool = False
    over: bool = False


# Guesses as (number of the game, word) -> the replies, in the same order.
Referee = Callable[[Sequence[tuple[int, str]]], Sequence[Reply]]


def play(
    model: PreTrainedModel, tokens: WordleTokens, games: int, referee: Referee, generator: torch.Generator
) -> list[Game]:
    """Play games side by side, sampling at temperature 1; `generator` decides what is sampled."""
    played = running = [Game(number, list(tokens.prompt)) for number in range(games)]
    turns = _Turns(model, tokens, games)
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        while running:
            called: list[tuple[Game, str]] = []
            for game, turn in zip(running, turns.sample([game.ids for game in running]), strict=True):
                game.own += range(len(game.ids), len(game.ids) + len(turn))
                game.ids += turn
                if (word := tokens.called_word(turn)) is None:
                    game.over = True
                else:
                    called.append((game, word))
            replies = referee([(game.number, word) for game, word in called])
            for (game, word), reply in zip(called, replies, strict=True):
                game.guesses.append(word)
                game.ids += tokens.response(reply.observation)
                game.over = reply.done
                game.solved = reply.solved
            turns.keep([place for place, game in enumerate(running) if not game.over])
            running = [game for game in running if not game.over]
    return played


class _Turns:
    """Samples the next turn of several games, whose keys and values it keeps; masked tokens pad them."""

    def __init__(self, model: PreTrainedModel, tokens: WordleTokens, games: int) -> None:
        self._model = model
        self._tokens = tokens
        self._cache = DynamicCache(config=model.config)
        self._ids, self._mask = torch.zeros(2, games, 0, dtype=torch.long)

    def sample(self, games: Sequence[list[int]]) -> list[list[int]]:
        """Sample one turn of each game, given its tokens, up to its first stop token."""
        rows = [ids[read:] for ids, read in zip(games, self._mask.sum(1).tolist(), strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([[self._tokens.pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        self._ids = torch.cat([self._ids, ids], 1)
        self._mask = torch.cat([self._mask, mask], 1)
        output = self._model.generate(
            input_ids=self._ids,
            attention_mask=self._mask,
            past_key_values=self._cache,
            max_new_tokens=TURN_TOKENS,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            eos_token_id=self._tokens.stops,
            pad_token_id=self._tokens.pad,
        )
        new = output[:, self._ids.shape[1] :]
        stops = torch.isin(new, torch.tensor(self._tokens.stops)).long()
        own = stops.cumsum(1) - stops == 0
        self._ids, self._mask = output, torch.cat([self._mask, own.long()], 1)
        return [row[kept].tolist() for row, kept in zip(new, own, strict=True)]

    def keep(self, games: Sequence[int]) -> None:
        """Drop all other games."""
        chosen = torch.tensor(games, dtype=torch.long)
        self._ids = self._ids[chosen]
        self._mask = self._mask[chosen]
        self._cache.batch_select_indices(chosen)


def play_at(
    env_url: str,
    model: PreTrainedModel,
    tokens: WordleTokens,
    seeds: Sequence[int],
    split: str,
    rng: torch.Generator,
) -> list[tuple[Game, float | None]]:
    """Play the game of each seed on the Wordle Space, all side by side and without a replica.

    Equal policy, seeds and generator state give equal games. `split` is "train" or "held_out". Returns each
    game with its reward, which is None if a fault of the Space lost the game.
    """
    envs = [WordleEnv(env_url) for _ in seeds]
    for seed, env in zip(seeds, envs, strict=True):
        env.reset(seed, split=split)

    async def guess(env: WordleEnv, word: str) -> Reply:
        return Reply(await env.guess(word), env.done, env.solved)

    def referee(calls: Sequence[tuple[int, str]]) -> list[Reply]:
        return asyncio.run(_gather(guess(envs[number], word) for number, word in calls))

    games = play(model, tokens, len(envs), referee, rng)
    rewards = asyncio.run(_gather(env.get_reward() for env in envs))  # also closes abandoned games
    return list(zip(games, rewards, strict=True))


async def _gather(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    async with aiohttp.ClientSession() as session:
        spaces.connections.set(session)
        return await asyncio.gather(*calls)


def wordle(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, env_url: str) -> list[bool]:
    """Whether each game was solved."""
    generator = torch.Generator().manual_seed(0)
    played = play_at(env_url, model, WordleTokens(tokenizer), range(GAMES), "held_out", generator)
    return [game.solved for game, _ in played]


def reversals(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    """Similarity of each answer to the reversed text, 0 to 1."""
    torch.manual_seed(0)
    asked = reverse_text.texts(tokenizer, TEXTS, seed=0, held_out=True)
    tokenizer.padding_side = "left"
    prompts = [reverse_text.chat(text) for text in asked]
    options = {"padding": True, "return_tensors": "pt"}
    chats = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True, **options)
    output = model.generate(**chats, max_new_tokens=ANSWER_TOKENS, do_sample=True, top_k=0, top_p=1.0)
    answers = tokenizer.batch_decode(output[:, chats["input_ids"].shape[1] :], skip_special_tokens=True)
    return [reverse_text.similarity(answer, text) for answer, text in zip(answers, asked, strict=True)]


def measured(reader: RunReader, version: int, env_url: str) -> list[float]:
    """How well a version solves each task, 0 to 1."""
    with tempfile.TemporaryDirectory() as folder:
        reader.checkout(reader.manifest(version), Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    solved = wordle(model, tokenizer, env_url) if env_url else reversals(model, tokenizer)
    return [float(one) for one in solved]


def gain(before: Sequence[float], after: Sequence[float]) -> str:
    """Means over the same tasks, and the 95 % confidence interval of their difference, as a sentence."""
    gains = [later - earlier for earlier, later in zip(before, after, strict=True)]
    middle = mean(gains)
    reach = _CONFIDENCE * stdev(gains) / sqrt(len(gains))
    low = 100 * (middle - reach)
    high = 100 * (middle + reach)
    change = f"{100 * mean(before):.1f} % -> {100 * mean(after):.1f} % of {len(gains)} held-out tasks"
    return f"{change} ({low:+.1f} to {high:+.1f} points with 95 % confidence)"


def main() -> None:
    """Print what a run has learned from version 0 to its newest."""
    parser = argparse.ArgumentParser(prog="python -m trainer.policies.held_out", description=main.__doc__)
    parser.add_argument("run", help="<bucket>#<run>")
    parser.add_argument("--env_url", default="", help="URL of the Wordle Space; reverse-text without it")
    options = parser.parse_args()
    reader = open_run(options.run)
    print(gain(*(measured(reader, version, options.env_url) for version in (0, reader.manifest().version))))


if __name__ == "__main__":
    main()
