"""A real replica for tests: the Space as its own process, with its own vLLM, on loopback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from trainer.demo.processes import free_port

PATIENCE_S = 240.0
SMALL_CACHE = f"--kv-cache-memory-bytes {64 << 20}"  # vLLM's default fills a gigabyte at each start


def soon(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Replica:
    """`python -m inference_space.app` with its settings; `kill` is the -9 of a lost machine."""

    def __init__(
        self,
        bucket_url: str,
        run: str,
        folder: Path,
        *,
        name: str = "replica-1",
        max_model_len: int = 512,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = {
            "REPLICA_BUCKET": bucket_url,
            "REPLICA_RUN": run,
            "REPLICA_NAME": name,
            "REPLICA_HOST": "127.0.0.1",
            "REPLICA_PORT": str(self.port),
            "REPLICA_POLL_S": "0.1",
            "REPLICA_MAX_MODEL_LEN": str(max_model_len),
            "REPLICA_FOLDER": str(folder),
            "REPLICA_VLLM_ARGS": SMALL_CACHE,
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "replica.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "inference_space.app"],
                env={**os.environ, **self._settings},
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """-9, and wait until everything that belonged to it is gone."""
        assert self._process is not None
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive, f"left behind: {alive}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE_S)

    def status(self, after: int = -1) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/status", params={"after": after}, timeout=30.0)
        report: dict[str, Any] = answer.raise_for_status().json()
        return report

    def wait_for(self, version: int) -> dict[str, Any]:
        """Block until the replica serves `version`; returns its status."""
        return self.wait_until(lambda status: status["version"] == version, f"version {version}")

    def wait_for_error(self, part: str) -> dict[str, Any]:
        """Block until the replica reports an error that mentions `part`; returns its status."""
        return self.wait_until(lambda status: part in (status["error"] or ""), f"an error about {part}")

    def wait_until(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE_S
        last = "no answer"
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                status = self.status()["status"]
                if wanted(status):
                    return status
                last = str(status)
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"no {what}: {last}; see {self.folder}")


def engine_of(replica: Replica) -> psutil.Process:
    """The process of its vLLM's engine."""
    family = psutil.Process(replica.pid).children(recursive=True)
    return next(
        process for process in family if "EngineCore" in " ".join([process.name(), *process.cmdline()])
    )
