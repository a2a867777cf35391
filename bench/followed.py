"""Whether a replica can follow a tiny model: patched by the real worker, against a fresh load of the result.

A model is loaded as vLLM's worker does, without an engine around it, so that architectures which vLLM's CPU
kernels cannot run are examined as well.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ.update(VLLM_PLUGINS="", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import torch
from transformers.utils import is_torchvision_available
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker import cpu_model_runner

from bench.tiny import ARCHITECTURES, write
from delta_weight_sync import codec
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.vllm import cpu, routes, worker
from trainer.demo.processes import free_port

_State = dict[str, codec.Bits]


class RefusedError(RuntimeError):
    """The worker's answer was an error."""


def verdict(name: str, folder: Path) -> tuple[str, str]:
    """vLLM's name of an architecture, and what a replica makes of it; `folder` is an empty one to work in."""
    install()
    write(ARCHITECTURES[name].config(), folder)
    live = Loaded(folder / "base")
    kind = live.config.model_config.hf_config.architectures[0]
    base, new = (dict(read_bits(folder / state)) for state in ("base", "patched"))
    try:
        if live.learn(base) != to_hex(state_digest(base)):
            return kind, "WRONG: what its routes read is not what was loaded"
        live.patch(base, new, folder / "delta.safetensors")
    except RefusedError as refusal:
        return kind, f"refused: {refusal}"
    if different := live.differs(Loaded(folder / "patched")):
        return kind, f"WRONG: {different} is not as a fresh load leaves it"
    return kind, "exact" + live.besides(base)


def install() -> None:
    """What the plugin and vLLM's worker do before a model is loaded."""
    cpu_model_runner._set_torch_accelerator_to_noop()
    cpu.install()
    routes.install()
    torch.set_num_threads(1)
    _stand_in_for_torchvision()


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
    """A model that vLLM has loaded, with a worker around it."""

    def __init__(self, folder: Path) -> None:
        self.config = EngineArgs(
            model=str(folder),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            skip_tokenizer_init=True,
            language_model_only=True,
        ).create_engine_config()
        with set_current_vllm_config(self.config):
            if not parallel_state.model_parallel_is_initialized():
                address = f"tcp://127.0.0.1:{free_port()}"
                parallel_state.init_distributed_environment(1, 0, address, 0, backend="gloo")
                parallel_state.initialize_model_parallel()
            self.model = get_model(vllm_config=self.config)
        self._worker = SimpleNamespace(vllm_config=self.config, get_model=lambda: self.model)

    def learn(self, base: _State) -> str:
        """Learn the routes of the tensors that were loaded; returns the digest of what they read."""
        answer = self._call("learn", shapes={name: list(bits.shape) for name, bits in base.items()})
        return str(answer["digest"])

    def patch(self, base: _State, new: _State, delta: Path) -> None:
        """Go from `base` to `new` by a delta file, as a replica does."""
        patches = [codec.diff(name, base[name], new[name]) for name in base]
        delta.write_bytes(codec.encode(patches, base.__getitem__, base=0, version=1))
        self._call("stage", deltas=[str(delta)])
        while not self._call("staged")["done"]:
            time.sleep(0.01)
        self._call("commit", digest=to_hex(state_digest(new)), label="1")

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        answer = worker.call(self._worker, op, **arguments)
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer

    def differs(self, other: Loaded) -> str:
        """Something floating that is not the same, bit for bit, in parameters, buffers and elsewhere.

        What only one of them has is left over from its construction: learning would have refused it.
        """
        mine, others = (dict(routes.floating(loaded.model)) for loaded in (self, other))
        both = [name for name in mine if name in others]
        return next((name for name in both if not _same(mine[name], others[name])), "")

    def besides(self, base: _State) -> str:
        """What is to be said of tensors that have no route; names have a star for numbers."""
        shapes = {name: bits.shape for name, bits in base.items()}
        learned = routes.learn(self.model, shapes)
        _, reasons = routes.ownership(shapes, [learned.sources])
        left_out = {name for name, reason in reasons.items() if reason == "vLLM's loader drops it"}
        slow = sorted({f"`{re.sub(r'[0-9]+', '*', name)}`" for name in reasons.keys() - left_out})
        said = f", slowly: {', '.join(slow)}" if slow else ""
        return said + (f"; vLLM leaves {len(left_out)} tensors out" if left_out else "")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    parts = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and torch.equal(*parts)
