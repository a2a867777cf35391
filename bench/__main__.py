"""Runs the sections, each in a process of its own, then draws the plot."""

import argparse
import os
import subprocess
import sys
import time

from bench import machine, plots, results

SECTIONS = ("size", "lora", "speed", "rival", "joining", "memory", "hub", "demo", "live", "cpu", "dashboard")
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    chosen = parser.parse_args().only.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    results.put("machine", machine.describe())
    for section in chosen:
        _run(section)
    plots.draw(results.read())


def _run(section: str) -> None:
    started = time.perf_counter()
    print(f"bench: {section} ...", flush=True)
    offline = {"HF_HUB_OFFLINE": str(int(section != "hub"))}  # whose Hub is a simulated one
    environment = os.environ | dict.fromkeys(_ONE_THREAD, "1") | offline
    subprocess.run([sys.executable, "-m", "bench.section", section], check=True, env=environment)
    print(f"bench: {section} took {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
