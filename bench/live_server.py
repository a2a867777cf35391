"""A real vLLM on this machine, served as the replica serves it, with requests in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.memory import Memory
from inference_space.settings import Settings
from inference_space.vllm_server import MODEL_NAME, VllmServer

_EXTENSION = "bench.live_worker.VllmLoaders"  # by name: the benchmark itself needs no vLLM in its process
_PROMPT_TOKENS, _ANSWER_TOKENS = 32, 192


class LiveServer:
    """The project's vLLM child with vLLM's own loaders reachable beside our engine."""

    def __init__(self, folder: Path) -> None:
        arguments = f"--worker-extension-cls {_EXTENSION}"
        settings = Settings(bucket="", run="", folder=str(folder), max_model_len=512, vllm_args=arguments)
        self.vllm = VllmServer(settings)
        self._http = httpx.Client(timeout=300.0, trust_env=False)

    def call(self, method: str, *args: Any) -> float:
        """The seconds that a method of the worker returns; it runs between two engine steps."""
        body = {"method": method, "args": list(args)}
        answer = self._http.post(f"{self.vllm.url}/collective_rpc", json=body).raise_for_status()
        return float(answer.json()["results"][0])

    def generated(self) -> float:
        """Tokens generated since the start, by vLLM's own count."""
        metrics = self._http.get(f"{self.vllm.url}/metrics").raise_for_status().text
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
                body = {"model": MODEL_NAME, "prompt": prompt, **length}
                http.post(f"{self.vllm.url}/v1/completions", json=body).raise_for_status()


def throughput(server: LiveServer, seconds: float) -> float:
    """Tokens per second over a window."""
    before, started = server.generated(), time.perf_counter()
    time.sleep(seconds)
    return (server.generated() - before) / (time.perf_counter() - started)
