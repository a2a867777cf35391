"""However the trainer ends, what it started ends as well."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from delta_weight_sync import open_run
from trainer.ending import BOUND_S

PATIENCE_S = 300.0


@contextmanager
def trainers(folder: Path, lives: int) -> Iterator[IO[str]]:
    """Trainers that wait for samples, one after the other; yields what they and their parent say."""
    command = [sys.executable, "-m", "tests.trainer.waiting", str(folder), str(lives)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "errors").open("w") as errors:
        parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert parent.stdout is not None
    try:
        yield parent.stdout
    finally:
        for process in (*psutil.Process(parent.pid).children(recursive=True), parent):
            process.kill()
        parent.communicate(timeout=PATIENCE_S)


def until(start: str, said: IO[str], errors: Path) -> list[str]:
    """What is said until a line that starts so, with that."""
    lines = []
    for line in said:
        lines.append(line)
        if line.startswith(start):
            return lines
    raise AssertionError(errors.read_text()[-3000:])


def begun(said: IO[str], errors: Path) -> tuple[psutil.Process, list[psutil.Process]]:
    """The next trainer, which waits, and all processes that it has started."""
    number = until("trainer ", said, errors)[-1].split()[1]
    until("waiting", said, errors)
    trainer = psutil.Process(int(number))
    children = trainer.children(recursive=True)
    assert any("spawn_main" in " ".join(child.cmdline()) for child in children)
    return trainer, children


@pytest.mark.live
def test_a_request_and_a_sudden_death_end_the_process_that_plays(tmp_path):
    errors = tmp_path / "errors"
    with trainers(tmp_path, 2) as said:
        trainer, children = begun(said, errors)
        trainer.send_signal(signal.SIGTERM)
        assert psutil.wait_procs([trainer], timeout=2 * BOUND_S)[1] == []
        end = "version 0 is published and the state is kept; the same command goes on from there"
        last = [f"trainer: SIGTERM: {end}\n", f"ended {128 + signal.SIGTERM}\n"]
        assert until("ended ", said, errors)[-2:] == last, errors.read_text()[-3000:]
        assert psutil.wait_procs(children, timeout=10)[1] == []
        trainer, children = begun(said, errors)
        trainer.kill()
        assert psutil.wait_procs(children, timeout=10)[1] == []
    assert open_run((tmp_path / "bucket").as_uri()).at().version == 0, "what was there is not published twice"
