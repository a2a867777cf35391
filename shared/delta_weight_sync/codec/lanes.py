"""64 weights at a time: compare a block of bf16 patterns and get one bit per weight.

LLVM vector operations through numba, so each machine runs its own widest instructions (AVX2, AVX-512, NEON)
and nothing has to be compiled when the package is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from delta_weight_sync.kernel import kernel

LANES = 64
_WORD = ir.IntType(64)
_INDEX = ir.IntType(32)
_BLOCK = ir.VectorType(ir.IntType(16), LANES)


@intrinsic
def differs(typing: Any, left: Any, right: Any, start: Any) -> Any:
    """uint64: bit j is set where `left[start + j] != right[start + j]`; both uint16, contiguous."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        blocks = [_load(context, builder, signature.args[i], values[i], values[2]) for i in (0, 1)]
        return builder.bitcast(builder.icmp_unsigned("!=", *blocks), _WORD)

    return types.uint64(left, right, types.int64), emit


@intrinsic
def below(typing: Any, bits: Any, start: Any, limit: Any) -> Any:
    """uint64: bit j is set where `bits[start + j]` without its sign bit is below `limit` (both uint16)."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        block = _load(context, builder, signature.args[0], values[0], values[1])
        magnitude = builder.and_(block, ir.Constant(_BLOCK, [0x7FFF] * LANES))
        flags = builder.icmp_signed("<", magnitude, _broadcast(builder, values[2]))
        return builder.bitcast(flags, _WORD)

    return types.uint64(bits, types.int64, types.uint16), emit


@intrinsic
def ones(typing: Any, word: Any) -> Any:
    """How many bits of a uint64 are set."""
    return types.int64(types.uint64), lambda context, builder, signature, values: builder.ctpop(values[0])


@intrinsic
def lowest(typing: Any, word: Any) -> Any:
    """Position of the lowest set bit of a uint64; 64 for zero."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), emit


@intrinsic
def length(typing: Any, word: Any) -> Any:
    """Bits up to and including the highest set one of a uint64; 0 for zero."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        zeros = builder.ctlz(values[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(_WORD, LANES), zeros)

    return types.int64(types.uint64), emit


@kernel
def select(word: np.uint64, rank: int) -> int:
    """Position of the set bit of `word` that has `rank` set bits below it."""
    position = 0
    for width in (32, 16, 8, 4, 2, 1):
        low = word & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))
        count = ones(low)
        if rank >= count:
            rank -= count
            word >>= np.uint64(width)
            position += width
        else:
            word = low
    return position


def _load(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    block = builder.bitcast(builder.gep(data, [start]), _BLOCK.as_pointer())
    return builder.load(block, align=2)


def _broadcast(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_BLOCK, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INDEX, 0))
    everywhere = ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, everywhere)
