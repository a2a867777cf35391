"""RMS norm in bf16 as one kernel, instead of the ten operations of vLLM's CPU backend.

Sums are float32, and results are rounded once, to nearest. (Without AVX-512, vLLM's own kernel truncates.)
"""

from functools import partial
from typing import Any

import numpy as np
from numba import carray

from delta_weight_sync.kernels import kernel, pointer


@kernel
def _widen(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@kernel
def _rounded(value: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


# Sums may be reordered: otherwise the compiler could not use vector instructions.
@partial(kernel, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def normalize(
    addresses: tuple[int, int, int, int], shape: tuple[int, int, int, int, int], epsilon: float
) -> None:
    """Write x / rms(x) * weight to `out`.

    x is a grid of vectors. `addresses` are those of x, residual, weight and out. `shape` has the grid's rows
    and columns, the elements of a vector, and x's strides from row to row and from column to column, in
    elements. If the residual's address is not 0, x + residual replaces x and is written to the residual.
    """
    x, residual, weight, out = addresses
    rows, columns, size, row_stride, column_stride = shape
    factors = carray(pointer(weight), size)
    line = np.empty(size, np.float32)
    for i in range(rows):
        for j in range(columns):
            values = carray(pointer(x + 2 * (i * row_stride + j * column_stride)), size)
            first = 2 * (i * columns + j) * size
            sums = carray(pointer(residual + first), size)
            result = carray(pointer(out + first), size)
            total = np.float32(0)
            for k in range(size):
                line[k] = _widen(values[k])
                if residual:
                    line[k] += _widen(sums[k])
                    sums[k] = _rounded(line[k])
                total += line[k] * line[k]
            scale = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
            for k in range(size):
                result[k] = _rounded(line[k] * scale * _widen(factors[k]))
