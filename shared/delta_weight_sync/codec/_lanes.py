"""Operations that compare 64 numbers and return one bit for each, and operations on these bits.

The comparisons are LLVM vector operations, compiled by numba at run time. So each machine uses its own widest
instructions (AVX2, AVX-512, NEON), and installing the package compiles nothing.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from delta_weight_sync.kernels import kernel

LANES = 64
BANDS = 8  # ranges of exponents: see the module `positions`
_WORD = ir.IntType(64)
_INDEX = ir.IntType(32)
_BLOCK = ir.VectorType(ir.IntType(16), LANES)
_EXPONENTS = ir.VectorType(ir.IntType(8), LANES)


@intrinsic
def differs(typing: Any, left: Any, right: Any, start: Any) -> Any:
    """Return uint64: bit j says whether `left[start + j] != right[start + j]` (both uint16, contiguous)."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        blocks = [_load(context, builder, signature.args[i], values[i], values[2]) for i in (0, 1)]
        return builder.bitcast(builder.icmp_unsigned("!=", *blocks), _WORD)

    return types.uint64(left, right, types.int64), emit


@intrinsic
def split(typing: Any, bits: Any, start: Any, valid: Any, limits: Any, masks: Any) -> Any:
    """Write one mask per band to `masks` (uint64 [8]): which of the 64 weights from `start` are in the band.

    `bits` is uint16. `limits` is int8 [7]: the lowest exponent of each band but the first, minus 128 (because
    some machines compare only signed bytes). The limits ascend. The caller pads an incomplete block with
    weights of the last band; `valid` (uint64) has a set bit for each lane that is not padding.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        block = _load(context, builder, signature.args[0], values[0], values[1])
        shifted = builder.shl(block, ir.Constant(_BLOCK, [1] * LANES))  # now the high byte is the exponent
        high = builder.trunc(builder.lshr(shifted, ir.Constant(_BLOCK, [8] * LANES)), _EXPONENTS)
        exponents = builder.xor(high, ir.Constant(_EXPONENTS, [-128] * LANES))  # minus 128
        first_limit, first_mask = (_data(context, builder, signature.args[i], values[i]) for i in (3, 4))
        lower = ir.Constant(_WORD, 0)
        for band in range(BANDS - 1):
            limit = builder.load(builder.gep(first_limit, [ir.Constant(_WORD, band)]))
            upto = builder.bitcast(builder.icmp_signed("<", exponents, _broadcast(builder, limit)), _WORD)
            mask = builder.and_(upto, builder.not_(lower))
            builder.store(mask, builder.gep(first_mask, [ir.Constant(_WORD, band)]))
            lower = upto
        rest = builder.and_(builder.not_(lower), values[2])
        builder.store(rest, builder.gep(first_mask, [ir.Constant(_WORD, BANDS - 1)]))
        return context.get_dummy_value()

    return types.void(bits, types.int64, types.uint64, limits, masks), emit


@intrinsic
def at_most(typing: Any, numbers: Any, limit: Any) -> Any:
    """Return uint64: bit j says whether `numbers[j]` (int16 [64]) is at most `limit` (int64, below 2^15)."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        block = _load(context, builder, signature.args[0], values[0], ir.Constant(_WORD, 0))
        limit = builder.trunc(values[1], _BLOCK.element)
        return builder.bitcast(builder.icmp_signed("<=", block, _broadcast(builder, limit)), _WORD)

    return types.uint64(numbers, types.int64), emit


@intrinsic
def ones(typing: Any, word: Any) -> Any:
    """Number of set bits of a uint64."""
    return types.int64(types.uint64), lambda context, builder, signature, values: builder.ctpop(values[0])


@kernel
def lowest(word: np.uint64) -> int:
    """Position of the lowest set bit of a uint64; 64 for zero."""
    return int(ones(~word & (word - np.uint64(1))))


@intrinsic
def length(typing: Any, word: Any) -> Any:
    """Number of bits that a uint64 needs: the position of its highest set bit, plus 1; 0 for zero."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.sub(ir.Constant(_WORD, LANES), builder.ctlz(values[0], ir.Constant(ir.IntType(1), 0)))

    return types.int64(types.uint64), emit


@kernel
def select(word: np.uint64, rank: int) -> int:
    """Position of the set bit of `word` that has `rank` set bits below it."""
    position = np.uint64(0)
    for width in (32, 16, 8, 4, 2, 1):
        below = ones((word >> position) & np.uint64((1 << width) - 1))
        above = np.int64(rank >= below)  # no branch, because the CPU would mispredict half of the time
        rank -= below * above
        position += np.uint64(width * above)
    return int(position)


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def _load(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    first = builder.gep(_data(context, builder, array_type, array), [start])
    return builder.load(builder.bitcast(first, _BLOCK.as_pointer()), align=2)


def _broadcast(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES))
