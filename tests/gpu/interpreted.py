"""Kernels for a GPU, interpreted by Triton here, on tensors of the host.

Triton decides whether it interprets a kernel when it sees its definition, its own library's at their first
import: so `tests/conftest.py` imports this before anything else can import Triton.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


def interpreted(module: str) -> ModuleType:
    """`module`, with kernels that are interpreted."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return importlib.import_module(module)


interpreted("triton.experimental.gluon")  # which the rest imports when it likes
interpreted("delta_weight_sync.gpu")


@pytest.fixture
def kernels() -> Iterator[None]:
    """Parameters on the host are compared as those on a GPU are."""
    with forced():
        yield


@contextmanager
def forced() -> Iterator[None]:
    """The same for a process that no test runs in."""
    from triton.runtime.interpreter import GridExecutor

    interpreted("delta_weight_sync.publish._gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("delta_weight_sync.publish.mirror.has_kernels", lambda tensor: True)
        # It copies what a kernel is given to the host and back, where it is already.
        patch.setattr(GridExecutor, "_init_args_hst", lambda _, *given: given)
        patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
        yield


class Operations(TorchDispatchMode):
    """Counts what torch itself runs on a device; a tensor without contents and a view are no work."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        empty = function._schema.name in {"aten::empty.memory_format", "aten::empty", "aten::empty_like"}
        self.count += not empty and not function.is_view
        return function(*args, **(kwargs or {}))
