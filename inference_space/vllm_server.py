"""Stock vLLM as a child process on loopback: start, watch, drive its weight-update endpoints, stop."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from delta_weight_sync.vllm.lifeline import end_with_parent
from delta_weight_sync.vllm.plugin import BACKEND
from inference_space.settings import Settings

MODEL_NAME = "policy"
_MIDDLEWARE = "delta_weight_sync.vllm.version_headers.VersionHeaders"
_CONTROL_TIMEOUT_S = 300.0
_SHOWN_LINES = 40
_SECRETS = ("TOKEN", "SECRET", "KEY", "PASSWORD", "CREDENTIAL")
# Not `-m`, nor a file: multiprocessing would import the whole server again in each process of the engine.
_SERVE = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
# On the CPU the worker runs inside the engine's process (named by class: the short name is overruled), or two
# processes would spin for each other on the same cores; split prefills would rewind seeded requests.
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_ON_CPU = ["--enforce-eager", "--no-enable-chunked-prefill", "--distributed-executor-backend", _IN_PROCESS]
_ON_CPU += ["--kv-cache-memory-bytes", str(1 << 30)]  # with a size given, vLLM need not measure and warm up
_CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class VllmError(RuntimeError):
    """vLLM did not start, died, or refused a call; the message names its log."""


class VllmServer:
    """One vLLM process. Its development endpoints are reachable from this machine only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.log = Path(settings.folder) / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        # A connection that carried a 500 is reset by vLLM some time later: never reuse one.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(timeout=_CONTROL_TIMEOUT_S, limits=limits, trust_env=False)

    def start(self, checkpoint: Path, *, timeout_s: float = 1800.0) -> None:
        """Serve `checkpoint`; returns when vLLM answers. Raises `VllmError` if it dies first."""
        self.stop()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(checkpoint, port),
                env=_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if not self.alive():
                self._show_end()
                raise VllmError(f"vLLM exited while starting; the reason is at the end of {self.log}")
            if time.monotonic() > deadline:
                raise VllmError(f"vLLM did not answer within {timeout_s:.0f} s; see {self.log}")
            time.sleep(0.25)

    def _show_end(self) -> None:
        """Print the end of vLLM's log: a Space shows its owner what is printed, and no files."""
        end = self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        print("\n".join([f"the end of {self.log}:", *end]), flush=True)

    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End vLLM and every process it started."""
        if self._process is None:
            return
        for sign, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            _signal_group(self._process.pid, sign)
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
            break
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process = None

    def init_engine(self, tensors: dict[str, list[int]]) -> str:
        """Let the engine learn its routes; returns the digest of the weights that vLLM loaded."""
        report = self._report("init")
        self._post(
            "init_weight_transfer_engine", {"init_info": {"tensors": tensors, "report": str(report)}}, report
        )
        return str(_read(report)["digest"])

    def stage(self, paths: list[Path]) -> float:
        """Decode delta files onto the device while vLLM generates; returns the seconds it took."""
        report = self._report("stage")
        info = {"op": "stage", "paths": [str(path) for path in paths], "report": str(report)}
        self._post("start_weight_update", None, report)
        self._post("update_weights", {"update_info": info}, report)
        while not report.exists():
            if not self.alive():
                raise VllmError(f"vLLM died while staging a delta; see {self.log}")
            time.sleep(0.002)
        try:
            return float(_read(report)["stage_s"])
        except VllmError:
            self._post("finish_weight_update", None, report)  # vLLM allows one update session at a time
            raise

    def commit(self, digest: str, version: int) -> tuple[float, float]:
        """Write what is staged between two engine steps; returns (pause, commit) in seconds.

        Requests in flight go on with the new weights, no new one is given a prefix of older weights, and vLLM
        names `version` from the next token on. If it fails, none of this has happened and generation goes on.
        """
        report = self._report("commit")
        pause = report.with_suffix(".pause")
        pause.unlink(missing_ok=True)
        info = {"op": "commit", "digest": digest, "version": version, "report": str(report)}
        self._post("update_weights", {"update_info": info}, report)  # a failure ends vLLM's update session
        self._post("finish_weight_update", None, report)
        return float(_read(pause)["pause_s"]), float(_read(report)["commit_s"])

    def set_version(self, version: int) -> None:
        """Tell vLLM the version of weights that did not have to change."""
        self._post("update_weight_version", {"new_version": str(version)}, self._report("version"))

    def _post(self, path: str, body: dict[str, Any] | None, report: Path) -> None:
        try:
            response = self._http.post(f"{self.url}/{path}", json=body)
        except httpx.HTTPError as error:
            raise VllmError(
                f"vLLM does not answer /{path} ({type(error).__name__}); see {self.log}"
            ) from error
        if response.status_code != httpx.codes.OK:
            reason = _read(report).get("error") if report.exists() else response.text[:200]
            raise VllmError(f"vLLM refused /{path}: {reason}; see {self.log}")

    def _answers(self) -> bool:
        try:
            return self._http.get(f"{self.url}/health", timeout=2.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _report(self, name: str) -> Path:
        report = Path(self._settings.folder) / f"{name}.json"
        report.unlink(missing_ok=True)
        return report

    def _command(self, checkpoint: Path, port: int) -> list[str]:
        settings = self._settings
        options = {
            "--model": str(checkpoint),
            "--served-model-name": MODEL_NAME,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "bfloat16",
            "--max-num-seqs": str(settings.max_num_seqs),
            "--weight-transfer-config": json.dumps({"backend": BACKEND}),
            "--middleware": _MIDDLEWARE,
        }
        command = [sys.executable, "-c", _SERVE]
        command += [part for option in options.items() for part in option]
        command += ["--disable-uvicorn-access-log", *(_ON_CPU if _on_cpu() else [])]
        if settings.max_model_len is not None:
            command += ["--max-model-len", str(settings.max_model_len)]
        return command + shlex.split(settings.vllm_args)


def _read(report: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(report.read_text())
    if "error" in content:
        raise VllmError(str(content["error"]))
    return content


def _environment() -> dict[str, str]:
    """The gateway's environment without its secrets: vLLM needs none, it only reads local files."""
    kept = {
        key: value for key, value in os.environ.items() if not any(word in key.upper() for word in _SECRETS)
    }
    fixed = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": BACKEND,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return kept | (_CPU_ENVIRONMENT if _on_cpu() else {}) | fixed


def _on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(pid: int, sign: signal.Signals) -> None:
    try:
        os.killpg(pid, sign)
    except ProcessLookupError:
        return
