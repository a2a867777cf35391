"""The trainer's kernels on CPU tensors, by Triton's interpreter, which only a test that asks for it sees."""

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import pytest
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

from delta_weight_sync.publish import mirror

# What has kernels, and what imports these.
NAMES = ["device.factors", "device.compare", "device.tiles", "publish.on_device"]


@pytest.fixture
def kernels() -> Iterator[None]:
    """Parameters on the CPU are compared as those on a GPU are."""
    with forced():
        yield


@contextmanager
def forced() -> Iterator[None]:
    """The same for a process that no test runs in."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in _modules().items():
            patch.setitem(sys.modules, name, module)
        # Triton's own functions were imported to be compiled, before the interpreter was asked for.
        plus = tl.standard._sum_combine
        patch.setattr(tl, "sum", lambda values, axis: tl.reduce(values, axis, plus))
        patch.setattr(tl, "cumsum", lambda values, axis: tl.associative_scan(values, axis, plus))
        # It prepares the language anew for each function that a kernel calls, and leaves it so.
        patch.setattr(InterpretedFunction, "__call__", lambda function, *given: function.rewrite()(*given))
        # It copies what a kernel is given to the host and back, where it is already.
        patch.setattr(GridExecutor, "_init_args_hst", lambda _, *given: given)
        patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
        patch.setattr(mirror, "has_kernels", lambda tensor: True)
        yield


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """A second import of these modules, in which the decorator gives what the interpreter runs."""
    names = [f"delta_weight_sync.{name}" for name in NAMES]
    before = {name: sys.modules.pop(name, None) for name in names}
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        modules = {name: importlib.import_module(name) for name in names}
    for name, module in before.items():
        _put_back(name, module)
    return modules


def _put_back(name: str, module: ModuleType | None) -> None:
    package, _, leaf = name.rpartition(".")
    del sys.modules[name]
    delattr(sys.modules[package], leaf)
    if module:
        sys.modules[name] = module
        setattr(sys.modules[package], leaf, module)
