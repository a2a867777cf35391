"""Kernels for a GPU, interpreted by Triton here, on tensors of the host.

Triton decides whether it interprets a kernel when it sees its definition, its own library's at their first
import: so `tests/conftest.py` imports this before anything else can import Triton.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from unittest import mock


def interpreted(module: str) -> ModuleType:
    """`module`, with kernels that are interpreted."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return importlib.import_module(module)


interpreted("triton.experimental.gluon")  # which the rest imports when it likes
