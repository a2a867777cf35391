"""One run of the study: TRL's trainer, a transport, and a player that lags by a fixed number of versions.

    python -m bench.research.study.run --transport deltas --lag 4 --seed 0 --steps 60 \\
        --env_url http://127.0.0.1:8000 --out deltas-4-0.jsonl

Writes a line for each step, with the digest of the resulting version, and one about the whole run.

Scheduling makes an asynchronous run differ from itself. This one has none: arithmetic decides which version
plays which games, and the policy plays in plain torch with random numbers of its own. So two runs are equal,
bit for bit, unless something other than time differs between them.
"""

import argparse
import contextlib
import json
import queue
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from bench.research import held_out
from bench.research.held_out import Game, play_at
from bench.research.study.transports import TRANSPORTS, Sent, Transport
from bench.research.tokens import WordleTokens
from bench.results import ROOT
from delta_weight_sync.publish.sharding import Weights
from delta_weight_sync.trl import patches
from trainer.settings import Settings as TrainerSettings
from trainer.tasks import wordle
from trainer.train import PolicyTrainer

POLICY = ROOT / "trainer" / "policies" / "wordle-tiny"
_CONFIG = ROOT / "trainer" / "configs" / "wordle_tiny.yaml"
_LOGGED = ("ratio", "kl", "entropy", "loss")  # metrics that TRL logs for each step
_EPSILON = 1e-4  # TRL adds it to the deviation of a group's rewards
Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Batch:
    """Results of a batch of games; `staleness`: how many versions newer the policy is that trains on it."""

    reward: float
    solved: float
    invalid: float  # share of the guesses
    staleness: int
    play_s: float  # CPU seconds


class Lockstep:
    """TRL's `RolloutWorkerProtocol`. TRL looks a batch ahead, so a batch is at least one version old."""

    def __init__(
        self,
        transport: Transport,
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
        self._transport, self._model, self._tokens, self._env_url = transport, model, tokens, env_url
        self._seed, self._lag, self._groups, self._generations = seed, lag, groups, generations
        self._loaded = -1
        self.batches: list[Batch] = []
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self) -> None:
        """Play the first two batches; version 0 has arrived."""
        self._play()
        self._play()

    def update_model_version(self, model_version: int) -> None:
        """Play the next batch. TRL counts versions from 1, and needs no batch at the first."""
        if model_version > 1:
            self._play()

    def stop(self) -> None:
        """Do nothing: there is no background work."""

    def check_health(self, stale_after_s: float) -> None:
        """Fail: TRL only asks while it waits for a sample, and here it never has to."""
        raise RuntimeError("a batch is missing: TRL looks further ahead than one batch")

    def load(self, version: int) -> PreTrainedModel:
        """Return the policy at this version, which must not be older than the last one."""
        while self._loaded < version:
            self._loaded += 1
            state = self._transport.receive(self._loaded)
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
            raise RuntimeError(f"{self._env_url} lost a game; start this run again")
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
        invalid = sum(game.ids.count(self._tokens.not_a_word) for game in games) / max(1, guesses)
        solved = mean(game.solved for game in games)
        seconds = time.process_time() - begun
        self.batches.append(Batch(mean(rewards), solved, invalid, number - version, seconds))

    @torch.no_grad()
    def _logprobs(self, games: list[Game]) -> list[Array]:
        """Log-probabilities of the sampled tokens of each game."""
        width = max(len(game.ids) for game in games)
        ids = torch.tensor([game.ids + [self._tokens.pad] * (width - len(game.ids)) for game in games])
        hidden = self._model.model(input_ids=ids, use_cache=False).last_hidden_state
        found = []
        for row, game, states in zip(ids, games, hidden, strict=True):
            places = torch.tensor(game.own)
            logprobs = self._model.lm_head(states[places - 1]).log_softmax(-1)
            found.append(logprobs.gather(1, row[places][:, None])[:, 0].numpy())
        return found


def _spread(game: Game, values: Any) -> Array:
    """An array over all tokens of a game: `values` at the sampled tokens, 0 elsewhere."""
    spread = np.zeros(len(game.ids), np.float32)
    spread[game.own] = values
    return spread


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.research.study.run", description="One run of the study."
    )
    parser.add_argument("--transport", choices=TRANSPORTS, required=True)
    parser.add_argument("--lag", type=int, required=True, help="how many versions old each batch is")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--env_url", required=True)
    parser.add_argument("--out", type=Path, required=True, help="file to write at the end")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order, whatever the number of cores
    lines = list(train(options))
    unfinished = options.out.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.rename(options.out)


def train(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train, and yield the lines of the run's file."""
    started = time.monotonic()
    patches.install()
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        script, args = _settings(options, folder)
        transport = TRANSPORTS[options.transport]((Path(folder) / "bucket").as_uri(), POLICY)
        worker = Lockstep(
            transport,
            model,
            WordleTokens(tokenizer),
            options.env_url,
            seed=options.seed,
            lag=options.lag,
            groups=args.per_device_train_batch_size // args.num_generations,
            generations=args.num_generations,
        )
        sent: list[Sent] = []
        trained: list[float] = []  # CPU seconds, without those of the games

        def on_sync(weights: Weights, sync: int) -> None:
            sent.append(transport.send(weights))
            trained.append(time.process_time() - sum(batch.play_s for batch in worker.batches))

        trainer = PolicyTrainer(
            norm_rate=script.norm_learning_rate,
            model=str(POLICY),
            args=args,
            processing_class=tokenizer,
            train_dataset=wordle.make_dataset(script.prompt, 1, options.seed),
            rollout_worker=worker,
            on_sync=on_sync,
        )
        with contextlib.closing(transport):
            before = held_out.wordle(model, tokenizer, options.env_url)
            trainer.begin()
            after = held_out.wordle(worker.load(options.steps), tokenizer, options.env_url)
    steps = [log for log in trainer.state.log_history if "ratio" in log]
    seconds = [later - earlier for earlier, later in pairwise(trained)]
    done = zip(steps, worker.batches, sent[1:], seconds, strict=False)
    for number, (log, batch, version, train_s) in enumerate(done, 1):
        logged = {name: log[name] for name in _LOGGED}
        yield {"step": number, **vars(batch), **logged, **vars(version), "train_s": train_s}
    yield {"before": sum(before), "after": sum(after), "games": len(after), "s": time.monotonic() - started}


def _settings(options: argparse.Namespace, folder: str) -> tuple[TrainerSettings, AsyncGRPOConfig]:
    given = {
        "config": _CONFIG,
        "model": POLICY,
        "bucket": "file:///unused",
        "run": "study",
        "replicas": "none",
        "env_url": options.env_url,
        "output_dir": folder,
        "max_steps": options.steps,
        "max_staleness": options.lag + 1,
        "seed": options.seed,
        "use_cpu": "true",
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return TrlParser((TrainerSettings, AsyncGRPOConfig)).parse_args_and_config(words)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
