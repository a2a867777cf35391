"""From a question (how large, how sparse, how many replicas, what link) to bytes, seconds and money.

Seconds follow the program as it is. The trainer waits for the diff alone, which each rank makes of its own
shard. Rank 0 then encodes and uploads in the background, one version at a time; jumps and anchors only share
its link. Each replica takes one
version after the other: fetch, decode (every worker all of it), digest and placing (every worker its part),
commit. So versions flow at the pace of the slower of the two, and a slow publisher merges steps. Encode and
decode take several threads where there are more than two cores; all else takes one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from delta_weight_sync import parallel
from delta_weight_sync.plan import rates
from delta_weight_sync.plan.rates import Encoding, Space, Trainer
from delta_weight_sync.plan.shortcuts import Shortcuts
from delta_weight_sync.protocol import POLL_S
from delta_weight_sync.store.notice import SAFETY_S

HOUR, MONTH_DAYS = 3600.0, 30.0


@dataclass(frozen=True)
class Question:
    """What is to be predicted. `share` from 0 to 1, `link` in bytes per second, for each machine."""

    params: int
    share: float
    replicas: int
    link: float
    encoding: Encoding = "fast"
    trainer: Trainer = "fp32"
    anchor_every: int | None = None  # versions; None: as the publisher decides
    steps_per_hour: float | None = None  # None: as many as the system carries
    egress_usd_gb: float = 0.0
    cores: int = 2  # for rank 0, and for each worker of a replica

    @property
    def threads(self) -> int:
        """How many of them encode or decode."""
        return parallel.threads(self.cores)


@dataclass(frozen=True)
class Parts:
    """Seconds of each part of one sync, in their order."""

    diff: float
    encode: float
    upload: float
    notice: float
    fetch: float
    stage: float
    commit: float

    @property
    def total(self) -> float:
        """From the trainer's hand-over to a replica that serves the version."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Whole:
    """The same with the whole checkpoint at every sync: bytes, seconds to serving, versions per hour."""

    size: float
    seconds: float
    versions_per_hour: float


@dataclass(frozen=True)
class Join:
    """Seconds of a late replica up to vLLM's own start: half way to the next anchor, and just before it."""

    anchor_s: float
    deltas_s: float
    rebuild_s: float
    worst_s: float

    @property
    def total(self) -> float:
        """Half way to the next anchor."""
        return self.anchor_s + self.deltas_s + self.rebuild_s


@dataclass(frozen=True)
class Money:
    """Dollars. `storage_month`: to keep what a day of the run stored, for a month. None: not on Spaces."""

    space: str | None
    replicas_hour: float | None
    storage_month: float
    egress_hour: float


@dataclass(frozen=True)
class Plan:
    """The prediction. Sizes in bytes."""

    question: Question
    changes: float
    delta: float
    full: float
    parts: Parts
    trainer_ranks: int
    replica_workers: int
    link_versions_hour: float  # what the trainer's link alone carries, jumps and anchors included
    publisher_versions_hour: float
    replica_versions_hour: float
    published_hour: float
    steps_per_version: float
    anchor_every: int
    join: Join
    stored_hour: float
    egress_hour: float
    file_requests: float  # to the Hub, of all machines, in its window of five minutes
    api_requests: float
    mirror: float  # host memory of rank 0, bytes
    money: Money
    whole: Whole

    @property
    def per_change(self) -> float:
        """Bytes per change."""
        return self.delta / self.changes

    @property
    def slowest(self) -> str:
        """What sets the pace of versions."""
        if self.replica_versions_hour < self.publisher_versions_hour:
            return "each replica"
        return "rank 0 of the trainer"


def predict(question: Question) -> Plan:
    """Answer a question."""
    changes = question.params * question.share
    full = 2.0 * question.params
    shortcuts = Shortcuts(question.params, question.share, question.encoding, question.trainer)
    delta, every = shortcuts.delta, question.anchor_every or shortcuts.anchor_every()
    each = delta + shortcuts.jumps + full / every
    ranks = math.ceil(rates.TRAINER_BYTES * question.params / rates.GPU_BYTES)
    workers = math.ceil(rates.REPLICA_BYTES * question.params / rates.GPU_BYTES)
    parts = _parts(question, changes, delta, ranks, workers)
    carried = HOUR * question.link / each
    publisher = min(HOUR / (parts.encode + parts.upload), carried)
    replica = HOUR / (POLL_S + parts.fetch + parts.stage + parts.commit)
    wanted = question.steps_per_hour or min(publisher, replica)
    published = min(wanted, publisher)
    stored = published * each
    taken = min(published, replica) * question.replicas
    return Plan(
        question=question,
        changes=changes,
        delta=delta,
        full=full,
        parts=parts,
        trainer_ranks=ranks,
        replica_workers=workers,
        link_versions_hour=carried,
        publisher_versions_hour=publisher,
        replica_versions_hour=replica,
        published_hour=published,
        steps_per_version=wanted / published,
        anchor_every=every,
        join=_join(question, shortcuts, full, every),
        stored_hour=stored,
        egress_hour=taken * delta,
        file_requests=_window(published * rates.PUBLISHING.files + taken * (rates.TAKING.files + rates.LOOKS))
        + question.replicas * rates.WINDOW_S / SAFETY_S,
        api_requests=_window(published * rates.PUBLISHING.api + taken * rates.TAKING.api)
        + question.replicas * rates.WINDOW_S / SAFETY_S,
        mirror=full,
        money=_money(question, workers, stored, taken * delta),
        whole=_whole(question, full),
    )


def _window(per_hour: float) -> float:
    return per_hour * rates.WINDOW_S / HOUR


def _parts(question: Question, changes: float, delta: float, ranks: int, workers: int) -> Parts:
    params, encoding, sent_s = question.params, question.encoding, delta / question.link
    here = rates.DIGEST.seconds(params) + rates.PLACE.seconds(params, changes)
    return Parts(
        diff=rates.DIFF[question.trainer].seconds(params) / ranks,
        encode=encode_s(params, changes, encoding) / question.threads,
        upload=sent_s,
        notice=POLL_S / 2,
        fetch=sent_s,
        stage=rates.DECODE[encoding].seconds(params, changes) / question.threads + here / workers,
        commit=rates.COMMIT.seconds(params, changes) / workers,
    )


def encode_s(params: float, changes: float, encoding: Encoding) -> float:
    """Seconds of one core."""
    tried = rates.TRIED if changes > rates.DENSE * params else 1.0
    return tried * rates.ENCODE[encoding].seconds(params, changes)


def _save_s(params: float) -> float:
    return rates.SAVE.seconds(params)


def _join(question: Question, shortcuts: Shortcuts, full: float, every: int) -> Join:
    """Anchor, jumps and deltas behind it, then the checkpoint onto the disk from which vLLM starts."""
    params = question.params

    def behind_s(versions: float) -> float:
        size, changes, _ = shortcuts.behind(versions)
        decode_s = rates.DECODE[question.encoding].seconds(params, changes) / question.threads
        return size / question.link + decode_s + rates.APPLY.seconds(params, changes)

    rebuild = rates.LOAD.seconds(params) + rates.DIGEST.seconds(params) + _save_s(params)
    anchor = full / question.link
    return Join(anchor, behind_s(every / 2), rebuild, anchor + behind_s(every - 1) + rebuild)


def _whole(question: Question, full: float) -> Whole:
    sent = full / question.link
    publish, receive = _save_s(question.params) + sent, sent + rates.LOAD.seconds(question.params)
    cycle = max(publish, POLL_S + receive)
    return Whole(full, publish + POLL_S / 2 + receive, HOUR / cycle)


def _money(question: Question, workers: int, stored: float, egress: float) -> Money:
    space = smallest_space(rates.REPLICA_BYTES * question.params)
    return Money(
        space=space.name if space else None,
        replicas_hour=space.usd_per_hour * question.replicas if space else None,
        storage_month=rates.PRIVATE_USD_TB_MONTH * max(24 * stored / 1e12 - rates.INCLUDED_TB, 0.0),
        egress_hour=question.egress_usd_gb * egress / 1e9,
    )


def smallest_space(memory: float) -> Space | None:
    """The cheapest flavour with so much GPU memory (bytes); None where Spaces have none."""
    fitting = [space for space in rates.SPACES if space.memory >= memory]
    return min(fitting, key=lambda space: space.usd_per_hour, default=None)
