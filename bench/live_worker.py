"""vLLM's own ways to load new weights, inside its worker beside ours (vLLM's `--worker-extension-cls`).

Called through vLLM's development endpoint `/collective_rpc`, between two engine steps as our commit is. The
file is read before the clock starts, which is the part that vLLM could do ahead.
"""

import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)


class VllmLoaders:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def bench_sparse(self, path: str, shapes: dict[str, list[int]]) -> float:
        """Seconds of `load_checkpoint_weight_patches` for a delta file in the original layout."""
        loaded = load_file(Path(path))
        patches = [
            CheckpointWeightPatch(
                name=name,
                shape=tuple(shape),
                dtype=torch.bfloat16,
                values=loaded[f"{name}.values"],
                indices=loaded[f"{name}.indices"],
            )
            for name, shape in shapes.items()
            if f"{name}.indices" in loaded
        ]
        started = time.perf_counter()
        load_checkpoint_weight_patches(self.model_runner.model, patches)
        return time.perf_counter() - started

    @torch.no_grad()
    def bench_dense(self, path: str) -> float:
        """Seconds of the model's loader for a whole checkpoint that is in memory."""
        loaded = load_file(Path(path))
        started = time.perf_counter()
        self.model_runner.model.load_weights(loaded.items())
        return time.perf_counter() - started
