"""Plays batches of Wordle games with a policy, in plain torch and without a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from trainer.policies.tokens import TURN_TOKENS, WordleTokens


@dataclass(frozen=True)
class Reply:
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
                game.over, game.solved = reply.done, reply.solved
            turns.keep([place for place, game in enumerate(running) if not game.over])
            running = [game for game in running if not game.over]
    return played


class _Turns:
    """Samples the next turn of several games, whose keys and values it keeps; masked tokens pad them."""

    def __init__(self, model: PreTrainedModel, tokens: WordleTokens, games: int) -> None:
        self._model, self._tokens = model, tokens
        self._cache = DynamicCache(config=model.config)
        self._ids, self._mask = torch.zeros(2, games, 0, dtype=torch.long)

    def sample(self, games: Sequence[list[int]]) -> list[list[int]]:
        """Sample one turn of each game, given its tokens, up to its first stop token."""
        self._append([ids[read:] for ids, read in zip(games, self._mask.sum(1).tolist(), strict=True)])
        width = self._ids.shape[1]
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
        new = output[:, width:]
        stops = torch.isin(new, torch.tensor(self._tokens.stops)).long()
        own = stops.cumsum(1) - stops == 0
        self._ids, self._mask = output, torch.cat([self._mask, own.long()], 1)
        return [row[kept].tolist() for row, kept in zip(new, own, strict=True)]

    def keep(self, games: Sequence[int]) -> None:
        """Drop all other games."""
        chosen = torch.tensor(games, dtype=torch.long)
        self._ids, self._mask = self._ids[chosen], self._mask[chosen]
        self._cache.batch_select_indices(chosen)

    def _append(self, rows: Sequence[list[int]]) -> None:
        width = max(map(len, rows))
        ids = torch.tensor([[self._tokens.pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        self._ids, self._mask = torch.cat([self._ids, ids], 1), torch.cat([self._mask, mask], 1)
