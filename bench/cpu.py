"""Tokens per CPU second of vLLM on a CPU, without and with what `vllm/cpu.py` makes faster, in turns.

Without it, live layers multiply as PyTorch does by itself, and norms are vLLM's. Each policy runs on this CPU
and, where Linux can hide features of a CPU (see avx2.c), as on one with AVX2 only. The shipped policy gets
requests as in games: six turns with longer and longer prompts, seven tokens each. SmolLM2-135M reads 32
tokens and writes 32.

    python -m bench --only cpu
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from bench.results import ROOT, SCRATCH, Results
from trainer.policies import smollm2

_AT_ONCE = 32
_GAME, _TURN = (4, 19, 34, 49, 64, 79), 7  # tokens of the prompts of a game, and of each answer
_POLICIES = {  # the prompts' lengths, tokens of an answer, rounds
    "the shipped policy": (_GAME * _AT_ONCE, _TURN, 7),
    "SmolLM2-135M": ((32,) * _AT_ONCE, 32, 3),
}
_ENVIRONMENT = {
    "VLLM_PLUGINS": "delta_weight_sync",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def run(results: Results) -> dict[str, Any]:
    """The medians of each policy on each kind of CPU."""
    del results
    kinds: dict[str, dict[str, str]] = {"this CPU": {}} | (
        {"AVX2 only": {"LD_PRELOAD": str(library)}} if (library := _avx2()) else {}
    )
    folders = {
        "the shipped policy": ROOT / "trainer/policies/wordle-tiny",
        "SmolLM2-135M": smollm2.build(SCRATCH / "smollm2", "reverse_text"),
    }
    return {
        "runs": [
            {"policy": policy, "cpu": kind, **_child(policy, folder, environment)}
            for policy, folder in folders.items()
            for kind, environment in kinds.items()
        ]
    }


def _avx2() -> Path | None:
    """The library that hides AVX-512, or None where it does not work."""
    compiler, library = shutil.which("cc"), SCRATCH / "avx2.so"
    cpu = Path("/proc/cpuinfo")
    if not compiler or not cpu.exists() or "cpuid_fault" not in cpu.read_text():
        return None
    SCRATCH.mkdir(parents=True, exist_ok=True)
    source = ROOT / "bench/avx2.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def _child(policy: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.cpu", policy, str(folder)]
    output = subprocess.check_output(command, env={**os.environ, **_ENVIRONMENT, **environment}, text=True)
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def _measure(policy: str, folder: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams  # slow to import, and only needed here

    prompts, tokens, rounds = _POLICIES[policy]
    llm = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        max_num_seqs=_AT_ONCE,
        max_model_len=256,
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
    )
    size, choose = llm.llm_engine.model_config.get_vocab_size(), random.Random(0)
    requests = [{"prompt_token_ids": [choose.randrange(10, size - 10) for _ in range(n)]} for n in prompts]
    each = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, seed=i) for i in range(len(prompts))
    ]
    ways = _ways(llm)
    per_second: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):  # the first one warms up
        for way, choose_way in ways.items():
            choose_way()
            started = time.process_time()
            llm.generate(requests[: None if turn else 2], each[: None if turn else 2], use_tqdm=False)
            if turn:
                per_second[way].append(len(prompts) * tokens / (time.process_time() - started))
    medians = {way: round(median(all_), 1) for way, all_ in per_second.items()}
    ratios = [new / old for old, new in zip(*per_second.values(), strict=True)]
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "capability": capability,
        **medians,
        "ratio": round(median(ratios), 2),
        "worst": round(min(ratios), 2),
    }


def _ways(llm: Any) -> dict[str, Callable[[], None]]:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from delta_weight_sync.vllm.cpu import _LiveLinear

    (modules,) = llm.apply_model(lambda model: list(model.modules()))
    norms = [module for module in modules if isinstance(module, RMSNorm)]

    def choose(norm: str, linear: Any) -> None:
        for module in norms:
            module._forward_method = getattr(module, norm)
        _LiveLinear.__call__ = linear  # type: ignore[method-assign]

    def plain(
        layer: _LiveLinear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(x, layer.memory, bias)

    ours = partial(choose, "forward_cpu", _LiveLinear.__call__)
    return {"without": partial(choose, "forward_native", plain), "with": ours}


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
