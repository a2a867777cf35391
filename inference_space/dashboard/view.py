"""A run as its viewers see it: everything that a page shows of it, and nothing that grows with the run."""

from __future__ import annotations

from dataclasses import dataclass

from delta_weight_sync.runlog import CanaryEvent, CommitEvent, DoneEvent, StepEvent, SyncEvent
from inference_space.dashboard.series import Series


@dataclass(frozen=True)
class Replica:
    """What is known of one replica; names and errors come from outside and are not to be trusted."""

    name: str
    state: str
    version: int | None
    behind: int | None  # versions
    lag_s: float | None  # hand-over to commit, of its last commit
    digest: str | None
    digest_ok: bool | None  # None: not known yet which digest the trainer published
    error: str | None
    signed_by: str | None  # fingerprint of the key whose signature the replica checked
    versions: Series  # (unix seconds, version), the window of the staircase
    lags: Series  # (version, seconds)


@dataclass(frozen=True)
class Slowest:
    """What a version cost the replica that it cost most."""

    fetch_s: float
    stage_s: float
    commit_ms: float
    pause_ms: float
    last: CommitEvent  # of the replica that took it over last


@dataclass(frozen=True, eq=False)
class Progress:
    """Everything a page shows of a run with at least one version."""

    version: int
    last_t: float
    done: DoneEvent | None
    done_ok: bool | None
    full_bytes: int
    payload_bytes: float | None  # median delta
    sent_bytes: int  # deltas and anchors after version 0
    sent_full_bytes: int  # what whole checkpoints would have been
    anchor_every: float | None  # versions, median of the last anchors; None before the second
    pause_ms: float | None  # median
    worst_pause_ms: float | None
    lag_s: float | None  # median
    step_s: float | None  # median time between two versions
    replicas: tuple[Replica, ...]
    syncs: tuple[tuple[SyncEvent, Slowest | None], ...]  # newest first
    trainer: Series  # (unix seconds, version), the window of the staircase
    deltas: Series  # (version, bytes)
    anchors: Series  # (version, bytes)
    changed: Series  # (version, share of the elements)
    pauses: Series  # (version, milliseconds), the slowest replica's
    saved: Series  # (version, bytes that whole checkpoints would have taken more, so far)
    reward: Series  # (step, reward)
    solved: Series  # (step, share of the games)
    invalid: Series  # (step, share of the guesses)
    staleness: Series  # (step, syncs between a sample's weights and the trainer's)
    canaries: tuple[CanaryEvent, ...]  # the newest of each replica, the worst first
    group: StepEvent | None  # the newest step whose rollouts were recorded
    reward_first: float | None  # mean of the first `LATELY` steps
    reward_lately: float | None  # and of the last
