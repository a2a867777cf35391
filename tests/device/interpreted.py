"""The trainer's kernels on CPU tensors, by Triton's interpreter, which only a test that asks for it sees."""

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from delta_weight_sync.publish import mirror

# What has kernels, and what imports these.
NAMES = ["device.factors", "device.compare", "device.tiles", "publish.on_device"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parameters on the CPU are compared as those on a GPU are."""
    kept = dict(vars(tl.core))  # the interpreter does not clean up behind functions that kernels call
    for name, module in _modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("sum", "cumsum"):
        monkeypatch.setattr(tl, name, InterpretedFunction(getattr(tl, name).fn))
    monkeypatch.setattr(mirror, "has_kernels", lambda tensor: True)
    yield
    for name, value in kept.items():
        setattr(tl.core, name, value)


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
