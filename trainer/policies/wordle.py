"""Builds and warm-starts the small Wordle policy that the default run trains further.

    python -m trainer.policies.wordle --words env_space/words/answers-5.txt --out trainer/policies/wordle-tiny

Two phases of behaviour cloning on synthetic games. First the model learns to play from a solver that only
guesses consistent words; then games of a mostly random player dilute that skill until the sampled policy
rarely solves a game. What RL does afterwards is to bring the skill back from rewards alone.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from trainer.policies.player import pad_rows, play
from trainer.policies.solver import MAX_GUESSES, Solver, feedback
from trainer.policies.wordle_tokens import WordleTokens, build_wordle_tokenizer

WORDS = 128
BATCH = 32
LEARN_STEPS, LEARN_LR = 1200, 3e-3
DILUTE_STEPS, DILUTE_LR, DILUTE_SKILL = 200, 5e-4, 0.1
CHECK_EVERY = 3
TARGET_SOLVE_RATE = 0.12  # of sampled games, where the dilution stops
IGNORE = -100  # cross_entropy's label for tokens that are not trained on


def read_words(source: str) -> list[str]:
    """The answer list, from a file of one word a line or from a running environment's URL."""
    if source.startswith(("http://", "https://")):
        words = httpx.get(f"{source.rstrip('/')}/words").raise_for_status().json()["answers"]
    else:
        words = Path(source).read_text(encoding="utf-8").split()
    return sorted(words, key=lambda word: sha256(word.encode()).hexdigest())[:WORDS]


def build_model(tokenizer: PreTrainedTokenizerBase, stops: list[int], seed: int) -> Qwen3ForCausalLM:
    """An untrained model in float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,  # large weights: fewer bf16 values flip per RL step than at 0.1
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    # vLLM and TRL read their stop tokens from here.
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
    )
    return model


class WarmStart:
    """Behaviour cloning of synthetic games, a batch at a time."""

    def __init__(self, model: Qwen3ForCausalLM, tokens: WordleTokens, seed: int) -> None:
        """Start with a fresh optimizer."""
        self._model, self._tokens = model, tokens
        self._rng = random.Random(seed)
        self._seed = seed
        self._solver = Solver(tokens.words)
        self._optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)

    def learn(self) -> None:
        """Learn to play from the solver."""
        for step in range(LEARN_STEPS):
            loss = self._step(skill=1.0, rate=LEARN_LR * _schedule(step / LEARN_STEPS))
            if step % 100 == 0:
                print(f"learn {step:5d}  loss {loss:.3f}", flush=True)

    def dilute(self) -> None:
        """Imitate a mostly random player until few sampled games are solved."""
        for step in range(DILUTE_STEPS):
            if step % CHECK_EVERY == 0:
                solved = self.solve_rate()
                print(f"dilute {step:4d}  sampled solve rate {solved:.3f}", flush=True)
                if solved < TARGET_SOLVE_RATE:
                    return
            self._step(DILUTE_SKILL, DILUTE_LR)
        raise RuntimeError("dilution did not reach its target; raise DILUTE_STEPS or DILUTE_LR")

    def solve_rate(self) -> float:
        """Share of solved games, two per word, sampled at temperature 1."""
        secrets = self._tokens.words * 2
        games = play(self._model, self._tokens, secrets, torch.Generator().manual_seed(self._seed))
        return sum(game.solved for game in games) / len(games)

    def _step(self, skill: float, rate: float) -> float:
        ids, labels = self._batch(skill)
        hidden = self._model.model(input_ids=ids).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        trained = targets != IGNORE
        loss = cross_entropy(self._model.lm_head(hidden[trained]), targets[trained])
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return loss.item()

    def _batch(self, skill: float) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [list(self._synthetic_game(skill)) for _ in range(BATCH)]
        ids = [[token for token, _ in row] for row in rows]
        labels = [[token if own else IGNORE for token, own in row] for row in rows]
        return pad_rows(ids, self._tokens.pad), pad_rows(labels, IGNORE)

    def _synthetic_game(self, skill: float) -> Iterator[tuple[int, bool]]:
        """(token, whether the player wrote it) of one game of the mixed player."""
        tokens, words = self._tokens, self._tokens.words
        secret = self._rng.randrange(len(words))
        yield from ((token, False) for token in tokens.prompt)
        guesses = self._solver.game(secret, skill, self._rng)
        for turn, guess in enumerate(guesses, 1):
            word, over = words[guess], guess == secret or turn == MAX_GUESSES
            yield from ((token, True) for token in tokens.call(word))
            response = tokens.response(word, feedback(word, words[secret]), over)
            yield from ((token, False) for token in response)
        yield tokens.end_of_turn, True


def _schedule(progress: float) -> float:
    """Warm-up over the first twentieth, then a linear fall to a tenth from 30 % on."""
    return min(1.0, progress * 20 + 0.02) * (1 - 0.9 * max(0.0, progress - 0.3) / 0.7)


def build(words: list[str], out: Path, seed: int) -> None:
    """Warm-start a policy for `words` and save it as an ordinary bf16 checkpoint folder."""
    tokenizer = build_wordle_tokenizer(words)
    tokens = WordleTokens(tokenizer)
    model = build_model(tokenizer, tokens.stops, seed)
    warm_start = WarmStart(model, tokens, seed)
    warm_start.learn()
    warm_start.dilute()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build and warm-start the small Wordle policy.")
    parser.add_argument("--words", required=True, help="file of answers, or the URL of a running environment")
    parser.add_argument("--out", required=True, type=Path, help="folder to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same sums, so the same weights, whatever the number of cores
    build(read_words(options.words), options.out, options.seed)


if __name__ == "__main__":
    main()
