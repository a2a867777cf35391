"""Processes that start quickly: each is forked from one that has imported only what trainers need."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "tests.publish.test_sharding", "tests.library.test_reader"])


def start(work: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """A process that does `work(*arguments)`, a function of a module."""
    process = _CONTEXT.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def ranks(work: Callable[..., None], size: int, folder: Path, *arguments: object) -> list[int | None]:
    """Do `work(rank, folder, *arguments)` on each rank; the exit codes. A rank that hangs fails the test."""
    (folder / "store").unlink(missing_ok=True)
    stores = {key: value for key, value in os.environ.items() if key.startswith(("HF_", "AWS_"))}
    started = [start(_rank, work, rank, size, folder, stores, *arguments) for rank in range(size)]
    try:
        for rank in started:
            rank.join(300)
        return [rank.exitcode for rank in started]
    finally:
        for rank in started:
            rank.kill()


def _rank(
    work: Callable[..., None], rank: int, size: int, folder: Path, stores: dict[str, str], *arguments: object
) -> None:
    os.environ.update(stores)  # the ranks' parent was started earlier
    torch.set_num_threads(1)
    if size > 1:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    work(rank, folder, *arguments)
    if size > 1:
        dist.destroy_process_group()
