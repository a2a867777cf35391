"""Measures a version of a run on tasks that training never shows, in plain torch, from the bucket.

    python -m trainer.tasks.held_out --run file:///tmp/bucket#demo --version 0 \\
        --env_url http://127.0.0.1:8000 --out before.json

With `--env_url` the policy plays Wordle on the environment's held-out words; otherwise it reverses texts of
words that no training text contains. The tasks are the same each time, so two versions can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from delta_weight_sync.reader import open_run
from trainer import spaces
from trainer.policies.playing import Game, Reply, play
from trainer.policies.tokens import WordleTokens
from trainer.tasks import reverse_text
from trainer.tasks.wordle import WordleEnv

GAMES = 600
TEXTS = 200
ANSWER_TOKENS = 48  # a right answer has about 20
_T = TypeVar("_T")


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

    def referee(calls: Sequence[tuple[int, str]]) -> list[Reply]:
        return asyncio.run(_gather(_guess(envs[number], word) for number, word in calls))

    games = play(model, tokens, len(envs), referee, rng)
    rewards = asyncio.run(_gather(env.get_reward() for env in envs))  # also closes abandoned games
    return list(zip(games, rewards, strict=True))


async def _guess(env: WordleEnv, word: str) -> Reply:
    return Reply(await env.guess(word), env.done, env.solved)


async def _gather(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    async with aiohttp.ClientSession() as session:
        spaces.share(session)
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
    prompts, options = [reverse_text.chat(text) for text in asked], {"padding": True, "return_tensors": "pt"}
    chats = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True, **options)
    output = model.generate(**chats, max_new_tokens=ANSWER_TOKENS, do_sample=True, top_k=0, top_p=1.0)
    answers = tokenizer.batch_decode(output[:, chats["input_ids"].shape[1] :], skip_special_tokens=True)
    return [reverse_text.similarity(answer, text) for answer, text in zip(answers, asked, strict=True)]


def main() -> None:
    """Write a JSON list: how well each task was solved, 0 to 1."""
    parser = argparse.ArgumentParser(description="Measure a version of a run on tasks unseen in training.")
    parser.add_argument("--run", required=True, help="<bucket>#<run>")
    parser.add_argument("--version", required=True, type=int)
    parser.add_argument("--env_url", default="", help="URL of the Wordle Space; reverse-text without it")
    parser.add_argument("--out", required=True, type=Path, help="file to write")
    options = parser.parse_args()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))  # two versions are measured side by side
    reader = open_run(options.run)
    with tempfile.TemporaryDirectory() as folder:
        reader.checkout(reader.manifest(options.version), Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    solved = wordle(model, tokenizer, options.env_url) if options.env_url else reversals(model, tokenizer)
    options.out.write_text(json.dumps(solved))


if __name__ == "__main__":
    main()
