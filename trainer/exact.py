"""Exact old policies: each token's old log-probability is that of the very weights which made it.

An asynchronous trainer takes the engine's word for it, which mixes two things: how far the policy has moved
since, and how engine and trainer differ in arithmetic at equal weights. Here the trainer computes it again
with the published bits of the sync that made the token; it has them back by what each hand-over changed. So
TRL's `ratio` and `kl` say how far the policy has moved from there, and `exact/mismatch_*` is the rest.

The keys and values of the tokens before are computed again, too, while in the engine those of a request
outlive a commit. Tokens that follow a commit within their answer are counted apart, in `exact/mixed_mean`.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync import Publisher
from delta_weight_sync.publish.trl_trainer import BucketGRPOTrainer
from trainer.past_policy import PastPolicy, Query
from trainer.token_syncs import TracedSample

Mask = NDArray[np.bool_]


def use(trainer: BucketGRPOTrainer, publisher: Publisher) -> None:
    """Give this trainer, which has not begun, exact old policies; of one process."""
    args = trainer.args
    if args.world_size > 1:
        raise SystemExit("--exact_old_policy needs a trainer of one process: start it with `python -m`")
    try:
        past = PastPolicy(trainer.model, max(args.token_budget, 0))
    except ValueError as error:
        raise SystemExit(f"--exact_old_policy: {error}; set --dtype") from error
    samples = ExactSamples(trainer.rollout_queue, past, trainer, args.per_device_train_batch_size)
    trainer.rollout_queue = samples
    trainer.add_callback(_KeepsUp(trainer, publisher, past))


class _KeepsUp(TrainerCallback):
    """After each of TRL's syncs: the past has one more."""

    def __init__(self, trainer: BucketGRPOTrainer, publisher: Publisher, past: PastPolicy) -> None:
        self._trainer, self._publisher, self._past = trainer, publisher, past

    def on_train_begin(self, args: AsyncGRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """As many syncs as a sample may be old, and one that is about to be forgotten."""
        self._past.begin(self._trainer.model, self._publisher.remember(args.max_staleness + 1))

    def on_step_end(self, args: AsyncGRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Nothing, if this step had no sync."""
        self._past.keep_up()


class ExactSamples:
    """TRL's queue of samples, whose old log-probabilities are made exact as they are taken from it.

    Those that wait are computed together, at most `batch` of them. A sample with a token whose weights are
    not known, or older than what is kept, stays as it was and is counted.
    """

    def __init__(self, samples: Any, past: PastPolicy, trainer: BucketGRPOTrainer, batch: int) -> None:
        self._samples, self._past, self._batch = samples, past, batch
        self._trainer = trainer
        self._ready: deque[TracedSample] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def qsize(self) -> int:
        """Samples that wait."""
        return len(self._ready) + int(self._samples.qsize())

    def get(self, *args: Any, **options: Any) -> TracedSample:
        """The next sample, as the queue gives it."""
        if not self._ready:
            self._ready.append(self._samples.get(*args, **options))
            with contextlib.suppress(queue.Empty):
                while len(self._ready) < self._batch:
                    self._ready.append(self._samples.get_nowait())
            self._make_exact(self._ready)
        return self._ready.popleft()

    def _make_exact(self, samples: Sequence[TracedSample]) -> None:
        started, written = time.perf_counter(), self._past.written
        known = [sample for sample in samples if self._known(sample)]
        engines = [sample.old_log_probs for sample in known]
        for sample in known:
            sample.old_log_probs = sample.old_log_probs.copy()
        for sync in self._order(set().union(*map(syncs_of, known))):
            self._at(sync, known)
        self._note("exact/samples_left_total", float(len(samples) - len(known)))
        self._compare(known, engines)
        self._note("exact/weights_written_total", float(self._past.written - written))
        self._note("exact/seconds_total", time.perf_counter() - started)

    def _known(self, sample: TracedSample) -> bool:
        """Whether all of its tokens can be had."""
        return all(self._past.knows(sync) for sync in syncs_of(sample))

    def _order(self, syncs: set[int]) -> list[int]:
        """From the end that is nearer, so that rolling writes least."""
        ordered = sorted(syncs)
        near = self._past.sync
        backwards = bool(ordered) and abs(near - ordered[-1]) < abs(near - ordered[0])
        return ordered[::-1] if backwards else ordered

    def _at(self, sync: int, samples: Sequence[TracedSample]) -> None:
        """Put the log-probabilities of all tokens of this sync in their place."""
        self._past.roll(sync)
        asked = [trained(sample) & (sample.token_syncs == sync) for sample in samples]
        some = [(sample, tokens) for sample, tokens in zip(samples, asked, strict=True) if tokens.any()]
        ends = [int(np.flatnonzero(tokens)[-1]) + 1 for _, tokens in some]
        with self._trainer.accelerator.autocast():
            found = self._past.log_probs(
                [Query(s.input_ids[:end], tokens[:end]) for (s, tokens), end in zip(some, ends, strict=True)]
            )
        counts = np.cumsum([int(tokens.sum()) for _, tokens in some])
        for (sample, tokens), exact in zip(some, np.split(found, counts[:-1]), strict=True):
            sample.old_log_probs[tokens] = exact

    def _compare(self, samples: Sequence[TracedSample], engines: Sequence[NDArray[np.float32]]) -> None:
        """What the engine says of its tokens, with what the trainer computes with the same weights."""
        if not samples:
            return
        all_off = [s.old_log_probs - engine for s, engine in zip(samples, engines, strict=True)]
        pure = [of_one_version(sample) for sample in samples]
        off = np.concatenate([d[own] for d, own in zip(all_off, pure, strict=True)]).astype(np.float64)
        mixed = [d[trained(s) & ~own] for d, s, own in zip(all_off, samples, pure, strict=True)]
        if off.size:
            self._note("exact/mismatch_mean", (np.abs(off).sum(), off.size))
            self._note("exact/mismatch_max", float(np.abs(off).max()))
            self._note("exact/mismatch_ratio", (np.exp(off).sum(), off.size))
            self._note("exact/mismatch_kl", ((np.exp(off) - 1 - off).sum(), off.size))
        if count := sum(map(len, mixed)):
            self._note("exact/mixed_mean", (float(np.abs(np.concatenate(mixed)).sum()), count))

    def _note(self, name: str, value: float | tuple[float, int]) -> None:
        """As TRL's own: it sums totals, takes the largest of maxima, and divides sums by counts."""
        self._trainer._metrics["train"][name].append(value)


def trained(sample: TracedSample) -> Mask:
    """Which of its tokens have a loss; the first one is predicted by nothing."""
    mask: Mask = sample.completion_mask == 1
    return mask & (np.arange(len(mask)) > 0)


def syncs_of(sample: TracedSample) -> set[int]:
    """Whose weights made its trained tokens."""
    return set(sample.token_syncs[trained(sample)].tolist())


def of_one_version(sample: TracedSample) -> Mask:
    """Trained tokens before which no commit fell into their answer: keys and values are of one version."""
    own = trained(sample)
    begins = own & ~np.concatenate([[False], own[:-1]])
    answer = np.maximum.accumulate(np.where(begins, np.arange(len(own)), 0))
    return own & (sample.token_syncs == sample.token_syncs[answer])
