"""Exports a run's log to Weights & Biases, trackio or TensorBoard, from outside of the trainer.

A value has a name and a place: a step of training, or a version. Each is exported once, also if the exporter
is started again or fails in between, because a target knows which places it has. Steps that a trainer repeats
after it went back keep their first values.
"""

import fcntl
import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import TypeAdapter

from delta_weight_sync.errors import (
    DeltaWeightSyncError,
    ExportError,
    FolderError,
    MissingExtraError,
    printable,
)
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import RunInfo, parse
from delta_weight_sync.runlog import (
    CommitEvent,
    DoneEvent,
    Event,
    RunLogReader,
    ScoreEvent,
    StepEvent,
    SyncEvent,
)
from delta_weight_sync.util import make_folder

_LISTED: Final = 6  # polls of the log for one listing, which finds what other programs than the trainer wrote
_LONGEST_S: Final = 300.0  # max seconds between two tries
_FLUSH: Final = 512  # events after which a target stores what it has
_SCORE: Final = "score/"
_ONCE: Final = "steps that come again keep the values that were exported first"


@dataclass(frozen=True)
class Row:
    """Values of one event.

    Attributes:
        axis: What `x` counts.
        x: The step or the version.
        t: Unix seconds of the event.
        values: Name -> number.
    """

    axis: Literal["step", "version"]
    x: int
    t: float
    values: dict[str, float]


def row_of(event: Event) -> Row | None:
    """The values of an event. Metrics keep their names; others begin with `version/`, `score/` or `replica/`.

    None for an event without values.
    """
    match event:
        case StepEvent():
            reward = {} if event.reward is None else {"reward": event.reward}
            return Row("step", event.step, event.t, event.metrics | reward)
        case SyncEvent():
            values: dict[str, float] = {"sync": event.sync, "payload_bytes": event.payload_bytes}
            values["publish_s"] = event.publish_s
            if not event.whole:
                values["changed"] = event.changed / max(1, event.total)
            return Row("version", event.version, event.t, _under("version", values))
        case ScoreEvent():
            return Row("version", event.version, event.t, _under(_SCORE + event.name, event.scores))
        case CommitEvent():
            values = {"version": event.version}
            if not event.joined:  # the times of a join include the start of vLLM
                values |= {"lag_s": event.lag_s, "pause_ms": event.pause_ms}
            return Row("version", event.version, event.t, _under(f"replica/{event.replica}", values))
    return None


def _under(place: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{place}/{name}": value for name, value in values.items()}


class Exported:
    """Which values a target has.

    Steps and versions come in order, so the last place of a name is enough. Scores come in any order.
    """

    def __init__(self) -> None:
        self._places: dict[str, list[int]] = {}  # by name; of a score all, in order, otherwise the last one

    def has(self, name: str, place: int) -> bool:
        """Whether the target has the value."""
        places = self._places.get(name, [-1])
        return place in places if name.startswith(_SCORE) else place <= places[-1]

    def add(self, name: str, places: Iterable[int]) -> None:
        """Note values that the target has."""
        known = sorted({*places, *self._places.get(name, ())})
        self._places[name] = known if name.startswith(_SCORE) else known[-1:]

    def dumps(self) -> str:
        """All of it as JSON."""
        return json.dumps(self._places)

    def loads(self, text: str) -> None:
        """Add what `dumps` has returned. Raises `ValueError` for another text."""
        for name, places in TypeAdapter(dict[str, list[int]]).validate_json(text).items():
            self.add(name, places)


class Target(ABC):
    """Where values go."""

    name: ClassVar[str] = ""

    def __init__(self) -> None:
        self._exported = Exported()
        self._stored = True  # whether all that was written is stored

    def write(self, row: Row) -> None:
        """Export the values of a row that were not exported yet."""
        new = {name: value for name, value in row.values.items() if not self._exported.has(name, row.x)}
        if new:
            self._write(Row(row.axis, row.x, row.t, new))
            for name in new:
                self._exported.add(name, [row.x])
            self._stored = False

    def flush(self) -> None:
        """Store what was written."""
        if not self._stored:
            self._store()
            self._stored = True

    @abstractmethod
    def _write(self, row: Row) -> None:
        """Export a row of new values."""

    def _store(self) -> None:  # noqa: B027 - printed lines need none
        """Store what was written."""

    def close(self) -> None:  # noqa: B027
        """End. What was not stored may be lost."""


class Lines(Target):
    """Prints each row as a line."""

    def _write(self, row: Row) -> None:
        values = "  ".join(f"{name} {value:.6g}" for name, value in row.values.items())
        print(printable(f"{row.axis} {row.x}: {values}"), flush=True)


class _Kept(Target):
    """A target with a folder, in which only one exporter of one run works at a time."""

    def __init__(self, folder: Path, run: str, info: RunInfo, project: str) -> None:
        super().__init__()
        self.id = hashlib.sha256(info.to_bytes()).hexdigest()[:16]  # not that of an older run of this name
        make_folder(folder)
        self._lock = (folder / f".exported-{self.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlocked when this process ends
            self._record = folder / f".exported-{self.name}"
            self._recall(folder)
            self._open(folder, run, info, project)
        except BaseException as error:
            self._lock.close()
            if isinstance(error, BlockingIOError):
                busy = f"another process exports into {folder}: stop it, or name another folder with --into"
                raise FolderError(busy) from None
            raise

    def _recall(self, folder: Path) -> None:
        with suppress(FileNotFoundError):
            owner, _, exported = self._record.read_text().partition("\n")
            if owner != self.id:
                raise FolderError(f"{folder} has the export of another run: name a new folder with --into")
            self._exported.loads(exported)

    @abstractmethod
    def _open(self, folder: Path, run: str, info: RunInfo, project: str) -> None:
        """Open the target, and note in `_exported` what it has."""

    @abstractmethod
    def _end(self) -> None:
        """Close the target."""

    def _store(self) -> None:
        temporary = self._record.with_suffix(".new")
        temporary.write_text(f"{self.id}\n{self._exported.dumps()}")
        temporary.replace(self._record)

    def close(self) -> None:
        """End, and unlock the folder. What was not stored may be lost."""
        try:
            self._end()
        finally:
            self._lock.close()


class TensorBoard(_Kept):
    """Writes event files. They say themselves what was exported, also if this process was killed."""

    name = "tensorboard"

    def _open(self, folder: Path, run: str, info: RunInfo, project: str) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        for tag in found.Tags()["scalars"]:
            self._exported.add(tag, [event.step for event in found.Scalars(tag)])
        super()._store()  # from now on, the folder is this run's
        self._writer = EventFileWriter(str(folder))

    def _write(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        self._writer.add_event(Event(wall_time=row.t, step=row.x, summary=Summary(value=values)))

    def _store(self) -> None:
        self._writer.flush()

    def _end(self) -> None:
        self._writer.close()


class Wandb(_Kept):
    """Logs to Weights & Biases: one run there for each run here, which each start resumes."""

    name = "wandb"
    _EXPORTED: Final = "delta_weight_sync/exported"  # in the summary: for a start on another machine

    def _open(self, folder: Path, run: str, info: RunInfo, project: str) -> None:
        import wandb

        quiet = wandb.Settings(console="off", x_disable_stats=True, disable_git=True)  # about this machine
        config = {"run": info.run, "model": info.model, "full_bytes": info.full_bytes}
        self._run = wandb.init(
            project=project, id=self.id, name=run, resume="allow", dir=folder, config=config, settings=quiet
        )
        self._exported.loads(self._run.summary.get(self._EXPORTED) or "{}")
        self._axes: set[str] = set()  # values that have got their axis
        for axis in ("step", "version"):
            self._run.define_metric(axis, hidden=True)

    def _write(self, row: Row) -> None:
        for name in row.values.keys() - self._axes:
            if "*" not in name:  # which would be a pattern
                self._run.define_metric(name, step_metric=row.axis)
            self._axes.add(name)
        self._run.log(row.values | {row.axis: row.x})

    def _store(self) -> None:
        self._run.summary[self._EXPORTED] = self._exported.dumps()
        super()._store()

    def _end(self) -> None:
        self._run.finish()


class Trackio(_Kept):
    """Logs to trackio, whose only axis is the step: for a version's values, the version's number."""

    name = "trackio"

    def _open(self, folder: Path, run: str, info: RunInfo, project: str) -> None:
        import trackio

        self._finish = trackio.finish
        self._run = trackio.init(
            project,
            name=f"{run}-{self.id[:8]}",
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            config={"run": info.run, "model": info.model, "full_bytes": info.full_bytes},
        )

    def _write(self, row: Row) -> None:
        self._run.log(row.values, step=row.x)

    def _end(self) -> None:
        self._finish()


TARGETS: Final[dict[str, type[_Kept]]] = {kind.name: kind for kind in (Wandb, Trackio, TensorBoard)}


def open_target(name: str, reader: RunReader, folder: Path, project: str) -> Target:
    """Open one of `TARGETS` for a run.

    Raises:
        MissingExtraError: The target's package is not installed.
        FolderError: Another process uses the folder, or it has the export of another run.
        BucketError, ProtocolError: The run's description cannot be read.
        Exception: Whatever the target's package raises.
    """
    key = reader.keys.info
    info = parse(RunInfo, reader.bucket.get(key), key)
    try:
        return TARGETS[name](folder, reader.keys.run, info, project)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"--to {name}", name, error) from error


def export(
    reader: RunReader,
    opened: Callable[[], Target],
    *,
    once: bool,
    stopped: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Export the log of a run, and follow it until `stopped` is set.

    If the bucket or the target fails, say so and try again with growing pauses; with `once`, raise.

    Args:
        reader: The run.
        opened: Opens the target. Called again after the target has failed.
        once: End when all events of now are exported.
        stopped: Ends the export when it is set.
        say: Takes a sentence about the run, or about a failure. It gets the same failure once in a row.

    Raises:
        MissingExtraError, FolderError: From `opened`.
        BrokenPipeError: The reader of the lines is gone.
        DeltaWeightSyncError: With `once`, any failure.
    """
    usual_s = reader.bucket.report_every_s
    pause_s = usual_s
    said = ""
    target: Target | None = None
    try:
        while not stopped.is_set():
            problem: DeltaWeightSyncError | None = None
            try:
                if target is None:
                    log = RunLogReader(reader.bucket, reader.keys.run, list_every_s=_LISTED * usual_s)
                    target = opened()
                _export_new(log, target, stopped, say)
            except (MissingExtraError, FolderError, BrokenPipeError):
                raise
            except DeltaWeightSyncError as error:  # of the bucket
                problem = error
            except Exception as error:  # noqa: BLE001 - the target's package may raise anything
                problem = ExportError(f"the export failed ({str(error) or type(error).__name__})")
                if target is not None:
                    with suppress(Exception):
                        target.close()
                target = None  # opened again, it knows which values it has
            if once:
                if problem:
                    raise problem
                return
            if problem and str(problem) != said:
                say(f"{problem}; it is tried again")
            said = str(problem or "")
            pause_s = min(2 * pause_s, _LONGEST_S) if problem else usual_s
            stopped.wait(pause_s)
    finally:
        if target is not None:
            target.flush()
            target.close()


def _export_new(
    log: RunLogReader, target: Target, stopped: threading.Event, say: Callable[[str], None]
) -> None:
    step = 0
    for count, event in enumerate(log.poll(), 1):
        if isinstance(event, StepEvent):
            if event.step < step:
                say(f"training went back from step {step} to {event.step}: {_ONCE}")
            step = event.step
        elif isinstance(event, DoneEvent):
            say(f"training ended at version {event.version}")
        if row := row_of(event):
            target.write(row)
        if count % _FLUSH == 0:
            target.flush()
        if stopped.is_set():
            break
    target.flush()
