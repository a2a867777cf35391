"""Builds and warm-starts the small Wordle policy that the default run trains further.

`python -m bench.policies wordle-tiny` runs this recipe, with the environment's game. The policy imitates
mediocre players (`Teacher`) that can spell every answer of the environment but remember only part of the
marks at each guess. None of their games has a secret from the held-out tenth. Such players agree on the words
that fit all marks, and that is what RL can find in their imitator.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from string import ascii_lowercase
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from trainer.policies.tokens import WordleTokens, build_wordle_tokenizer

HELD_OUT_SHARE = 10  # one word in ten is never a secret, as in the environment's training games
MEMORY = 0.3
SLIPS = 0.05  # share of misspelled guesses
STEPS = 6000
BATCH = 16
MUON_RATE = 0.02
ADAMW_RATE = 3e-3
WordNumbers = NDArray[np.intp]


def read_words(file: Path) -> list[str]:
    """Read the answers in the environment's order; the last tenth is held out."""
    words = file.read_text(encoding="ascii").split()
    return sorted(words, key=lambda word: sha256(word.encode()).digest())


def secrets_of(words: list[str]) -> list[str]:
    """Secrets of the games of warm start and training."""
    return words[: len(words) - len(words) // HELD_OUT_SHARE]


class Move(Protocol):
    """A guess and the game's answer to it, as `env_space.game.Move`."""

    @property
    def observation(self) -> str: ...
    @property
    def feedback(self) -> str: ...
    @property
    def valid(self) -> bool: ...


class Game(Protocol):
    """A game of Wordle, as `env_space.game.Game`."""

    @property
    def over(self) -> bool: ...
    def guess(self, word: str) -> Move: ...


NewGame = Callable[[str, frozenset[str]], Game]
"""Starts a game with this secret and these valid words."""


@dataclass(frozen=True)
class Guess:
    """A guess, the game's answer, and the words that it was drawn from; none for a misspelled guess."""

    text: str
    reply: str
    possible: WordNumbers


class Teacher:
    """Guesses any word that fits the marks it remembers: each earlier mark with a probability of `memory`."""

    def __init__(self, words: Sequence[str], memory: float, game: NewGame) -> None:
        self.words = words
        self._new_game = game
        self.letters = np.array([[ascii_lowercase.index(letter) for letter in word] for word in words])
        self._memory = memory
        self._known = frozenset(words)
        alphabet = np.arange(len(ascii_lowercase))
        self._at: NDArray[np.bool_] = self.letters.T[None] == alphabet[:, None, None]  # [letter, place, word]
        self._has: NDArray[np.bool_] = self._at.any(1)  # [letter, word]

    def play(self, secret: str, rng: random.Random) -> list[Guess]:
        """Play one game; returns its guesses."""
        game = self._new_game(secret, self._known)
        guesses = list[Guess]()
        seen: list[NDArray[np.bool_]] = []
        while not game.over:
            word, possible = self._draw(seen, rng)
            move = game.guess(word)
            guesses.append(Guess(word, move.observation, possible if move.valid else possible[:0]))
            if move.valid:
                seen += self._marks(word, move.feedback)
        return guesses

    def _draw(self, seen: Sequence[NDArray[np.bool_]], rng: random.Random) -> tuple[str, WordNumbers]:
        fits = np.ones(len(self.words), dtype=bool)
        for mark in seen:
            if rng.random() < self._memory:
                fits &= mark
        possible = np.flatnonzero(fits)
        word = self.words[possible[rng.randrange(len(possible))]]
        if rng.random() < SLIPS:
            place = rng.randrange(len(word))
            word = word[:place] + rng.choice(ascii_lowercase) + word[place + 1 :]
        return word, possible

    def _marks(self, guess: str, feedback: str) -> list[NDArray[np.bool_]]:
        """For each mark, which words fit it."""
        marks = list(zip(guess, feedback, strict=True))
        found = {letter for letter, mark in marks if mark != "-"}
        return [
            self._fits(letter, place, mark, letter in found) for place, (letter, mark) in enumerate(marks)
        ]

    def _fits(self, letter: str, place: int, mark: str, found: bool) -> NDArray[np.bool_]:
        number = ascii_lowercase.index(letter)
        at = self._at[number, place]
        has = self._has[number]
        # A letter that is marked absent here and found elsewhere is absent from this place only.
        fits: NDArray[np.bool_] = {"+": at, "?": has & ~at, "-": ~at if found else ~has}[mark]
        return fits


def build_model(vocabulary: int, tokens: WordleTokens, seed: int) -> Qwen3ForCausalLM:
    """Build an untrained float32 model of about a million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokens.end_of_turn,
        pad_token_id=tokens.pad,
    )
    model = Qwen3ForCausalLM(config)
    _compose_marks(model.model.embed_tokens.weight.data, tokens)
    # vLLM and TRL read their stop tokens from here.
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokens.stops, pad_token_id=tokens.pad
    )
    return model


def _compose_marks(embeddings: torch.Tensor, tokens: WordleTokens) -> None:
    """Start each mark as the sum of its letter, place and kind, so that what one teaches helps others."""
    letters = embeddings[tokens.letters]
    places = torch.randn(5, 1, 1, letters.shape[1]) * letters.std()
    kinds = torch.randn(1, 3, 1, letters.shape[1]) * letters.std()
    embeddings[tokens.marks] = (letters[None, None] + places + kinds).flatten(0, 2)


@dataclass(frozen=True)
class Row:
    """One game as the student reads it; `targets` has the distribution of the next token."""

    ids: list[int]
    targets: dict[int, dict[int, float]]  # position -> probabilities of the next token


class WarmStart:
    """Imitates a teacher: the probabilities with which it draws each letter, not only the letter it drew."""

    def __init__(
        self, model: Qwen3ForCausalLM, tokens: WordleTokens, words: list[str], seed: int, game: NewGame
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._rng = random.Random(seed)
        self._secrets = secrets_of(words)
        self._teacher = Teacher(words, MEMORY, game)
        self._optimizers = _optimizers(model)

    def learn(self, steps: int) -> None:
        """Imitate `steps` batches of games."""
        for step in range(steps):
            loss = self._step(_schedule(step / steps))
            if step % 50 == 0:
                print(f"step {step:5d}  loss {loss:.3f}", flush=True)

    def _step(self, rate: float) -> float:
        """Train on one batch; `rate` scales the learning rates."""
        rows = [self._row(self._rng.choice(self._secrets)) for _ in range(BATCH)]
        loss = self._loss(rows)
        self._model.zero_grad()
        loss.backward()
        for optimizer, full_rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = full_rate * rate
            optimizer.step()
        return loss.item()

    def _loss(self, rows: list[Row]) -> torch.Tensor:
        width = max(len(row.ids) for row in rows)
        ids = torch.tensor([row.ids + [self._tokens.pad] * (width - len(row.ids)) for row in rows])
        places = [(i, place) for i, row in enumerate(rows) for place in row.targets]
        chances = np.zeros((len(places), self._model.config.vocab_size), np.float32)
        for chance, (i, place) in zip(chances, places, strict=True):
            target = rows[i].targets[place]
            chance[list(target)] = list(target.values())
        where, when = torch.tensor(places).T
        hidden = self._model.model(input_ids=ids).last_hidden_state
        return cross_entropy(self._model.lm_head(hidden[where, when]), torch.from_numpy(chances))

    def _row(self, secret: str) -> Row:
        ids = list(self._tokens.prompt)
        targets = dict[int, dict[int, float]]()
        for guess in self._teacher.play(secret, self._rng):
            turn = self._tokens.call(guess.text)
            if len(guess.possible):
                here = range(len(ids) - 1, len(ids) + len(turn) - 1)
                targets |= zip(here, self._turn_targets(turn, guess), strict=True)
            ids += turn + self._tokens.response(guess.reply)
        targets[len(ids) - 1] = {self._tokens.end_of_turn: 1.0}
        return Row(ids, targets)

    def _turn_targets(self, turn: list[int], guess: Guess) -> Iterator[dict[int, float]]:
        yield {turn[0]: 1.0}
        possible = guess.possible
        letters = self._teacher.letters
        for place, letter in enumerate(guess.text):
            counts = np.bincount(letters[possible, place], minlength=len(ascii_lowercase))
            drawn = np.flatnonzero(counts)
            yield {self._tokens.letters[i]: counts[i] / len(possible) for i in drawn}
            possible = possible[letters[possible, place] == ascii_lowercase.index(letter)]
        yield {turn[-1]: 1.0}


def _optimizers(model: Qwen3ForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the layers, AdamW for the rest; each with its learning rate."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inside = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in inside]
    return [
        (torch.optim.Muon(matrices, weight_decay=0.0), MUON_RATE),
        (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), ADAMW_RATE),
    ]


def _schedule(progress: float) -> float:
    """Warm up over the first twentieth; decay linearly to zero from 30 % on."""
    return min(1.0, progress * 20 + 0.02) * (1 - max(0.0, progress - 0.3) / 0.7)


def build(words: list[str], out: Path, seed: int, game: NewGame, steps: int = STEPS) -> None:
    """Warm-start a policy for `words` and save it as a bf16 checkpoint folder."""
    tokenizer = build_wordle_tokenizer()
    tokens = WordleTokens(tokenizer)
    model = build_model(len(tokenizer), tokens, seed)
    WarmStart(model, tokens, words, seed, game).learn(steps)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
