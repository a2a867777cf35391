"""Predicts what a run costs: bytes, seconds and money per sync, from measured rates and list prices.

docs/limits-and-costs.md explains how sizes are computed, and from which measurements.

Seconds are computed as follows. The trainer waits only for the diff, in which each rank compares its own
shard. Each rank encodes and uploads its part in the background, one version at a time. Ranks of one machine
share its link. A replica takes one version after another, and one of its machines fetches the delta. Workers
of one machine share the decoding and exchange the changes. (With encoding `small`, each worker decodes all.)
Each worker finds the digest of its own changes; then all commit. The slower of publisher and replica sets the
pace; a slow publisher merges syncs. Each process uses up to half of its cores, at most 16.

Rates come from `make bench` on one core of an AMD EPYC (`bench/results.json`, 2026-11-23). Tests compare
predictions with that file. Sizes must agree within 5 %, seconds within a factor of two.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from delta_weight_sync import util
from delta_weight_sync.reader import SIDE_BY_SIDE
from delta_weight_sync.records import ANCHOR_PAYS, MAX_FILES, MAX_PARTS, POLL_S, STRIDES, WINDOW
from delta_weight_sync.runlog import LOG_SHARE, SEGMENT, VERSION_BYTES
from delta_weight_sync.store import DIRECT, SMALL
from delta_weight_sync.store.notifications import SAFETY_S

if TYPE_CHECKING:  # the codec loads numba, which takes seconds
    from delta_weight_sync.codec import Encoding

# fp32: float32 master weights; fp32-start: the same, in the first steps of a run; bf16: no master weights
Trainer = Literal["fp32", "fp32-start", "bf16"]

PRICES_READ_ON: Final = "2026-11-21"
PRICES_SOURCE: Final = "https://huggingface.co/docs/hub/spaces-gpus"


def _read(file: str) -> Any:
    return json.loads(Path(__file__).with_name(file).read_text())


class Hardware(NamedTuple):
    """A hardware option of Spaces: US dollars per hour, number of GPUs, 10^9 bytes of memory of each GPU."""

    usd_per_hour: float
    gpus: int = 0
    gpu_gb: int = 0


# From the Hub's documentation (spaces-gpus, jobs-pricing). Spaces are billed by the minute while they run,
# not while they build, sleep or are paused. T4 is left out, because it has no bf16.
HARDWARE: Final[dict[str, Hardware]] = {name: Hardware(*row) for name, row in _read("prices.json").items()}
GPUS: Final = tuple(name for name, hardware in HARDWARE.items() if hardware.gpus)
PRIVATE_USD_TB_MONTH: Final = 18.0  # for private storage beyond the included amount; cheaper from 50 TB on
INCLUDED_TB: Final = 1.0  # with PRO, or per seat of an organization
EGRESS_RATIO: Final = 8.0  # the price covers egress, CDN included, up to this multiple of the stored bytes


class Sizes(NamedTuple):
    """Bytes per change in delta files: `fast[i]` or `small[i]` if `shares[i]` of the weights changed."""

    shares: tuple[float, ...]
    fast: tuple[float, ...]
    small: tuple[float, ...]


# "fp32": 63 M weights in the shapes of Qwen3-0.6B, late in a run, from section "growth" of the bench.
# "fp32-start": SmolLM2-135M, from `bench.deltas.smollm2(GRID, share)` on 2026-11-21.
# "bf16": the shapes of "fp32", from `bench.deltas.qwen(BF16, share, shapes)` on 2026-11-21.
# For "fp32-start" and "bf16", the sizes at 1 % are from section "size" instead.
SIZES: Final[dict[Trainer, Sizes]] = {trainer: Sizes(**row) for trainer, row in _read("sizes.json").items()}
# Versions that a delta spans (if several, a jump) -> changes, relative to one version (section "joining").
MERGED: Final = {1: 1.0, 8: 4.93, 64: 16.1}
_TABLE_BYTES: Final = 75.0  # bytes of a delta file's header for each changed tensor
_WEIGHTS_PER_TENSOR: Final = 1.4e6  # in the measured models; larger models have fewer tensors per weight


class Rate(NamedTuple):
    """Nanoseconds that one core takes per weight of the model, and in addition per changed weight."""

    per_weight: float
    per_change: float = 0.0

    def seconds(self, weights: float, changes: float = 0.0) -> float:
        """Seconds for a model of this size."""
        return 1e-9 * (self.per_weight * weights + self.per_change * changes)


# From sections "speed" (596 M weights, 1 % changed) and "growth" (16 to 596 M weights, 0.1 to 30 % changed).
DIFF: Final[dict[Trainer, Rate]] = {"fp32": Rate(0.67), "fp32-start": Rate(0.67), "bf16": Rate(0.45)}
ENCODE: Final[dict[Encoding, Rate]] = {"fast": Rate(0.0, 12.0), "small": Rate(0.14, 30.0)}
# above 1/8 changed, the codec tries more modes, which takes 2.5 times as long
_DENSE = 1 / 8
_TRIED = 2.5
DECODE: Final[dict[Encoding, Rate]] = {"fast": Rate(0.02, 8.5), "small": Rate(0.26, 17.0)}
DIGEST: Final = Rate(0.11)  # hash all live weights, at a join (on a CPU also once a minute in the background)
SWAP: Final = Rate(0.0, 5.0)  # receive a change (6 bytes) from another process of the same machine
PLACE: Final = Rate(0.0, 11.0)  # find the place of a change and read its old bits
COMMIT: Final = Rate(0.0, 9.4)  # write changes and read them back, while generation waits (section "live")
SAVE: Final = Rate(3.1)  # write a checkpoint to disk (row "publish whole" of section "speed")
LOAD: Final = Rate(0.175)  # read a checkpoint from the page cache (row "receive whole" of section "speed")
COPY_STATE_S: Final = 0.64e-9  # per byte of a state: copy it to new host memory while the CPU is busy
APPLY: Final = Rate(0.0, 8.6)  # add a decoded delta to weights in host memory
TWO_THREADS: Final = (1.12, 1.62)  # lowest and highest speed-up by a second thread (section "threads")

GPU_BYTES: Final = 80e9  # assumed: memory of one accelerator
PER_MACHINE: Final = 8  # assumed: ranks or workers of one machine; all share the machine's link
STATE_BYTES: Final[dict[Trainer, float]] = {"fp32": 12.0, "fp32-start": 12.0, "bf16": 6.0}  # per weight
STATE_MINUTES: Final = 5.0  # default time between two states, which take at most a tenth of the link
TRAINER_BYTES: Final = 16.0  # assumed per weight: fp32 weights, gradients and AdamW's two moments
REPLICA_BYTES: Final = 2.4  # assumed per weight: 2 in bf16, and a fifth of that for keys and values

# Requests per version without polls of HEAD, counted with the real clients at the simulated Hub. "all"
# includes "api" (the Hub's API) and "files" ("/resolve/"). A poll is one request for a file. A safety poll,
# made even while the Hub sends events, also lists all HEADs (a request to the API). A publisher makes one
# request after another. A reader polls HEAD, then reads all small objects in parallel.
PUBLISHING: Final = {"all": 6, "api": 2, "files": 0}
PUBLISHING_PART: Final = {"all": 4, "api": 0, "files": 0}  # by each of several ranks, before rank 0 publishes
# An upload in addition to versions: of a jump, or of a segment of the log. The log travels with versions.
UPLOADING: Final = {"all": 5, "api": 1, "files": 0}
# Other requests of a publisher, per version: the look for damage, and the deletion of what is in a segment.
LOOKING: Final = 1 / 16 + 1 / SEGMENT
TAKING: Final = {"all": 6, "api": 0, "files": 3}
TAKING_PART: Final = {"all": 2, "api": 0, "files": 1}  # for each further part, in parallel with the first
TAKING_LARGE_PART: Final = {"all": 2, "api": 0, "files": 0}  # for each further part of more than DIRECT bytes
TAKING_IN_TURN: Final = 3  # a reader's requests in sequence, including the poll of HEAD
# Large parts take further requests, in sequence: 2 for each part of more than SMALL bytes, but only 5 in all
# if the parts have more than DIRECT bytes. Rows: the size, (number of requests, how many go to the API).
_FURTHER: Final = ((DIRECT, (5, 2)), (SMALL, (2, 0)))
POLLS: Final = 2  # polls of HEAD after the Hub announces a version: one immediately, one an interval later
WINDOW_S: Final = 300.0  # the Hub counts requests per user in windows of five minutes (docs/hub/rate-limits)
FILES_ALLOWED: Final = "free 5,000, PRO 12,000, Team 20,000"
API_ALLOWED: Final = "free 1,000, PRO 2,500, Team 3,000"
_HOUR_S: Final = 3600.0


HEAD_BYTES: Final = 640  # of a signed HEAD
# Compressed, of an event with 16 rollouts of 16 turns, the most that an event holds.
_LARGEST_LOG: Final = 150e3


def manifest_bytes(parts: int) -> int:
    """Size of a manifest late in a run whose deltas and anchors have `parts` files."""
    entry = 90 + (11 * parts if parts > 1 else 0)
    small_files = 5  # config, tokenizer
    return 700 + (WINDOW + WINDOW // STRIDES[0] + 1) * entry + (parts + small_files) * 110


def log_bytes(delta: float) -> float:
    """The bytes of log that a version takes at most, with a delta of `delta` bytes."""
    return min(max(delta / LOG_SHARE, VERSION_BYTES), _LARGEST_LOG)


def distance_bits(share: float) -> float:
    """Bits of a distance between changes in the best Rice code, if `share` (below 1/2) of weights changed."""
    return min(k + 1 / (1 - (1 - share) ** (1 << k)) for k in range(41))


def delta_bytes(params: float, share: float, encoding: Encoding, trainer: Trainer) -> float:
    """Size of a delta file for a model with `params` weights of which `share` changed."""
    shares, fast, small = SIZES[trainer]

    def fixed_bits(p: float) -> float:  # distance, sign, and the file's list of changed tensors
        return distance_bits(p) + 1 + 8 * _TABLE_BYTES / max(_WEIGHTS_PER_TENSOR * p, 1.0)

    def interpolated(values: list[float]) -> float:
        return float(np.interp(math.log(share), np.log(shares), values))

    other_bits = [8 * size - fixed_bits(p) for p, size in zip(shares, fast, strict=True)]
    ratios = [b / a if encoding == "small" else 1.0 for a, b in zip(fast, small, strict=True)]
    return params * share * (fixed_bits(share) + interpolated(other_bits)) / 8 * interpolated(ratios)


class RunFiles:
    """Deltas, jumps and anchors (checkpoints) of a run. Each version changes `share` of the weights."""

    def __init__(self, params: int, share: float, encoding: Encoding, trainer: Trainer) -> None:
        # above this share, bytes per change stay the same
        self._full = 2.0 * params
        densest = 0.3
        shares = {span: min(share * MERGED[span], 1.0) for span in (*reversed(STRIDES), 1)}
        self._changes = {span: params * merged for span, merged in shares.items()}
        self._sizes = {}
        for span, merged in shares.items():
            size = delta_bytes(params, min(merged, densest), encoding, trainer) * max(merged / densest, 1.0)
            self._sizes[span] = min(size, self._full)
        self.delta = self._sizes[1]  # bytes of a delta over one version
        self.jumps = sum(self._sizes[stride] / stride for stride in STRIDES)  # bytes of jumps per version

    def after_anchor(self, versions: float) -> tuple[float, float, int]:
        """Bytes, changes and files that a join fetches in addition to an anchor that is `versions` old."""
        size = 0.0
        changes = 0.0
        files = 0
        left = int(versions)
        for span in self._sizes:  # the longest jump first, deltas last
            count, left = divmod(left, span)
            size += count * self._sizes[span]
            changes += count * self._changes[span]
            files += count
        return size, changes, files

    def anchor_every(self) -> int:
        """Versions from one anchor to the next, by the publisher's rule."""
        for versions in itertools.count(1):
            size, _, files = self.after_anchor(versions)
            if size > ANCHOR_PAYS * self._full or files >= MAX_FILES:
                break
        return versions


@dataclass(frozen=True)
class Question:
    """What to predict. `share` is from 0 to 1; `link` is in bytes per second of each machine."""

    params: int
    share: float
    replicas: int
    link: float
    encoding: Encoding = "fast"
    trainer: Trainer = "fp32"
    steps_per_hour: float | None = None  # None: as many as the slower of publisher and replicas can take
    cores: int = 2  # for each rank, and for each worker of a replica
    latency: float = 0.1  # seconds that a request to the Hub takes in addition to its bytes
    ranks: int | None = None  # of the trainer; None: as many as the trainer's memory needs
    workers: int | None = None  # of each replica; None: as many as the replica's memory needs


class Plan:
    """The prediction: sizes in bytes, `*_s` in seconds, money in US dollars. `vars(plan)` has all values."""

    def __init__(self, asked: Question) -> None:
        self.question = asked
        params = asked.params
        link = asked.link
        files = RunFiles(params, asked.share, asked.encoding, asked.trainer)
        self.changes = params * asked.share
        self.full = 2.0 * params
        self.delta = files.delta
        self.per_change = self.delta / self.changes
        self.anchor_every = files.anchor_every()
        self.trainer_ranks = ranks = asked.ranks or math.ceil(TRAINER_BYTES * params / GPU_BYTES)
        self.replica_workers = asked.workers or math.ceil(REPLICA_BYTES * params / GPU_BYTES)
        self.trainer_machines = math.ceil(ranks / PER_MACHINE)
        self.replica_machines = math.ceil(self.replica_workers / PER_MACHINE)
        links = link * self.trainer_machines  # for uploads; a replica fetches on one machine, over one link
        self.threads = util.threads(asked.cores)  # threads that encode or decode

        # One sync.
        changes = self.changes
        decode = DECODE[asked.encoding]
        self.diff_s = diff_s(params, changes, asked.trainer, ranks, self.threads, link)
        parts = min(ranks, MAX_PARTS)
        self.encode_s = encode_s(params, changes, asked.encoding) / self.threads / parts
        # Each rank uploads its part over the link of its machine. Then rank 0 uploads the manifest.
        self.uploads = PUBLISHING["all"] + (PUBLISHING_PART["all"] if parts > 1 else 0)
        on_one = math.ceil(parts / self.trainer_machines)
        self.upload_s = on_one * self.delta / parts / link + self.uploads * asked.latency
        large = self.delta / parts > DIRECT

        def further_requests(size: float) -> tuple[int, int]:
            return next((more for above, more in _FURTHER if size / parts > above), (0, 0))

        further, api = further_requests(self.delta)
        self.fetches = TAKING_IN_TURN + further
        self.notification_s = POLL_S / 2

        def taken(size: float, changed: float) -> tuple[float, float, float]:
            wait_s = further_requests(size)[0] * asked.latency
            rounds = math.ceil(parts / SIDE_BY_SIDE)
            rounds = 1 if size / parts > DIRECT else rounds  # large parts are fetched together
            # The link must carry all parts, and rounds follow each other. The slower of these two counts.
            parts_s = max(wait_s + size / link, rounds * (wait_s + size / parts / link))
            stage_commit_s = taking_s(params, changed, asked.encoding, self.replica_workers, self.threads)
            return TAKING_IN_TURN * asked.latency + parts_s, *stage_commit_s

        self.fetch_s, self.stage_s, self.commit_s = taken(self.delta, changes)
        self.behind_s = sum(taken(*files.after_anchor(max(STRIDES))[:2]))  # 64 versions late: one jump
        taken_s = self.fetch_s + self.stage_s + self.commit_s
        published_s = self.diff_s + self.encode_s + self.upload_s
        self.hand_over_to_serving_s = published_s + self.notification_s + taken_s

        # Versions per hour.
        self.manifest = manifest_bytes(parts) + HEAD_BYTES
        self.log = log_bytes(self.delta)
        # Bytes per version, on average.
        self.sync_bytes = self.delta + self.manifest + self.log + files.jumps + self.full / self.anchor_every
        stored = self.sync_bytes
        self.anchor_s = self.full / links
        self.link_versions_hour = _HOUR_S * links / stored
        self.publisher_versions_hour = min(_HOUR_S / (self.encode_s + self.upload_s), self.link_versions_hour)
        self.replica_versions_hour = _HOUR_S / (POLL_S + taken_s)
        wanted = asked.steps_per_hour or min(self.publisher_versions_hour, self.replica_versions_hour)
        self.published_hour = min(wanted, self.publisher_versions_hour)
        self.steps_per_version = wanted / self.published_hour

        # Before a replica that joins late can stage, it fetches all files, then applies them in sequence.
        def deltas_s(versions: float) -> float:
            size, changed, count = files.after_anchor(versions)
            rounds = 1 if large else math.ceil(count * parts / SIDE_BY_SIDE)
            # `fetch_ahead` gets few files of a join. So files below SMALL take further requests, too.
            requests_s = rounds * (further or _FURTHER[-1][1][0]) * asked.latency
            apply_s = decode.seconds(params, changed) + APPLY.seconds(params, changed)
            return requests_s + size / link + apply_s / self.threads

        self.join_anchor_s = self.full / link
        self.join_deltas_s = deltas_s(self.anchor_every / 2)
        check_s = DIGEST.seconds(params) / self.threads
        self.join_rebuild_s = LOAD.seconds(params) + check_s + SAVE.seconds(params)
        self.join_s = self.join_anchor_s + self.join_deltas_s + self.join_rebuild_s
        self.join_worst_s = self.join_s - self.join_deltas_s + deltas_s(self.anchor_every - 1)

        # Storage, requests to the Hub in five minutes, money.
        fetched_hour = min(self.published_hour, self.replica_versions_hour) * asked.replicas
        self.state = STATE_BYTES[asked.trainer] * params
        self.copy_state_s = COPY_STATE_S * self.state / ranks
        self.states_hour = min(self.state * 60 / STATE_MINUTES, _HOUR_S * links / 10)
        self.stored_hour = self.published_hour * stored
        self.egress_hour = fetched_hour * (self.delta + self.manifest)
        # A mirror has bf16 copies of the tensors that a rank owns, and of its blocks of other ranks' tensors.
        self.mirror = self.full / parts + self.full / ranks * (1 - 1 / parts)

        def taken_requests(kind: str, more: int) -> int:
            each = TAKING_LARGE_PART[kind] if large else TAKING_PART[kind] + more
            return TAKING[kind] + more + (parts - 1) * each

        self.taken_requests = taken_requests("all", further)

        def requests(kind: str, more: int) -> float:
            made = self.publishing(kind)
            per_hour = self.published_hour * made + fetched_hour * taken_requests(kind, more)
            return WINDOW_S * (per_hour / _HOUR_S + asked.replicas / SAFETY_S)

        polls = WINDOW_S / _HOUR_S * fetched_hour * POLLS
        self.file_requests = requests("files", 0) + polls
        self.api_requests = requests("api", api)
        fitting = [n for n in GPUS if 1e9 * HARDWARE[n].gpus * HARDWARE[n].gpu_gb >= REPLICA_BYTES * params]
        self.space = min(fitting, key=lambda name: HARDWARE[name].usd_per_hour, default=None)
        self.replicas_usd_hour = HARDWARE[self.space].usd_per_hour * asked.replicas if self.space else None
        day_tb = (24 * self.stored_hour + 2 * self.state) / 1e12
        self.storage_usd_month = PRIVATE_USD_TB_MONTH * max(day_tb - INCLUDED_TB, 0.0)  # if one day is kept

        # The same sync with full checkpoints.
        publish_s = SAVE.seconds(params) / parts + self.anchor_s
        load_s = self.full / link + LOAD.seconds(params)
        self.full_s = publish_s + self.notification_s + load_s
        self.full_versions_hour = _HOUR_S / max(publish_s, POLL_S + load_s)

    def publishing(self, kind: str) -> float:
        """Requests of all ranks per version, on average: "all", "api" or "files"."""
        parts = min(self.trainer_ranks, MAX_PARTS)
        made: float = PUBLISHING[kind] + (parts if parts > 1 else 0) * PUBLISHING_PART[kind]
        made += UPLOADING[kind] * (parts * sum(1 / stride for stride in STRIDES) + 1 / SEGMENT)
        return made + (LOOKING if kind != "files" else 0.0)


def diff_s(params: float, changes: float, trainer: Trainer, ranks: int, threads: int, link: float) -> float:
    """Return how many seconds the trainer waits for the diff.

    Each rank compares its shard, and then sends its changes to the owners of the tensors. `threads`: of each
    rank. `link`: bytes per second of each machine.
    """
    compare_s = DIFF[trainer].seconds(params) / ranks / threads
    if ranks == 1:
        return compare_s
    machines = math.ceil(ranks / PER_MACHINE)
    between = 6 * changes * (1 - 1 / machines)  # bytes that go to other machines
    return compare_s + SWAP.seconds(0, changes / ranks) + between / (link * machines)


def encode_s(params: float, changes: float, encoding: Encoding) -> float:
    """Seconds of one core to encode a delta."""
    return (_TRIED if changes > _DENSE * params else 1.0) * ENCODE[encoding].seconds(params, changes)


def taking_s(
    weights: float, changes: float, encoding: Encoding, workers: int, threads: int
) -> tuple[float, float]:
    """Return seconds (stage, commit): how long a replica's workers take for a delta that is on their disk."""
    together = min(workers, PER_MACHINE) if encoding == "fast" else 1
    mine = changes / workers  # changes of weights that one worker holds
    stage_s = (DECODE[encoding].seconds(weights, changes) / together + PLACE.seconds(0, mine)) / threads
    return stage_s + (SWAP.seconds(0, mine) if together > 1 else 0.0), COMMIT.seconds(0, mine) / threads
