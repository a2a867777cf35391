"""Lets a Wordle policy play a batch of games in plain torch: what the rollouts will be, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from trainer.policies.solver import MAX_GUESSES, feedback
from trainer.policies.wordle_tokens import TURN_TOKENS, WordleTokens


@dataclass
class Game:
    """One conversation; a guess that the game does not know is None."""

    secret: str
    ids: list[int]
    guesses: list[str | None] = field(default_factory=list)
    malformed: bool = False

    @property
    def solved(self) -> bool:
        """Whether the secret was guessed."""
        return self.secret in self.guesses

    @property
    def over(self) -> bool:
        """Whether no further turn is due."""
        return self.malformed or self.solved or len(self.guesses) == MAX_GUESSES


def play(
    model: PreTrainedModel, tokens: WordleTokens, secrets: Sequence[str], generator: torch.Generator
) -> list[Game]:
    """Play one game per secret, sampling at temperature 1."""
    games = [Game(secret, list(tokens.prompt)) for secret in secrets]
    while running := [game for game in games if not game.over]:
        for game, turn in zip(running, _sample_turns(model, tokens, running, generator), strict=True):
            _take_turn(game, turn, tokens)
    return games


def _take_turn(game: Game, turn: list[int], tokens: WordleTokens) -> None:
    """Append the turn and the environment's answer to it."""
    game.ids += turn
    if not tokens.is_call(turn):
        game.malformed = True
        return
    word = tokens.called_word(turn)
    game.guesses.append(word)
    marks = feedback(word, game.secret) if word else None
    game.ids += tokens.response(word or "", marks, game.over)


@torch.no_grad()
def _sample_turns(
    model: PreTrainedModel, tokens: WordleTokens, games: Sequence[Game], generator: torch.Generator
) -> list[list[int]]:
    """One turn per game, each up to its first stop token."""
    turns: list[list[int]] = [[] for _ in games]
    for _ in range(TURN_TOKENS):
        live = [i for i, turn in enumerate(turns) if not turn or turn[-1] not in tokens.stops]
        if not live:
            break
        rows = [games[i].ids + turns[i] for i in live]
        for i, token in zip(live, _sample_next(model, rows, tokens.pad, generator), strict=True):
            turns[i].append(token)
    return turns


def _sample_next(
    model: PreTrainedModel, rows: Sequence[list[int]], pad: int, generator: torch.Generator
) -> list[int]:
    """The next token of each row; causal attention makes right padding harmless."""
    last = torch.tensor([len(row) - 1 for row in rows])
    hidden = model.model(input_ids=pad_rows(rows, pad)).last_hidden_state[torch.arange(len(rows)), last]
    chances = model.lm_head(hidden).float().softmax(-1)
    return torch.multinomial(chances, 1, generator=generator)[:, 0].tolist()


def pad_rows(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """Rows of unequal length as one int64 matrix, filled on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
