"""A program for tests: a model from vLLM's own loader, patched through routes, against a freshly loaded one.

    python -m tests.vllm.layouts <rank> <ranks> <port> <folder>...

Each folder holds the checkpoints `base` and `patched`. Prints a line of JSON for each: what was found.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(VLLM_PLUGINS="", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.digest import state_digest
from delta_weight_sync.vllm import cpu, routes, worker
from delta_weight_sync.vllm.worker import Fallback, LiveWeights, Ranks, commit


class Worker:
    """One rank's share of a model, loaded from a checkpoint."""

    def __init__(self, folder: Path, rank: int, ranks: int, port: int) -> None:
        self.config = _config(folder, rank, ranks)
        with set_current_vllm_config(self.config):
            if not parallel_state.model_parallel_is_initialized():
                address = f"tcp://127.0.0.1:{port}"
                parallel_state.init_distributed_environment(ranks, rank, address, rank, backend="gloo")
                parallel_state.initialize_model_parallel(ranks)
            self.model = get_model(vllm_config=self.config)

    def memory(self) -> dict[str, torch.Tensor]:
        """A copy of the bits of every parameter and buffer."""
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        floating = {name: t.detach() for name, t in tensors if t.is_floating_point()}
        return {name: t.reshape(-1).view(torch.int16).clone() for name, t in floating.items()}

    @torch.no_grad()
    def experts(self) -> list[torch.Tensor]:
        """What each mixture of experts makes of the same input."""
        outputs = []
        with set_current_vllm_config(self.config), set_forward_context(None, self.config):
            for module in self.model.modules():
                if any(name == "experts" for name, _ in module.named_children()):
                    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
                    outputs.append(module(x.to(torch.bfloat16)))
        return outputs


def _config(folder: Path, rank: int, ranks: int) -> VllmConfig:
    config = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        # Where the CPU has AMX, the default for MLA packs a weight; models without MLA ignore this.
        attention_backend="CPU_MLA" if current_platform.is_cpu() else None,
    ).create_engine_config()
    config.parallel_config.rank = rank
    return config


class Patching:
    """The way from `base` to `patched` on one rank, through routes and, where there is none, the fallback."""

    def __init__(self, worker: Worker, base: dict[str, codec.Bits], ranks: Ranks) -> None:
        shapes = {name: bits.shape for name, bits in base.items()}
        learned = routes.learn(worker.model, shapes)
        owned, self.unroutable = routes.ownership(shapes, ranks.gather(learned.sources))
        fallback = Fallback(worker.model, {name: base[name] for name in self.unroutable})
        self.weights = LiveWeights(learned.routes, owned[ranks.rank], fallback, ranks)
        self.digest = self.weights.digest

    def do(self, folder: Path, patches: list[codec.Patch], old: dict[str, codec.Bits]) -> None:
        """Write the patches, as a delta does."""
        path = folder / "delta.safetensors"
        path.write_bytes(codec.encode(patches, old.__getitem__, base=0, version=1, encoding="fast"))
        commit(self.weights.stage([path], self.digest()).steps, Ranks(1))


def examine(folder: Path, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Everything that the tests assert about one model."""
    base, new = (dict(read_bits(folder / name)) for name in ("base", "patched"))
    live, fresh = (Worker(folder / name, rank, ranks, port) for name in ("base", "patched"))
    if current_platform.is_cpu():
        cpu.self_test(live.model)
    loaded = live.memory()
    experts = live.experts()
    patching = Patching(live, base, Ranks(ranks))
    scratch = folder / f"rank{rank}"
    scratch.mkdir(exist_ok=True)
    facts: dict[str, Any] = {
        "model": folder.name,
        "unroutable": sorted(patching.unroutable),
        "learning_wrote": _different(loaded, live.memory()),
        "digest_loaded": patching.digest() == state_digest(base),
    }
    patching.do(scratch, [codec.diff(name, base[name], new[name]) for name in base], base)
    facts |= {
        "unchanged": [
            name
            for name, _ in live.model.named_parameters()
            if torch.equal(loaded[name], live.memory()[name])
        ],
        "different": _different(live.memory(), fresh.memory()),
        "digest_patched": patching.digest() == state_digest(new),
        "experts": len(experts),
        "experts_stale": any(map(torch.equal, experts, live.experts())),
        "experts_as_fresh": all(map(torch.equal, live.experts(), fresh.experts())),
    }
    patching.do(scratch, [codec.diff(name, new[name], base[name]) for name in base], new)
    return facts | {"not_undone": _different(live.memory(), loaded)}


def _different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


def main(rank: int, ranks: int, port: int, folders: list[str]) -> None:
    """See the module's text."""
    if current_platform.is_cpu():
        from vllm.v1.worker import cpu_model_runner

        cpu_model_runner._set_torch_accelerator_to_noop()  # as vLLM's worker does before it loads
        cpu.install()
        os.environ["VLLM_DIST_IDENT"] = str(port)
    routes.install()
    worker._MANY = 0  # as for large deltas, the ranks divide the decoding
    torch.set_num_threads(1)
    gc.freeze()  # vLLM collects garbage at each load, which would go through all that was imported
    for folder in folders:
        print(json.dumps(examine(Path(folder), rank, ranks, port)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
