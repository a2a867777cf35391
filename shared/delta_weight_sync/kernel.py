"""How this package compiles a function: numba, cached on disk, without the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile `function` at its first call; other threads run while it does."""
    return cast(Function, njit(cache=True, nogil=True)(function))
