"""Processes that start quickly: each is forked from one that has imported only what trainers need."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "tests.publish.test_sharding", "tests.library.test_reader"])


def start(work: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """A process that does `work(*arguments)`, a function of a module."""
    process = _CONTEXT.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process
