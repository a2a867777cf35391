"""Rollouts in lockstep with training: batch by batch, each by a version that is as old as it is told to be.

Scheduling is what makes an asynchronous run differ from itself. Here there is none: which version plays
which games is arithmetic, and the policy plays in plain torch with random numbers of its own. So two runs
are equal, bit for bit, unless something other than time differs between them.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from trainer.policies.player import Game
from trainer.policies.wordle_tokens import WordleTokens
from trainer.study.carriers import Carrier
from trainer.wordle_games import play_at

_EPSILON = 1e-4  # of TRL, beside the deviation of a group's rewards


@dataclass(frozen=True)
class Batch:
    """What a batch of games came to; `staleness`: how many versions newer the one is that trains on it."""

    reward: float
    solved: float
    invalid: float  # of the guesses
    staleness: int
    play_s: float  # of one core, whatever else the machine did


class Lockstep:
    """TRL's `RolloutWorkerProtocol`. TRL looks a batch ahead, so a batch is at least one version old."""

    def __init__(
        self,
        carrier: Carrier,
        model: PreTrainedModel,
        tokens: WordleTokens,
        env_url: str,
        *,
        seed: int,
        lag: int,
        groups: int,
        generations: int,
    ) -> None:
        """`model`: any weights, float32; `lag`: how many versions old a batch is, at least 1."""
        self._carrier, self._model, self._tokens, self._env_url = carrier, model, tokens, env_url
        self._seed, self._lag, self._groups, self._generations = seed, lag, groups, generations
        self._loaded = -1
        self.batches: list[Batch] = []
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self) -> None:
        """Version 0 is there."""
        self._play()
        self._play()

    def update_model_version(self, model_version: int) -> None:
        """TRL's versions begin at 1, with which it has no batch to ask for yet."""
        if model_version > 1:
            self._play()

    def stop(self) -> None:
        """Nothing runs."""

    def check_health(self, stale_after_s: float) -> None:
        """TRL asks while it waits for a sample; here it never does."""
        raise RuntimeError("a batch is missing: TRL looks further ahead than one batch")

    def load(self, version: int) -> PreTrainedModel:
        """The policy as that version, which is not older than the one that it was before."""
        while self._loaded < version:
            self._loaded += 1
            state = self._carrier.receive(self._loaded)
            with torch.no_grad():
                for name, weight in self._model.named_parameters():
                    weight.copy_(torch.from_numpy(state[name]).view(torch.bfloat16))
        return self._model

    def _play(self) -> None:
        begun = time.process_time()
        number = len(self.batches)
        version = max(0, number - self._lag)
        first = (self._seed << 32) + number * self._groups
        seeds = [first + group for group in range(self._groups) for _ in range(self._generations)]
        generator = torch.Generator().manual_seed(first)
        played = play_at(self._env_url, self.load(version), self._tokens, seeds, "train", generator)
        rewards = [reward for _, reward in played if reward is not None]
        if len(rewards) < len(played):
            raise RuntimeError(f"{self._env_url} lost a game; begin this run again")
        games = [game for game, _ in played]
        for i, (game, logprobs) in enumerate(zip(games, self._logprobs(games), strict=True)):
            group = i // self._generations
            of_group = rewards[group * self._generations : (group + 1) * self._generations]
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(game.ids),
                    completion_mask=_spread(game, 1.0).astype(np.int64),
                    old_log_probs=_spread(game, logprobs),
                    advantage=(rewards[i] - mean(of_group)) / (pstdev(of_group) + _EPSILON),
                    model_version=version + 1,
                    group_id=number * self._groups + group,
                    metrics={"reward": rewards[i]},
                )
            )
        guesses = sum(len(game.guesses) for game in games)
        invalid = sum(game.ids.count(self._tokens.not_a_word) for game in games)
        solved = mean(game.solved for game in games)
        seconds = time.process_time() - begun
        batch = Batch(mean(rewards), solved, invalid / max(1, guesses), number - version, seconds)
        self.batches.append(batch)

    @torch.no_grad()
    def _logprobs(self, games: list[Game]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Of the tokens that were sampled."""
        width = max(len(game.ids) for game in games)
        ids = torch.tensor([game.ids + [self._tokens.pad] * (width - len(game.ids)) for game in games])
        hidden = self._model.model(input_ids=ids, use_cache=False).last_hidden_state
        found = []
        for row, game, states in zip(ids, games, hidden, strict=True):
            places = torch.tensor(game.own)
            chances = self._model.lm_head(states[places - 1]).log_softmax(-1)
            found.append(chances.gather(1, row[places][:, None])[:, 0].numpy())
        return found


def _spread(game: Game, values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Values for the sampled tokens; 0 for all others."""
    spread = np.zeros(len(game.ids), np.float32)
    spread[game.own] = values
    return spread
