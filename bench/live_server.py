"""A real vLLM on this machine with our plugin, with requests in flight; the benchmark is its follower.

On a GPU it is vLLM as it comes, with CUDA graphs.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.memory import Memory
from delta_weight_sync import gpu_build
from delta_weight_sync.ending import die_with_parent
from delta_weight_sync.vllm import METHOD
from trainer.demo.processes import free_port

# What `vllm serve` calls. Not `-m`, nor a file: the engine's process would import it again.
_SERVE = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
_OPTIONS = {
    "served-model-name": "policy",
    "dtype": "bfloat16",
    "host": "127.0.0.1",
    "max-model-len": 512,
    "kv-cache-memory-bytes": 1 << 30,
    "worker-extension-cls": "bench.live_worker.VllmLoaders",  # by name: no vLLM in this process
}
_ON_CPU = ["--enforce-eager"]
_ON_CPU += ["--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor"]
_ENVIRONMENT = {
    "VLLM_PLUGINS": "delta_weight_sync",
    "VLLM_SERVER_DEV_MODE": "1",  # for calls of the worker from here
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
_PROMPT_TOKENS = 32
_ANSWER_TOKENS = 192


class LiveServer:
    """vLLM as its users start it, with its own loaders reachable beside our worker."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "vllm.log"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._http = httpx.Client(timeout=300.0, trust_env=False)

    def start(self, checkpoint: Path) -> None:
        """Serve `checkpoint`; returns when vLLM answers."""
        options = {**_OPTIONS, "model": checkpoint, "port": self._port}
        words = [f"--{name}={value}" for name, value in options.items()]
        words += [] if gpu_build.is_installed() else _ON_CPU
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, *words],
                env={**os.environ, **_ENVIRONMENT},
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM did not start; the reason is at the end of {self._log}")
            time.sleep(0.5)

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return self._http.get(f"{self.url}/health").is_success
        except httpx.TransportError:
            return False

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the worker returns; it runs between two engine steps."""
        body = {"method": method, "args": list(args), "kwargs": kwargs}
        answer = self._http.post(f"{self.url}/collective_rpc", json=body).raise_for_status()
        return answer.json()["results"][0]

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One call of our worker."""
        answer: dict[str, Any] = self.call(METHOD, op=op, **arguments)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def take(self, delta: Path, digest: str, label: str) -> tuple[float, float, float]:
        """Seconds of staging, of the pause, and of the commit in it; one call, as a replica makes it."""
        then = {"op": "commit", "digest": digest, "label": label}
        answer = self.ask("stage", deltas=[str(delta)], then=then)
        return float(answer["stage_s"]), float(answer["pause_s"]), float(answer["commit_s"])

    def commit(self, digest: str, label: str) -> tuple[float, float]:
        """Seconds of the pause, and of the commit in it."""
        answer = self.ask("commit", digest=digest, label=label)
        return float(answer["pause_s"]), float(answer["commit_s"])

    def complete(self, prompt: list[int], tokens: int) -> tuple[list[float], Any]:
        """Logprobs of so many greedy tokens, and which versions made which (see `_version_headers`)."""
        body = {"model": "policy", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0, "logprobs": 1}
        answer = self._http.post(f"{self.url}/v1/completions", json=body).raise_for_status()
        logprobs: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        return logprobs, json.loads(answer.headers.get("x-policy-versions", "[]"))

    def generated(self) -> float:
        """Tokens generated since the start, by vLLM's own count."""
        metrics = self._http.get(f"{self.url}/metrics").raise_for_status().text
        counts = [line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in counts)

    def memory(self) -> Memory:
        """Of the engine's process: the largest below this one that belongs to the server."""
        family = psutil.Process().children(recursive=True)
        largest = max(family, key=lambda process: process.memory_info().rss)
        return Memory(largest.pid)

    @contextmanager
    def requests_in_flight(self, count: int) -> Iterator[None]:
        """Keep `count` requests running during the block; each is followed by another."""
        stop = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(number, stop)) for number in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _ask(self, number: int, stop: threading.Event) -> None:
        turn = 0
        with httpx.Client(timeout=300.0, trust_env=False) as http:
            while not stop.is_set():
                turn += 1
                prompt = [(97 * number + 31 * turn + 7 * i) % 40000 + 10 for i in range(_PROMPT_TOKENS)]
                length = {"max_tokens": _ANSWER_TOKENS, "ignore_eos": True}
                body = {"model": "policy", "prompt": prompt, **length}
                http.post(f"{self.url}/v1/completions", json=body).raise_for_status()


def throughput(server: LiveServer, seconds: float) -> float:
    """Tokens per second over a window."""
    before = server.generated()
    started = time.perf_counter()
    time.sleep(seconds)
    return (server.generated() - before) / (time.perf_counter() - started)
