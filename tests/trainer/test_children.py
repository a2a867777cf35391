"""However the trainer ends, what it started ends as well."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from delta_weight_sync import open_run
from trainer.ending import BOUND_S

PATIENCE_S = 300.0


@contextmanager
def waiting(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A trainer that waits for samples, and all processes that it has started."""
    command = [sys.executable, "-m", "tests.trainer.waiting", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "errors").open("w") as errors:
        trainer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    children: list[psutil.Process] = []
    try:
        assert trainer.stdout is not None
        while (line := trainer.stdout.readline()) != "waiting\n":
            assert line, (folder / "errors").read_text()[-3000:]
        children = psutil.Process(trainer.pid).children(recursive=True)
        yield trainer, children
    finally:
        for process in children:
            if process.is_running():
                process.kill()
        trainer.kill()
        trainer.communicate(timeout=PATIENCE_S)


@pytest.mark.live
def test_a_request_and_a_sudden_death_end_the_process_that_plays(tmp_path):
    with waiting(tmp_path) as (trainer, children):
        assert any("spawn_main" in " ".join(child.cmdline()) for child in children)
        trainer.send_signal(signal.SIGTERM)
        out, _ = trainer.communicate(timeout=2 * BOUND_S)
        assert trainer.returncode == 128 + signal.SIGTERM, (tmp_path / "errors").read_text()[-3000:]
        end = "version 0 is published and the state is kept; the same command goes on from there"
        assert out.splitlines()[-1] == f"trainer: SIGTERM: {end}"
        assert psutil.wait_procs(children, timeout=10)[1] == []
    with waiting(tmp_path) as (trainer, children):
        trainer.kill()
        assert psutil.wait_procs(children, timeout=10)[1] == []
    assert open_run((tmp_path / "bucket").as_uri()).at().version == 0, "what was there is not published twice"
