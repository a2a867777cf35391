"""Functions that numba compiles, and the pointer through which they read and write memory."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function, **options: Any) -> Function:
    """Compile `function` with numba (and its `options`) at its first call, and run it without the GIL.

    numba caches the code on disk. If it finds no folder that it may write, each process compiles again.
    """
    try:
        return cast(Function, njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # "no locator available": neither this package's folder nor the home can be written
        return cast(Function, njit(nogil=True, **options)(function))


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Return a pointer to the bf16 bits at an address."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.PointerType(ir.IntType(16)))

    return types.CPointer(types.uint16)(types.int64), emit
