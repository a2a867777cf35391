"""Lives of a real trainer, TRL's: with recorded samples, ended at random instants, or with none to train on.

    python -m tests.support.trainer_lives FOLDER KILLS SEED

Writes the versions of an undisturbed run and of one that was ended KILLS times to `FOLDER/versions.json`,
with how each life ended. All lives are forks of this process, which has imported what takes long.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import torch

from delta_weight_sync import Publisher
from delta_weight_sync.reader import open_run
from delta_weight_sync.store._files import FileBucket
from tests.support import tiny_policy as tiny
from tests.support.recorded import BATCH, Recorded, cpu_config
from trainer import resume, rollouts, train
from trainer.settings import Settings

STATE_EVERY = 3
EVENTS = 100  # of them some ten are of a step
PATIENCE_S = 240.0


def nothing() -> None: ...


def live(folder: Path, bucket: str, steps: int, die=nothing, every: int = 1, **others: Any) -> None:
    """The command of `trainer.train`, with a sync every `every` steps; `die` is called at each event."""
    places = {"model": str(folder / "base"), "bucket": bucket, "run": "lives", "replicas": []}
    states = {"state_every": STATE_EVERY, "state_minutes": 0.0}
    script = Settings(**places, task="brevity", **states, **others)
    rates = {"learning_rate": 1e-3, "lr_scheduler_type": "linear", "weight_decay": 0.1}
    sizes = {"max_steps": steps, "weight_sync_steps": every, "per_device_train_batch_size": BATCH}
    settings = cpu_config(folder / "trl", **rates, **sizes, max_staleness=1000)
    with (
        mock.patch.object(train, "parse", return_value=(script, settings)),
        mock.patch.object(rollouts, "make_worker", lambda *given: Recorded(steps, given[-1])),
        mock.patch.object(Publisher, "publish", one_by_one(Publisher.publish)),
        mock.patch.object(FileBucket, "put", _around(FileBucket.put, die)),
        mock.patch("delta_weight_sync.store._files._write", _in_halves(die)),
        mock.patch.object(torch.optim.AdamW, "step", _around(torch.optim.AdamW.step, die)),
    ):
        train.main()


def one_by_one(publish: Callable[..., None]) -> Callable[..., None]:
    """Each hand-over is a version, so that runs can be compared."""

    def publish_and_wait(publisher: Publisher, *arguments: Any) -> None:
        publish(publisher, *arguments)
        if publisher._outbox:
            publisher._outbox.flush()

    return publish_and_wait


def _around(work: Callable[..., Any], die: Callable[[], None]) -> Callable[..., Any]:
    def with_events(*arguments: Any, **options: Any) -> Any:
        die()
        result = work(*arguments, **options)
        die()
        return result

    return with_events


def _in_halves(die: Callable[[], None]) -> Callable[[BinaryIO, bytes | Path], None]:
    def write(file: BinaryIO, data: bytes | Path) -> None:
        content = data if isinstance(data, bytes) else data.read_bytes()
        half = len(content) // 2
        file.write(content[:half])
        file.flush()
        die()
        file.write(content[half:])
        file.flush()
        os.utime(file.fileno(), ns=(now := time.time_ns(), now))

    return write


def end_at(event: int, sign: int) -> Callable[[], None]:
    """Sends this process a signal at that event."""
    events = itertools.count(1)

    def die() -> None:
        if next(events) == event:
            os.kill(os.getpid(), sign)

    return die


def fork(folder: Path, bucket: str, steps: int, log: Path, die: Callable[[], None]) -> int:
    """A life; its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        torch.set_num_threads(1)  # a fork makes a new pool, which two threads must not do together
        live(folder, bucket, steps, die)
        code = 0
    except SystemExit as end:
        print(end.code, flush=True)
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - it must not come back as a second zygote
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """How it ended: the exit code, or minus the signal. Raises `TimeoutError`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise TimeoutError("a life did not end")


def versions(bucket: str) -> list[tuple[int, int, str]]:
    """Number, sync and digest of all, oldest first."""
    return [(m.version, m.sync, m.digest) for m in open_run(bucket).versions()][::-1]


def ended_lives(folder: Path, bucket: str, steps: int, kills: int) -> list[str]:
    """Lives that -9 and SIGTERM end by turns, at an event, and some after a while; how each of them ended."""
    ends: list[str] = []
    for number in range(kills):
        sign = (signal.SIGKILL, signal.SIGTERM)[number % 2]
        event = random.randrange(1, EVENTS)
        after_s = random.uniform(0, 8)
        timed = number % 10 >= 6
        pid = fork(folder, bucket, steps, folder / f"{number}.log", end_at(0 if timed else event, sign))
        if timed:
            time.sleep(after_s)
            os.kill(pid, sign)
        at = f"{after_s:.2f} s" if timed else f"event {event}"
        ends.append(f"{sign.name} at {at}: {wait(pid)}")
    return ends


def wait_in_vain(folder: Path, lives: int) -> None:
    """Trainers whose replica never answers, one after the other: they wait for samples until they are ended.

    Each says "waiting" once its first state is saved. This process says each one's number, and how it ended.
    """
    places = {"model": str(folder / "base"), "bucket": (folder / "bucket").as_uri()}
    script = Settings(**places, run="run", replicas=["http://127.0.0.1:1"], task="brevity")
    config = cpu_config(folder / "trl", max_steps=5)
    begin = resume.SaveState.on_train_begin

    def begin_and_say(states: resume.SaveState, *trained: Any, **others: Any) -> None:
        begin(states, *trained, **others)
        print("waiting", flush=True)

    for _ in range(lives):
        if (life := os.fork()) == 0:
            tiny.build(folder / "base", tie=True, seed=0)
            with (
                mock.patch.object(train, "parse", return_value=(script, config)),
                mock.patch.object(train.Spaces, "wait"),
                mock.patch.object(resume.SaveState, "on_train_begin", begin_and_say),
            ):
                try:
                    train.main()
                except SystemExit as end:
                    sys.stdout.flush()
                    os._exit(int(end.code or 0))  # to take a fork's memory apart copies it first
        print("trainer", life, flush=True)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]), flush=True)
    os._exit(0)


def main(folder: Path, kills: int, seed: int) -> None:
    """Both runs."""
    random.seed(seed)
    torch.set_num_threads(1)
    tiny.build(folder / "base", tie=True, seed=0)
    steps = 6 + 8 * kills  # more than all lives take
    undisturbed, ended = ((folder / name).as_uri() for name in ("undisturbed", "ended"))
    wait(fork(folder, undisturbed, steps, folder / "undisturbed.log", nothing))
    ends = ended_lives(folder, ended, steps, kills)
    wait(fork(folder, ended, steps, folder / "last.log", nothing))
    result = {"steps": steps, "ends": ends, "undisturbed": versions(undisturbed), "ended": versions(ended)}
    (folder / "versions.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
