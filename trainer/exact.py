"""Exact old policies: the weights that generated a token also compute the token's old log-probability.

The sync of each token is known. A second model is moved to that sync's weights by undoing or repeating the
syncs in between. `docs/how-it-works.md` explains why, and what the metrics `exact/*` mean.
"""

import contextlib
import copy
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig

from delta_weight_sync import CodecError, Publisher
from delta_weight_sync.publish.undo import UndoLog, bf16_bits
from delta_weight_sync.trl import hooks
from delta_weight_sync.trl.trainer import BucketGRPOTrainer, live_weights
from trainer.samples import TracedSample

LogProbs = NDArray[np.float32]
Mask = NDArray[np.bool_]
Views = Callable[[torch.nn.Module], dict[str, torch.Tensor]]


class PastPolicy:
    """A second model with the bf16 weights of an earlier sync. It computes as the trainer's model does.
    To move the model to another sync, only the weights that changed in between are written."""

    def __init__(self, policy: torch.nn.Module, token_budget: int) -> None:
        """Copy `policy`. `token_budget`: maximum tokens of a forward pass, 0 for no limit.
        Raises `ValueError` if the dtype of a weight is neither float32 nor bfloat16."""
        self._model = copy.deepcopy(policy).requires_grad_(False).eval()
        self._weights = dict(live_weights(self._model))
        for weights in self._weights.values():
            bf16_bits(weights)  # only to raise `ValueError` now, and not at the first `roll`
        self._token_budget = token_budget
        self.log: UndoLog  # set by `begin`
        self.sync = -1
        self.written = 0  # number of weights that all calls of `roll` wrote

    def begin(self, policy: torch.nn.Module, log: UndoLog, views: Views | None = None) -> None:
        """Copy the weights of `policy`, which were just published as the only sync in `log`.

        `views` returns a model's tensors by the names in `log`; by default, these are the model's own names.
        """
        for name, weights in live_weights(policy):
            self._weights[name].copy_(weights.detach().to(torch.bfloat16))
        if views:
            self._weights = views(self._model)
        self.log = log
        (self.sync,) = log.syncs

    def keep_up(self) -> None:
        """If the model is at the log's oldest sync, move the model to the next sync. A publish may drop the
        oldest sync from the log, and `roll` can start only at a sync in the log."""
        if self.log.syncs[0] == self.sync != self.log.syncs[-1]:
            self.roll(self.log.syncs[1])

    def roll(self, sync: int) -> None:
        """Restore the weights of `sync`. Raises `UndoLogError`."""
        self.written += self.log.roll(self._weights, self.sync, sync)
        self.sync = sync

    @torch.no_grad()
    def log_probs(self, queries: Iterable[dict[str, Any]]) -> LogProbs:
        """Return all queries' log-probabilities at the policy's temperature, in order: float32 [asked]."""
        from trl.experimental.async_grpo.packing import TreeRow  # which `enable` has looked for

        rows = [TreeRow()]
        for query in queries:
            if rows[-1].samples and self._token_budget and not rows[-1].fits(query, self._token_budget):
                rows.append(TreeRow())
            rows[-1].add(query)
        return torch.cat([forward(self._model, row.pack()) for row in rows]).float().cpu().numpy()


def query(input_ids: NDArray[np.int64], asked: Mask) -> dict[str, Any]:
    """Make a sample for `TreeRow`. `input_ids`: int64 [n]. `asked`: bool [n], True for each token
    whose log-probability is wanted; the first token must be False."""
    sample = {"input_ids": input_ids, "completion_mask": asked.astype(np.int64)}
    return sample | {"old_log_probs": np.zeros(len(input_ids)), "advantage": 0.0, "group_id": 0}


def forward(model: torch.nn.Module, packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the log-probabilities of one packed row's tokens, as `AsyncGRPOTrainer.compute_loss` does."""
    device = next(model.parameters()).device
    packed = {key: column.to(device) for key, column in packed.items()}
    longest_q, longest_k = packed["tree_max_seqlens"].tolist()
    columns = {key: packed[key][None] for key in ("input_ids", "position_ids", "shift_labels")}
    columns |= {key: packed[key] for key in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    longest = {"tree_max_seqlen_q": longest_q, "tree_max_seqlen_k": longest_k}
    outputs = model(**columns, **longest, fused_lm_head=True)
    log_probs: torch.Tensor = outputs.log_probs.flatten()[packed["token_index"]]
    return log_probs


def enable(trainer: BucketGRPOTrainer, publisher: Publisher) -> None:
    """Make a single-process trainer compute exact old policies. Call this before training."""
    if trainer.args.world_size > 1:
        raise SystemExit("--exact_old_policy needs one process: use `python -m`, not `accelerate launch`")
    hooks.EXACT.require()
    try:
        past = PastPolicy(trainer.model, max(trainer.args.token_budget, 0))
    except ValueError as error:
        raise SystemExit(f"--exact_old_policy: {error} as --dtype") from error
    trainer.rollout_queue = samples = ExactSamples(trainer.rollout_queue, past, trainer, publisher)
    trainer.add_callback(samples)


class ExactSamples(TrainerCallback):
    """Wraps TRL's queue of samples. A taken sample has exact old log-probabilities.

    `get` handles all waiting samples together, at most a batch. If the undo log lacks the sync of a trained
    token, the token's sample keeps the engine's log-probabilities, and `exact/samples_left_total` counts it.
    """

    def __init__(self, samples: Any, past: PastPolicy, trainer: Any, publisher: Publisher) -> None:
        self._samples = samples
        self._past = past
        self._trainer = trainer
        self._publisher = publisher
        self._ready: deque[TracedSample] = deque()

    def on_train_begin(self, args: AsyncGRPOConfig, state: Any, control: Any, **_: Any) -> None:
        # A sample may be `max_staleness` syncs old. Keep one more, because the next sync drops the oldest.
        log = self._publisher.keep_undo_log(args.max_staleness + 1)
        try:
            self._past.begin(self._trainer.model, log, self._publisher.views)
        except CodecError as error:
            raise SystemExit(f"--exact_old_policy: {error}: leave the option out for this model") from error

    def on_step_end(self, args: AsyncGRPOConfig, state: Any, control: Any, **_: Any) -> None:
        self._past.keep_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def qsize(self) -> int:
        return len(self._ready) + int(self._samples.qsize())

    def get(self, *args: Any, **options: Any) -> TracedSample:
        if not self._ready:
            self._ready.append(self._samples.get(*args, **options))
            with contextlib.suppress(queue.Empty):
                while len(self._ready) < self._trainer.args.per_device_train_batch_size:
                    self._ready.append(self._samples.get_nowait())
            self._make_exact(self._ready)
        return self._ready.popleft()

    def _make_exact(self, samples: Sequence[TracedSample]) -> None:
        started = time.perf_counter()
        written = self._past.written
        known = [sample for sample in samples if syncs_of(sample).issubset(self._past.log.syncs)]
        engine = [sample.old_log_probs for sample in known]
        for sample in known:  # `_compute` writes to the copies, and `_compare` reads the originals
            sample.old_log_probs = sample.old_log_probs.copy()
        syncs = sorted(set().union(*map(syncs_of, known)))
        if syncs and abs(self._past.sync - syncs[-1]) < abs(self._past.sync - syncs[0]):
            syncs.reverse()  # start at the nearer end, which writes the fewest weights
        for sync in syncs:
            self._compute(sync, known)
        self._record("exact/samples_left_total", float(len(samples) - len(known)))
        self._compare(known, engine)
        self._record("exact/weights_written_total", float(self._past.written - written))
        self._record("exact/seconds_total", time.perf_counter() - started)

    def _compute(self, sync: int, samples: Sequence[TracedSample]) -> None:
        self._past.roll(sync)
        masks = [trained(sample) & (sample.token_syncs == sync) for sample in samples]
        asked = [(sample, mask) for sample, mask in zip(samples, masks, strict=True) if mask.any()]
        ends = [int(np.flatnonzero(mask)[-1]) + 1 for _, mask in asked]  # later tokens change nothing
        queries = [query(s.input_ids[:end], m[:end]) for (s, m), end in zip(asked, ends, strict=True)]
        with self._trainer.accelerator.autocast():
            found = self._past.log_probs(queries)
        counts = np.cumsum([int(mask.sum()) for _, mask in asked])
        for (sample, mask), exact in zip(asked, np.split(found, counts[:-1]), strict=True):
            sample.old_log_probs[mask] = exact

    def _compare(self, samples: Sequence[TracedSample], engine: Sequence[LogProbs]) -> None:
        """Record how the engine's log-probabilities differ from the trainer's.
        `exact/mismatch_*` cover tokens whose keys and values in the engine are all of one version.
        `exact/mixed_mean` covers tokens that the engine generated with keys and values of older weights."""
        if not samples:
            return
        off = np.concatenate([s.old_log_probs - theirs for s, theirs in zip(samples, engine, strict=True)])
        off = off.astype(np.float64)
        own, one_version = (np.concatenate([*map(f, samples)]) for f in (trained, of_one_version))
        pure = off[one_version]
        mixed = off[own & ~one_version]
        if pure.size:
            self._record("exact/mismatch_mean", (np.abs(pure).sum(), pure.size))
            self._record("exact/mismatch_max", float(np.abs(pure).max()))
            self._record("exact/mismatch_ratio", (np.exp(pure).sum(), pure.size))
            self._record("exact/mismatch_kl", ((np.exp(pure) - 1 - pure).sum(), pure.size))
        if mixed.size:
            self._record("exact/mixed_mean", (np.abs(mixed).sum(), mixed.size))

    def _record(self, name: str, value: float | tuple[float, int]) -> None:
        """When TRL logs, it adds up `*_total`, keeps the largest `*_max`, and averages (sum, count) pairs."""
        self._trainer.rollout_worker.metrics_queue.put({name: value})


def trained(sample: TracedSample) -> Mask:
    """Which tokens are trained on. The sample's first token is not, because no token predicts it."""
    mask: Mask = sample.completion_mask == 1
    return mask & (np.arange(len(mask)) > 0)


def syncs_of(sample: TracedSample) -> set[int]:
    """The syncs whose weights generated the trained tokens."""
    return set(sample.token_syncs[trained(sample)].tolist())


def of_one_version(sample: TracedSample) -> Mask:
    """Which trained tokens have the same sync as the first token of their answer. For these tokens, all keys
    and values in the engine were of one version."""
    own = trained(sample)
    begins = own & ~np.concatenate([[False], own[:-1]])
    answer = np.maximum.accumulate(np.where(begins, np.arange(len(own)), 0))
    pure: Mask = own & (sample.token_syncs == sample.token_syncs[answer])
    return pure
