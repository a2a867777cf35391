"""Tokens per CPU second of a replica on a CPU, with what makes it fast and without, in turns.

Without it, live layers multiply as PyTorch does by itself, norms are vLLM's, and so are blocks of 128 tokens.
Each policy runs on this CPU and, where Linux can hide some of it (see avx2.c), as on one with AVX2 only. The
shipped policy plays 32 games side by side: six turns of seven tokens, whose prompts are the game so far.
SmolLM2-135M reverses 32 texts, as in its demo: 39 tokens, and 20 more. Only the engine counts, on one thread.

    python -m bench --only cpu
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from bench.results import ROOT, SCRATCH, Results
from trainer.policies import smollm2

_AT_ONCE = 32
_POLICIES = {  # rounds; tokens of the first prompt, of an answer, and of what comes after it; turns
    "the shipped policy": (7, 4, 7, 8, 6),
    "SmolLM2-135M": (3, 39, 20, 0, 1),
}
_BLOCK = {"without": 128, "with": 32}
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
    kinds: dict[str, dict[str, str]] = {"this CPU" if _has_avx512() else "AVX2 only": {}}
    if _has_avx512() and (library := _avx2()):
        kinds["AVX2 only"] = {"LD_PRELOAD": str(library)}
    folders = {"the shipped policy": ROOT / "trainer/policies/wordle-tiny"}
    folders["SmolLM2-135M"] = smollm2.build(SCRATCH / "smollm2-reverse-text", "reverse_text")
    return {
        "runs": [
            {"policy": policy, "cpu": kind, **_in_turns(policy, folder, environment)}
            for policy, folder in folders.items()
            for kind, environment in kinds.items()
        ]
    }


def _has_avx512() -> bool:
    return "avx512f" in Path("/proc/cpuinfo").read_text()


def _avx2() -> Path | None:
    """The library that hides AVX-512, or None where it does not work."""
    compiler = shutil.which("cc")
    library = SCRATCH / "avx2.so"
    if not compiler or "cpuid_fault" not in Path("/proc/cpuinfo").read_text():
        return None
    SCRATCH.mkdir(parents=True, exist_ok=True)
    source = ROOT / "bench/avx2.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def _in_turns(policy: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    variables = {**os.environ, **_ENVIRONMENT, **environment}
    per_second: dict[str, list[float]] = {way: [] for way in _BLOCK}
    with ExitStack() as stack:
        engines = {}
        for way in _BLOCK:
            command = [sys.executable, "-m", "bench.cpu", way, policy, str(folder)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            engines[way] = stack.enter_context(subprocess.Popen(command, env=variables, **pipes))
        for _ in range(_POLICIES[policy][0]):
            for way, engine in engines.items():
                print("go", file=engine.stdin, flush=True)
                assert engine.stdout
                per_second[way].append(json.loads(engine.stdout.readline()))
        for engine in engines.values():
            engine.communicate()
    ratios = [new / old for old, new in zip(per_second["without"], per_second["with"], strict=True)]
    medians = {way: round(median(all_), 1) for way, all_ in per_second.items()}
    return {**medians, "ratio": round(median(ratios), 2), "worst": round(min(ratios), 2)}


def _engine(way: str, policy: str, folder: str) -> None:
    """For each line that comes in, print the tokens per CPU second of one round."""
    # vLLM prints, too
    answers = sys.stdout
    sys.stdout = sys.stderr
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        max_num_seqs=_AT_ONCE,
        max_model_len=256,
        kv_cache_memory_bytes=512 << 20,
        block_size=_BLOCK[way],
    )
    if way == "without":
        _take_away(llm)
    size = llm.llm_engine.model_config.get_vocab_size()
    _, first, tokens, after, turns = _POLICIES[policy]
    each = [SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, seed=i) for i in range(_AT_ONCE)]
    llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 3, SamplingParams(max_tokens=3), use_tqdm=False)
    for number, _ in enumerate(sys.stdin):
        choose = random.Random(number)

        def some(count: int, choose: random.Random = choose) -> list[int]:
            return [choose.randrange(10, size - 10) for _ in range(count)]

        prompts = [some(first) for _ in each]
        started = time.process_time()
        for _ in range(turns):
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], each, use_tqdm=False)
            prompts = [
                p + o.outputs[0].token_ids + some(after) for p, o in zip(prompts, outputs, strict=True)
            ]
        print(_AT_ONCE * tokens * turns / (time.process_time() - started), file=answers, flush=True)


def _take_away(llm: Any) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    from delta_weight_sync.vllm.cpu.layers import LiveLinear

    def plain(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, layer.memory, bias)

    setattr(LiveLinear, "__call__", plain)  # noqa: B010
    (modules,) = llm.apply_model(lambda model: list(model.modules()))
    for module in modules:
        if isinstance(module, RMSNorm):
            module._forward_method = module.forward_native


if __name__ == "__main__":
    _engine(*sys.argv[1:])
