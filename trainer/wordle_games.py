"""A policy plays on the Wordle Space in plain torch, many games side by side, without a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import aiohttp
import torch
from transformers import PreTrainedModel

from trainer import space_access
from trainer.policies.player import Game, Reply, play
from trainer.policies.wordle_tokens import WordleTokens
from trainer.wordle import WordleEnv

_T = TypeVar("_T")


def play_at(
    env_url: str,
    model: PreTrainedModel,
    tokens: WordleTokens,
    seeds: Sequence[int],
    split: str,
    generator: torch.Generator,
) -> list[tuple[Game, float | None]]:
    """The game of each seed, with its reward; None where a fault of the Space lost it.

    `split`: "train" or "held_out". The same games for the same policy, seeds and state of `generator`.
    """
    envs = [WordleEnv(env_url) for _ in seeds]
    for seed, env in zip(seeds, envs, strict=True):
        env.reset(seed, split=split)

    def referee(calls: Sequence[tuple[int, str]]) -> list[Reply]:
        return asyncio.run(_together(_guess(envs[number], word) for number, word in calls))

    games = play(model, tokens, len(envs), referee, generator)
    rewards = asyncio.run(_together(env.get_reward() for env in envs))  # closes those that were given up
    return list(zip(games, rewards, strict=True))


async def _guess(env: WordleEnv, word: str) -> Reply:
    return Reply(await env.guess(word), env.done, env.solved)


async def _together(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    async with aiohttp.ClientSession() as session:
        space_access.share(session)
        return await asyncio.gather(*calls)
