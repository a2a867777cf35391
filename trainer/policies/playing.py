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
    read: int = 0  # number of tokens that the policy has read
    guesses: list[str] = field(default_factory=list)
    solved: bool = False
    over: bool = False


# Guesses as (number of the game, word) -> the replies, in the same order.
Referee = Callable[[Sequence[tuple[int, str]]], Sequence[Reply]]


def play(
    model: PreTrainedModel, tokens: WordleTokens, games: int, referee: Referee, generator: torch.Generator
) -> list[Game]:
    """Play games side by side, sampling at temperature 1."""
    played = [Game(number, list(tokens.prompt)) for number in range(games)]
    reader, running = _Reader(model, tokens.pad, games), played
    while running:
        begun = [len(game.ids) for game in running]
        _sample_turns(reader, tokens, running, generator)
        turns = [game.ids[start:] for game, start in zip(running, begun, strict=True)]
        _take_turns(running, turns, tokens, referee)
        left = [i for i, game in enumerate(running) if not game.over]
        running = [running[i] for i in left]
        reader.keep(left)
    return played


def _sample_turns(
    reader: _Reader, tokens: WordleTokens, games: Sequence[Game], generator: torch.Generator
) -> None:
    """Append one turn to each game, up to its first stop token."""
    live = list(games)
    for _ in range(TURN_TOKENS):
        chances = reader.read(games).softmax(-1)
        sampled = torch.multinomial(chances, 1, generator=generator)[:, 0].tolist()
        drawn = {game.number: token for game, token in zip(games, sampled, strict=True)}
        for game in live:
            game.own.append(len(game.ids))
            game.ids.append(drawn[game.number])
        live = [game for game in live if game.ids[-1] not in tokens.stops]
        if not live:
            return


def _take_turns(
    games: Sequence[Game], turns: Sequence[list[int]], tokens: WordleTokens, referee: Referee
) -> None:
    """Append the referee's replies."""
    words = [tokens.called_word(turn) for turn in turns]
    called = [(game, word) for game, word in zip(games, words, strict=True) if word is not None]
    for game, word in zip(games, words, strict=True):
        game.over = word is None
    replies = referee([(game.number, word) for game, word in called])
    for (game, word), reply in zip(called, replies, strict=True):
        game.guesses.append(word)
        game.ids += tokens.response(reply.observation)
        game.over, game.solved = reply.done, reply.solved


class _Reader:
    """Keys and values of games side by side, padded to equal lengths with masked tokens."""

    def __init__(self, model: PreTrainedModel, pad: int, games: int) -> None:
        self._model, self._pad = model, pad
        self._cache = DynamicCache(config=model.config)
        self._mask = torch.zeros(games, 0, dtype=torch.long)

    @torch.no_grad()
    def read(self, games: Sequence[Game]) -> torch.Tensor:
        """Read the new tokens of each game; returns float32 logits [games, vocabulary].

        They are meaningless for a game with fewer new tokens than the longest: its turn has ended.
        """
        rows = [game.ids[game.read :] for game in games]
        width = max(map(len, rows))
        ids = torch.tensor([[self._pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        self._mask = torch.cat([self._mask, mask], 1)
        for game in games:
            game.read = len(game.ids)
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(1)[:, -width:] - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def keep(self, games: Sequence[int]) -> None:
        """Drop all other games."""
        chosen = torch.tensor(games, dtype=torch.long)
        self._mask = self._mask[chosen]
        self._cache.batch_select_indices(chosen)
