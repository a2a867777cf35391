"""Runs vLLM inside the Space: its API server in this process, its engine in a child process.

The reasons are in docs/decisions.md (0002).
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import shlex
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from fastapi import FastAPI
from starlette.types import ASGIApp

from delta_weight_sync import gpu_build
from delta_weight_sync.checkpoint import small_files
from delta_weight_sync.errors import DeltaWeightSyncError, EngineError
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.signing import PublicKeys
from delta_weight_sync.vllm import MODEL_NAME, PROCESSED
from delta_weight_sync.vllm.disk import private_folder
from delta_weight_sync.vllm.engine import Engine
from delta_weight_sync.vllm.follower import Follower
from inference_space.settings import Settings

# On a CPU, the worker runs in the engine's process, because two processes would busy-wait on the same cores.
# The executor is named by its class, because vLLM overrides the short name.
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_ON_CPU = ["--enforce-eager", "--distributed-executor-backend", _IN_PROCESS]
# Blocks of 32 tokens instead of 128, because only whole blocks are kept for the next turn of a conversation.
_ON_CPU += ["--block-size", "32"]
_ON_CPU += ["--kv-cache-memory-bytes", str(1 << 30)]  # with a fixed size, vLLM need not measure and warm up
# On some GPUs, the kernels that vLLM prefers reorder the experts of a mixture, and deltas would not fit.
_ON_GPU = ["--moe-backend", "triton"]
# A chat template is a program: anyone with write access to the bucket could make it loop forever. So without
# a public key, vLLM gets unsigned.jinja instead, which renders only the test messages of vLLM's start.
_UNSIGNED_TEMPLATE = Path(__file__).with_name("unsigned.jinja")
_ENVIRONMENT = {
    "VLLM_PLUGINS": "delta_weight_sync",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would lose this process's threads
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
log = logging.getLogger("delta_weight_sync")


class VllmServer(Engine):
    """An `Engine` that this process starts. `app` is vLLM's ASGI app for clients; None while vLLM is down."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = None
        self._files: dict[str, str] = {}
        self.app: ASGIApp | None = None
        self.context: int | None = None  # tokens of the model's context; None before the start
        self.follower: Follower | None = None  # knows the served version, for headers of answers
        os.environ.update(_ENVIRONMENT, ENGINE_PYTHON=sys.executable)
        if not gpu_build.is_installed():
            # Otherwise a CPU's first answer waits ten seconds while vLLM compiles its ranking of logprobs.
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        # engine_python.sh starts the engine without the Space's secrets. The script is copied, because an
        # upload to the Hub loses the mode that makes the file executable.
        folder = private_folder(settings.folder, "REPLICA_FOLDER")
        script = Path(shutil.copy(Path(__file__).with_name("engine_python.sh"), folder))
        script.chmod(0o700)
        multiprocessing.set_executable(str(script))

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def alive(self) -> bool:
        return self._client is not None and super().alive()

    def serves(self, checkpoint: Path) -> bool:
        """Whether the engine has the configuration, tokenizer and chat template of `checkpoint`."""
        return self.app is not None and self.alive() and small_files(checkpoint) == self._files

    def start(self, checkpoint: Path) -> None:
        """Start vLLM, or raise `EngineError`. When the calling thread ends, Linux kills the engine."""
        self.stop()
        if gpu_build.is_installed() and (folder := gpu_build.use_compatibility()):
            log.warning("the NVIDIA driver is older than vLLM's CUDA; vLLM uses the libraries in %s", folder)
        if problem := gpu_build.problem():
            raise EngineError(f"vLLM cannot start: {problem}")
        for sentence in gpu_build.missing():
            log.warning("%s", sentence)
        self._files = small_files(checkpoint)
        self._sockets = Scratch()
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._sockets.path)
        try:
            arguments = self._arguments(checkpoint)
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            engine = AsyncEngineArgs.from_cli_args(arguments)
            config = engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
            self._client = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
            self.context = self._client.model_config.max_model_len
        except (Exception, SystemExit) as error:  # SystemExit: `--help` in REPLICA_VLLM_ARGS
            if self._settings.vllm_args and not isinstance(error, DeltaWeightSyncError):
                # vLLM's message may quote a secret from the arguments, and anyone can read a Space's status.
                log.error("vLLM did not start: %s", error)
                problem = "vLLM did not start with these REPLICA_VLLM_ARGS; the replica's log says why"
                raise EngineError(problem) from error
            raise EngineError(f"vLLM did not start: {error}; see the log above for the reason") from error
        self.app = self._wait(_app(self._client, arguments, self.follower))
        gc.unfreeze()  # the objects of the last start
        gc.collect()
        gc.freeze()  # without this, each garbage collection scans all imports, for half a second

    def stop(self) -> None:
        """Stop vLLM, even if it is still starting."""
        client = self._client
        self._client = None
        self.app = None
        if client is not None:
            client.shutdown()
        for child in multiprocessing.active_children():
            child.kill()

    def _arguments(self, checkpoint: Path) -> Namespace:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        settings = self._settings
        words = ["--model", str(checkpoint), "--served-model-name", MODEL_NAME, "--dtype", "bfloat16"]
        words += ["--max-num-seqs", str(settings.max_num_seqs), "--disable-log-stats"]
        words += ["--logprobs-mode", PROCESSED]  # for ratios at any temperature; REPLICA_VLLM_ARGS may differ
        words += [] if PublicKeys.load() else ["--chat-template", str(_UNSIGNED_TEMPLATE)]
        words += _ON_GPU if gpu_build.is_installed() else _ON_CPU
        if settings.max_model_len is not None:
            words += ["--max-model-len", str(settings.max_model_len)]

        def reject(message: str) -> NoReturn:
            raise ValueError(message)

        parser = make_arg_parser(FlexibleArgumentParser())
        parser.error = reject
        arguments: Namespace = parser.parse_args([*words, *shlex.split(settings.vllm_args)])
        validate_parsed_serve_args(arguments)
        return arguments


async def _app(client: Any, arguments: Namespace, follower: Follower | None) -> ASGIApp:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    tasks = await client.get_supported_tasks()
    app: FastAPI = build_app(arguments, tasks, client.model_config)
    app.state.follower = follower
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM sets this when its engine has died
    await init_app_state(client, app.state, arguments, tasks)
    return app
