"""What a replica makes of an architecture: followed by the real worker, against a fresh load of the result.

A model is loaded as vLLM's worker does, without an engine around it, so that architectures which vLLM's CPU
kernels cannot run are examined as well.
"""

from __future__ import annotations

import gc
import logging
import operator
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

os.environ.update(VLLM_PLUGINS="", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import torch
import transformers
from transformers.utils import is_torchvision_available
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import registry
from vllm.v1.worker import cpu_model_runner

from bench import reloaded
from bench.published import EXACT, WAYS, Run
from bench.reloaded import Difference, Found
from delta_weight_sync.engine import Dtypes, Shapes
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.vllm import cpu, routes, worker
from delta_weight_sync.vllm.disk import Layout
from tests.support.tiny import ARCHITECTURES, write_base
from trainer.demo.processes import free_port


class Report(NamedTuple):
    """What was found out about an architecture.

    Attributes:
        kind: vLLM's name of the architecture.
        verdicts: For each of `WAYS`, what a replica makes of it.
        note: What is to be said of its tensors.
        patched: How a replica's model differs from a fresh load; None if it refuses the run.
        stock: For each of `reloaded.LOADS`, what it makes of the model in vLLM's CPU build as it is.
        unpacked: The same with weights as they are loaded.
    """

    kind: str
    verdicts: list[str]
    note: str
    patched: Found | None
    stock: list[Found]
    unpacked: list[Found]


class RefusedError(RuntimeError):
    """The worker's answer was an error."""


def examine(name: str, folder: Path) -> Report:
    """Find out everything about an architecture; `folder` is an empty one to work in."""
    logging.getLogger("delta_weight_sync").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    gc.freeze()  # vLLM collects garbage at each load, which would go through all that was imported
    base = folder / "base"
    write_base(ARCHITECTURES[name], folder)
    published = [_published(number, base, folder) for number in range(len(WAYS))]
    newest = next((run.newest for run in published if isinstance(run, Run)), None)
    install_stock()
    stock = _reloaded(base, newest) if newest else []
    install()
    unpacked = _reloaded(base, newest) if newest else []
    kind = Loaded(base).config.model_config.hf_config.architectures[0]
    followed = [run if isinstance(run, str) else Followed(base, run) for run in published]
    models = [each for each in followed if isinstance(each, Followed)]
    return Report(
        kind,
        [each if isinstance(each, str) else each.verdict for each in followed],
        models[0].note if models else "",
        models[0].difference if models else None,
        stock,
        unpacked,
    )


def _published(number: int, base: Path, folder: Path) -> Run | str:
    try:
        return Run(WAYS[number], base, folder / f"{number}")
    except DeltaWeightSyncError as refusal:
        return f"refused: {refusal}"
    except Exception as error:  # noqa: BLE001 - one way that fails must not hide the others
        return f"WRONG: `publish` raises {type(error).__name__}: {error}"


def _reloaded(base: Path, newest: Path) -> list[Found]:
    """Load the newest version, the base, and the newest version into a live model."""
    folders = newest, base, newest
    return [reloaded.result(load, Loaded(base), folders, Loaded(newest)) for load in reloaded.LOADS]


def install_stock() -> None:
    """What vLLM's worker does before a model is loaded."""
    cpu_model_runner._set_torch_accelerator_to_noop()
    registry._run_in_subprocess = operator.call  # else vLLM imports itself in a process for each class
    torch.set_num_threads(1)
    _stand_in_for_torchvision()


def install() -> None:
    """What the plugin and vLLM's worker do before a model is loaded."""
    install_stock()
    cpu.install()
    routes.install()


def _stand_in_for_torchvision() -> None:
    """vLLM's vision models import it, and its CPU build comes without; no picture is looked at here."""
    is_torchvision_available()  # its answer is kept: no
    parts = (
        "",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
        ".io",
    )
    sys.modules |= {f"torchvision{part}": MagicMock() for part in parts}


class Loaded:
    """A model that vLLM has loaded."""

    def __init__(self, folder: Path) -> None:
        self.config = EngineArgs(
            model=str(folder),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            skip_tokenizer_init=True,
            language_model_only=True,
        ).create_engine_config()
        rotary_embedding._ROPE_DICT.clear()  # else models of this process share these modules
        with set_current_vllm_config(self.config):
            if not parallel_state.model_parallel_is_initialized():
                address = f"tcp://127.0.0.1:{free_port()}"
                parallel_state.init_distributed_environment(1, 0, address, 0, backend="gloo")
                parallel_state.initialize_model_parallel()
            self.model = get_model(vllm_config=self.config)


class Followed:
    """A model that vLLM loaded from the base, and that followed a run to its second version.

    Attributes:
        verdict: "exact", or what is wrong, or why the worker refuses the run.
        note: What is to be said of its tensors; "" if the worker refuses the run.
        difference: How it differs from a fresh load; None if the worker refuses the run.
    """

    def __init__(self, base: Path, run: Run) -> None:
        self._live = Loaded(base)
        self._worker = SimpleNamespace(vllm_config=self._live.config, get_model=lambda: self._live.model)
        self.difference: Difference | None = None
        self.note = ""
        try:
            self._follow(run)
        except RefusedError as refusal:
            self.verdict = f"refused: {refusal}"
            return
        self.difference = found = reloaded.compare(self._live.model, Loaded(run.newest).model)
        if found.tensors:
            self.verdict = f"WRONG: {found.first} is not as a fresh load leaves it"
        elif run.wrong:
            self.verdict = f"WRONG: transformers does not load {run.wrong} as the trainer has it"
        else:
            self.verdict = EXACT

    def _follow(self, run: Run) -> None:
        """Join the first version, and take the delta to the second."""
        first, second = (run.reader.manifest(version) for version in (0, 1))
        folder = run.newest.parents[1] / "replica"
        whole, shapes, dtypes = Layout(run.reader, folder).put(first)
        if self._call("learn", shapes=shapes, dtypes=dtypes)["digest"] != first.digest:
            self._take(first.digest, checkpoint=str(whole))
        self.note = self._note(shapes, dtypes)
        deltas = run.reader.fetch_all(run.reader.recipe(second, 0).deltas, folder / "deltas")
        self._take(second.digest, deltas=[str(path) for path in deltas])

    def _take(self, digest: str, **what: Any) -> None:
        self._call("stage", **what)
        while not self._call("staged")["done"]:
            time.sleep(0.002)
        self._call("commit", digest=digest, label="1")

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        answer = worker.call(self._worker, op, **arguments)
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer

    def _note(self, shapes: Shapes, dtypes: Dtypes) -> str:
        learned = routes.learn(self._live.model, shapes, dtypes)
        _, reasons = routes.ownership(shapes, [learned.sources])
        left_out = {name for name, reason in reasons.items() if reason == "vLLM's loader drops it"}
        is_foreign = "transformers" in type(self._live.model).__module__.split(".")
        notes = {
            "slowly: ": _starred(reasons.keys() - left_out),
            "float32: ": _starred(name for name, dtype in dtypes.items() if dtype == "F32"),
            "vLLM leaves out ": f"{len(left_out)} tensors" if left_out else "",
            "vLLM's Transformers ": "backend" if is_foreign else "",
        }
        return "; ".join(head + note for head, note in notes.items() if note)


def _starred(names: Iterable[str]) -> str:
    """Names with a star for numbers, each once."""
    return ", ".join(sorted({f"`{re.sub(r'[0-9]+', '*', name)}`" for name in names}))
