"""Trainer and replicas: the library's code, with weights that are only counted."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import UUID

import numpy as np
import torch
from greenlet import getcurrent

from bench.fleet.clock import Clock, Condition, Event, Group, Pipe
from bench.fleet.hub import (
    UNLIMITED,
    FolderBucket,
    Hub,
    Limits,
    Link,
    OneMachine,
    SimBucket,
    StandIn,
    stand_in,
)
from delta_weight_sync import cost, reader, records, runlog, util, watch
from delta_weight_sync.engine import Engine, Times
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.prune import Keep
from delta_weight_sync.publish import outbox, reports, shortcuts, spans, writer
from delta_weight_sync.publish.blocks import Block
from delta_weight_sync.publish.sharding import Held
from delta_weight_sync.records import Manifest
from delta_weight_sync.store import hub
from delta_weight_sync.vllm import follower


@dataclass(frozen=True)
class Region:
    """Where a part of the replicas runs."""

    latency: float  # seconds to the store
    link: float  # bytes per second of each replica
    store: float = math.inf  # bytes per second for all replicas of the region


@dataclass(frozen=True)
class Scenario:
    """What is simulated. `share` from 0 to 1, speeds in bytes per second, times in seconds."""

    params: int
    share: float
    replicas: int
    step_s: float
    minutes: float  # that are measured, from the time when 95 % of the replicas serve
    link: float = 1e9  # of each machine of the trainer
    latency: float = 0.1  # from the trainer to the store
    regions: tuple[Region, ...] = (Region(0.1, 1e9),)
    ranks: int = 1  # of the trainer, `cost.PER_MACHINE` on each machine; each has one tensor
    given_workers: int = 0  # of a replica; 0: as many as the model's memory needs
    cores: int = 2  # of a rank, and of each worker of a replica
    core_s: float = 0.0  # seconds that each request of a replica takes of one core, which all replicas share
    limits: Limits = UNLIMITED  # that the Hub enforces
    events: bool = True
    event_s: float = 0.5
    lost: float = 0.0  # share of the events that never arrive
    deaths_hour: float = 0.0  # replicas that die per hour; a replica with an empty disk replaces each
    outage: tuple[float, float] | None = None  # its start in measured minutes, and its length in seconds
    assets: Path | None = None  # the folder with the small files of the checkpoint
    keep: str = ""  # what `prune` leaves; "" for everything
    one_machine: OneMachine | None = None  # replaces links and latencies
    poll_s: float = 1.0
    seed: int = 0

    @property
    def workers(self) -> int:
        """Workers of a replica."""
        return self.given_workers or math.ceil(cost.REPLICA_BYTES * self.params / cost.GPU_BYTES)

    @property
    def machines(self) -> int:
        """Machines of the trainer."""
        return math.ceil(self.ranks / cost.PER_MACHINE)

    @property
    def owned(self) -> int:
        """Weights that a rank owns."""
        return self.params // self.ranks

    @property
    def threads(self) -> int:
        """Threads of a rank or worker that encode or decode."""
        return util.threads(self.cores)

    def changes(self, syncs: float) -> float:
        """Weights that differ after this number of syncs, interpolated between measured merges."""
        spans = np.log(list(cost.MERGED))
        factors = np.log(list(cost.MERGED.values()))
        slope = (factors[-1] - factors[-2]) / (spans[-1] - spans[-2])  # beyond the longest measured merge
        far = max(math.log(max(syncs, 1e-9)) - spans[-1], 0.0)
        factor = math.exp(float(np.interp(math.log(max(syncs, 1e-9)), spans, factors)) + slope * far)
        return self.params * min(self.share * factor, 1.0) if syncs else 0.0

    def delta_bytes(self, syncs: float) -> float:
        """Size of a delta over this number of syncs."""
        share = self.changes(syncs) / self.params
        densest = 0.3
        size = cost.delta_bytes(self.params, min(share, densest), "fast", "fp32") * max(share / densest, 1.0)
        return min(size, 2.0 * self.params)


def _computing(scenario: Scenario, clock: Clock) -> Callable[[float], object]:
    """How a trainer spends the time that `plan` predicts. `OneMachine` has the measured time instead."""
    return (lambda _: None) if scenario.one_machine else clock.sleep


class Many:
    """The positions or values of a patch: only their number."""

    def __init__(self, size: float, itemsize: int) -> None:
        self.size = int(size)
        self.nbytes = int(size * itemsize)

    def __getitem__(self, _: int) -> int:
        return 0


class CountedPatch:
    """What `syncs` syncs changed in the tensor of one rank."""

    def __init__(self, scenario: Scenario, name: str, syncs: float) -> None:
        self.name = name
        self.shape = (scenario.owned,)
        self.syncs = syncs
        changes = scenario.changes(abs(syncs)) / scenario.ranks
        self.index, self.ulps = (Many(changes, size) for size in (8, 2))


class CountedBits:
    """The tensor of one rank: the number of syncs that it holds."""

    def __init__(self, name: str, syncs: float = 0.0) -> None:
        self.name = name
        self.syncs = syncs

    def copy(self) -> CountedBits:
        """A copy."""
        return CountedBits(self.name, self.syncs)


class Codec:
    """In place of `delta_weight_sync.codec` and of files with weights: takes time, computes nothing."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self._scenario = scenario
        self._disk = dict[Path, CountedBits]()
        self._sleep = _computing(scenario, clock)

    def merge(self, first: Sequence[Any], then: Sequence[Any]) -> list[Any]:
        """As `codec.merge`."""
        both = (*first, *then)
        syncs = sum(patch.syncs for patch in both)
        return [CountedPatch(self._scenario, both[0].name, syncs)] if syncs else []

    def inverse(self, patch: Any) -> CountedPatch:
        """As `codec.inverse`."""
        return CountedPatch(self._scenario, patch.name, -patch.syncs)

    def apply(self, patch: Any, bits: CountedBits) -> None:
        """As `codec.apply`."""
        bits.syncs += patch.syncs
        self._sleep(cost.APPLY.seconds(0, patch.index.size))

    def encode(
        self, patches: Iterable[Any], _: object, *, base: int, version: int, encoding: Any = "fast", **__: int
    ) -> StandIn:
        """As `codec.encode`."""
        asked = self._scenario
        name = ""
        syncs = 0.0
        for patch in patches:  # at most one
            name = patch.name
            syncs = patch.syncs
        seconds = cost.encode_s(asked.params, asked.changes(syncs), encoding)
        self._sleep(seconds / asked.threads / asked.ranks)
        return StandIn.of(
            f"{syncs} {base} {version} {name}".encode(), asked.delta_bytes(syncs) / asked.ranks, syncs
        )

    def Delta(self, path: Path) -> Any:  # noqa: N802 - the name of the class that it stands for
        """As `codec.Delta`."""
        syncs, base, version, *names = path.read_bytes().split()
        patches = [CountedPatch(self._scenario, name.decode(), float(syncs)) for name in names]

        def decode(*_: object) -> list[Any]:
            for patch in patches:
                self._sleep(cost.DECODE["fast"].seconds(self._scenario.owned, patch.index.size))
            return [SimpleNamespace(patches=lambda _: patches)]

        rows = [SimpleNamespace(name=patch.name, group=0) for patch in patches]
        found = {"tensors": rows, "groups": rows, "reads_old": False, "decode": decode}
        return SimpleNamespace(base=int(base), version=int(version), **found)

    def digest_change(self, patch: Any, _: object) -> int:
        """As `spans.digest_change`: see `CountedMirror.keep`."""
        return int(patch.syncs)

    def map_folder(self, folder: Path) -> dict[str, CountedBits]:
        """As `checkpoint.map_folder`."""
        return {self._disk[folder].name: self._disk[folder]}

    def write_bits(
        self, shapes: Mapping[str, object], bits: Callable[[str], CountedBits], path: Path, _: object = None
    ) -> None:
        """As `checkpoint.write_bits`."""
        (name,) = shapes
        self._disk[path.parent] = bits(name).copy()
        with path.open("wb") as file:
            file.truncate(2 * self._scenario.owned)
        self._sleep(cost.SAVE.seconds(self._scenario.owned))

    def require_digest(self, *_: object) -> None:
        """As `reader.require_digest`."""
        self._sleep(cost.DIGEST.seconds(self._scenario.owned))


class CountedMirror:
    """In place of the `Mirror` of a rank's own tensor."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self._scenario = scenario
        self._sleep = _computing(scenario, clock)
        self._bits = CountedBits("")
        self.digest = 0

    def add(self, name: str, *_: object) -> None:
        """As in `Mirror`."""
        self._bits = CountedBits(name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As in `Mirror`."""
        return {self._bits.name: (self._scenario.owned,)}

    def bits(self, _: str) -> CountedBits:
        """As in `Mirror`."""
        return self._bits

    def search(self) -> Any:
        """As in `Mirror`: each part has changed."""
        parts = list[Any]()
        asked = self._scenario

        def found() -> Any:
            given = asked.ranks, asked.threads, asked.link
            self._sleep(cost.diff_s(asked.params, asked.changes(1), "fp32", *given))
            return SimpleNamespace(patches=[CountedPatch(asked, part.name, 1.0) for part in parts])

        return SimpleNamespace(add=parts.append, found=found)

    def keep(self, _: object) -> None:
        """As in `Mirror`."""
        self._bits.syncs += 1
        self.digest += 1

    def take(self, *_: object) -> None:
        """As in `Mirror`."""

    require_finite = take


class Seat:
    """In place of `Peers`: what a rank sends to others takes no time here, but `cost.diff_s` counts it."""

    def __init__(self, group: Group, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self.main = rank == 0
        self._group = group
        self._round = 0

    def exchange(self, message: Any) -> list[Any]:
        """As in `Peers`."""
        self._round += 1
        return self._group.exchange(self._round, self.rank, message)

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """As in `Peers`; in a simulation, no rank fails."""
        yield
        self.exchange(None)

    def all_to_all(self, *_: object) -> list[Any]:
        """As in `Peers`: each rank has found the changes of its own tensor."""
        return self.exchange([])[0]  # an empty list, once all ranks are here

    def scatter(self, *_: object) -> list[Any]:
        """As in `Peers`, without tensors."""
        return []


@dataclass(frozen=True, eq=False)
class Rank:
    """A process of the trainer."""

    number: int
    bucket: SimBucket


class CountedLayout:
    """In place of `vllm.disk.Layout`: fetches the same files."""

    def __init__(self, fleet: Fleet, read: reader.RunReader, folder: Path) -> None:
        self._fleet = fleet
        self._reader = read
        self._folder = folder
        self._anchor = None

    def put(self, manifest: Manifest) -> tuple[Path, dict[str, list[int]], dict[str, str]]:
        """As in `Layout`."""
        asked = self._fleet.asked
        sleep = self._fleet.clock.sleep
        if self._anchor != manifest.anchor:
            self._reader.fetch_anchor(manifest.anchor, self._folder)
            self._anchor = manifest.anchor
        for ref in manifest.anchor.weights:
            (self._folder / ref.name).touch()
        check_s = cost.DIGEST.seconds(asked.params) / asked.threads
        sleep(cost.LOAD.seconds(asked.params) + check_s + cost.SAVE.seconds(asked.params))
        deltas = self._reader.recipe(manifest).deltas
        self._reader.fetch_all(deltas, self._folder)
        for ref in deltas:
            decode_s = cost.DECODE["fast"].seconds(asked.owned, ref.changed) / asked.threads
            sleep(decode_s + cost.APPLY.seconds(0, ref.changed))
        return self._folder, {}, {}

    def progress(self) -> str:
        """As in `Layout`."""
        return ""

    def done(self) -> None:
        """As in `Layout`."""


class CountedEngine(Engine):
    """In place of `vllm.engine.Engine`: it only takes the time that commits take."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._step_ends = 0.0

    def alive(self) -> bool:
        """As in `Engine`."""
        return True

    def learn(self, *_: object) -> str:
        """As in `Engine`."""
        return ""

    def relabel(self, label: str) -> None:
        """As in `Engine`."""

    def describe(self) -> str:
        """As in `Engine`."""
        return "simulated"

    def take(self, deltas: Sequence[Path], *_: str) -> Times:
        """As in `Engine`."""
        syncs = [self._fleet.hub.syncs[path.name] for path in deltas]
        return self._took(sum(map(self._fleet.asked.changes, syncs)) / self._fleet.asked.ranks, decoded=True)

    def take_checkpoint(self, *_: object) -> Times:
        """As in `Engine`. The engine has the base model, so all changes since the first version are new."""
        return self._took(self._fleet.asked.changes(len(self._fleet.handed) - 1), decoded=False)

    def _took(self, changes: float, *, decoded: bool) -> Times:
        asked = self._fleet.asked
        clock = self._fleet.clock
        if machine := asked.one_machine:
            chosen = map(self._fleet.rng.choice, (machine.pokes, machine.stages, machine.commits))
            call_s, stage_s, commit_s = chosen
            clock.sleep(call_s)  # the call waits for the API server's event loop, as a poke does
            self._end_of_step(machine)  # vLLM takes a call between two steps
            clock.sleep(stage_s)
            self._end_of_step(machine)
            clock.sleep(commit_s)
            return stage_s, commit_s, commit_s, clock.now
        stage_s, pause_s = cost.taking_s(asked.params, changes, "fast", asked.workers, asked.threads)
        if not decoded:
            stage_s = cost.PLACE.seconds(0, changes) / asked.workers / asked.threads
        clock.sleep(stage_s + pause_s)
        return stage_s, pause_s, pause_s, clock.now

    def _end_of_step(self, machine: OneMachine) -> None:
        now = self._fleet.clock.now
        rng = self._fleet.rng
        while self._step_ends <= now:
            self._step_ends += rng.choice(machine.steps)
        self._fleet.clock.sleep(self._step_ends - now)


class Replica(follower.Follower):
    """A follower that reports what it serves to the fleet."""

    def __init__(self, fleet: Fleet, number: int, folder: Path) -> None:
        asked = fleet.asked
        region = number % len(fleet.pipes)
        link = Link(asked.regions[region].latency, fleet.pipes[region], fleet.core, asked.core_s)
        self.fleet = fleet
        self.sync = -1
        self.since = fleet.clock.now  # when it was started, and later when it first served
        read = reader.RunReader(fleet.bucket(link, "replica"), "fleet")
        super().__init__(read, CountedEngine(fleet), name=f"{number}", folder=folder, poll_s=asked.poll_s)

    def explain(self, error: Exception | None) -> str:
        """As in `Follower`; a fault of the simulator ends the simulation."""
        if error and not isinstance(error, DeltaWeightSyncError):
            raise error
        return super().explain(error)

    def _serve(self, manifest: Manifest, *times: float, joined: bool = False) -> None:
        super()._serve(manifest, *times, joined=joined)
        self.fleet.served(self, manifest)


class Fleet:
    """One run of a scenario. The figures are for the measured time only."""

    def __init__(self, asked: Scenario) -> None:
        self.asked, self.clock, self.rng = asked, Clock(), random.Random(asked.seed)
        self.hub = Hub(self.clock, self.rng, asked.limits, asked.event_s, asked.lost)
        self.replicas = dict[int, Replica]()
        self.handed = list[float]()  # when each sync was handed over
        self.lags = list[float]()  # one for each sync and replica
        self.joins = list[float]()  # seconds from the start of a replica until it first served
        self.versions = list[Manifest]()
        self.began = math.inf
        self.sent = 0
        self.stored = 0
        self._serving = Condition(self.clock)
        self._served = 0
        self._begun = Event(self.clock)
        self._buckets = list[SimBucket]()
        # The ranks talk in two groups: their main threads, and their publishing threads.
        self._peers, self._background = (Group(self.clock, asked.ranks) for _ in range(2))

    def run(self) -> Fleet:
        """Run the scenario."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            for module, names in self.simulated().items():
                stack.enter_context(mock.patch.multiple(module, **names))
            self.pipes = [Pipe(self.clock, region.store, region.link) for region in self.asked.regions]
            self.core = Pipe(self.clock, 1.0) if self.asked.core_s else None
            self._folder = Path(folder)
            self.clock.spawn(self._train, "trainer")
            self.clock.run()
        return self

    def bucket(self, link: Link, role: str) -> SimBucket:
        """The client of a machine."""
        if self.asked.one_machine:
            return FolderBucket(self.hub, self.asked.one_machine, role)
        return SimBucket(self.hub, link, role, self.asked.events)

    def served(self, replica: Replica, manifest: Manifest) -> None:
        """Note that a replica serves a version."""
        now = self.clock.now
        first = replica.sync < 0
        if first:
            self._served += 1
            self._serving.notify_all()
            if replica.since >= self.began:
                self.joins.append(now - replica.since)
            replica.since = now
        for sync in range(replica.sync + 1, manifest.sync + 1):
            if self.handed[sync] >= max(self.began, replica.since):
                self.lags.append(now - self.handed[sync])
        replica.sync = manifest.sync

    def simulated(self) -> dict[Any, dict[str, Any]]:
        """What is replaced in each module: time, threads, and all code that computes with weights."""
        clock = self.clock
        asked = self.asked
        codec = Codec(asked, clock)
        both = {"threading": clock.threading, "time": clock.time}
        files = {name: getattr(codec, name) for name in ("map_folder", "require_digest", "digest_change")}
        disk = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=math.inf), rmtree=shutil.rmtree)

        def mirror(*_: object, **__: object) -> CountedMirror:
            return CountedMirror(asked, clock)

        layout = functools.partial(CountedLayout, self)
        ids = random.Random(self.asked.seed)
        return {
            "delta_weight_sync.store.notifications": {"threading": clock.threading},
            hub: both | {"random": self.rng},
            watch: {"monotonic": clock.seconds},
            reader: {"ThreadPoolExecutor": clock.executor},
            records: {"parse": functools.cache(records.parse)},
            # The log is compressed, so its size would differ with random digits.
            "delta_weight_sync.records.keys": {
                "uuid4": lambda: UUID(int=ids.getrandbits(128), version=4),
            },
            runlog: both,
            writer: {
                "time": clock.time,
                "file_sha256": lambda path: hashlib.sha256(stand_in(path)).hexdigest(),
            },
            shortcuts: files | {"threading": clock.threading, "codec": codec, "shutil": disk},
            spans: {"codec": codec},
            outbox: both
            | {"codec": codec, "Mirror": mirror, "write_bits": codec.write_bits}
            | {"Peers": lambda **_: Seat(self._background, getcurrent().owner.number)},
            reports: {"time": clock.time},
            follower: both | {"Layout": layout},
        }

    def _train(self) -> None:
        asked = self.asked
        clock = self.clock
        pipes = [Pipe(clock, asked.link) for _ in range(asked.machines)]
        links = (Link(asked.latency, pipes[number // cost.PER_MACHINE]) for number in range(asked.ranks))
        ranks = [Rank(number, self.bucket(link, "trainer")) for number, link in enumerate(links)]
        self._buckets = [rank.bucket for rank in ranks]
        main_writer = writer.RunWriter(ranks[0].bucket, "fleet", model="none", assets=asked.assets)
        for rank in ranks:
            clock.spawn(functools.partial(self._rank, rank, main_writer), rank)

    def _rank(self, rank: Rank, main_writer: writer.RunWriter) -> None:
        # only rank 0 gets a log
        asked = self.asked
        clock = self.clock
        own = main_writer
        log = None
        if rank.number:
            read = reader.RunReader(rank.bucket, "fleet")
            own = writer.PartWriter(read, main_writer.writer, main_writer.newest)
        else:
            log = runlog.RunLogWriter(rank.bucket, "fleet", main_writer.writer)
            main_writer.log = log
        own.part = f".r{rank.number}" if asked.ranks > 1 else ""
        seat = Seat(self._peers, rank.number)
        keep = Keep.parse(asked.keep) if asked.keep else None
        publisher = outbox.Outbox(own, log, peers=seat, keep=keep)
        block = Block.whole((asked.owned,))
        row = torch.zeros(1).expand(asked.owned)
        weights = [Held(f"of.{n}", "BF16", block.shape, row, block) for n in range(asked.ranks)]
        if log:
            self.handed.append(clock.now)
        publisher.publish(weights, 0)
        if log:
            for number in range(asked.replicas):
                clock.call(self.rng.uniform(0, 60), functools.partial(self._start, number))
            self._serving.wait_for(lambda: self._served >= 0.95 * asked.replicas)
            self._begin(main_writer)
        self._begun.wait()
        for sync in itertools.count(1):
            clock.sleep(max(self.began + sync * asked.step_s - clock.now, 0.0))
            if log:
                self.handed.append(clock.now)
            publisher.publish(weights, sync)

    def _begin(self, main_writer: writer.RunWriter) -> None:
        """Start to measure."""
        self.began = self.clock.now
        ends_s = 60 * self.asked.minutes
        self._begun.set()
        self.hub.reset_counts()
        self.sent, self.stored = -sum(bucket.ledger.sent for bucket in self._buckets), -self.hub.stored()
        main_writer.on_version = self._published

        def stop() -> None:
            self.sent += sum(bucket.ledger.sent for bucket in self._buckets)
            self.stored += self.hub.stored()
            self.clock.end()

        self.clock.call(ends_s, stop)
        if self.asked.outage:
            self.hub.outage(60 * self.asked.outage[0], self.asked.outage[1])
        if self.asked.deaths_hour:
            self.clock.spawn(self._deaths, "deaths")

    def _published(self, manifest: Manifest) -> None:
        self.versions.append(manifest)
        if machine := self.asked.one_machine:  # the trainer pokes the replicas
            for replica in self.replicas.values():
                self.clock.spawn(functools.partial(self._poke, replica, self.rng.choice(machine.pokes)))

    def _poke(self, replica: Replica, poke_s: float) -> None:
        self.clock.sleep(poke_s)
        replica.poke()

    def _start(self, number: int) -> None:
        folder = self._folder / f"{number}"
        folder.mkdir(exist_ok=True)
        replica = self.replicas[number] = Replica(self, number, folder)
        self.clock.spawn(replica.start, replica)

    def _deaths(self) -> None:
        while True:
            self.clock.sleep(self.rng.expovariate(self.asked.deaths_hour / 3600))
            number = self.rng.choice(sorted(self.replicas))
            self.clock.kill(self.replicas[number])
            self._start(number)
