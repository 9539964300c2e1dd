"""What is computed column by column: dweight, and dx of rows too wide for registers.

dweight is summed in float32, in the order of the rows within a block and of the blocks (docs/numerics.md): one program
goes through a block from row to row, each column in one accumulator, and `fold` adds what the blocks leave.
"""

import triton
import triton.language as tl

from rmsnorm.gpu.kernels.backward import input_gradient
from rmsnorm.gpu.kernels.values import load, load_gain, row_offset, store


@triton.jit
def columns(
    dy,
    x,
    dh,
    dx,
    rstd,
    weight,
    k,
    partial,
    rows: tl.int64,
    cols: tl.int32,
    inner: tl.int64,
    dy_outer: tl.int64,
    dy_inner: tl.int64,
    x_outer: tl.int64,
    x_inner: tl.int64,
    dh_outer: tl.int64,
    dh_inner: tl.int64,
    dx_outer: tl.int64,
    dx_inner: tl.int64,
    length: tl.int64,
    offset: tl.float32,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    INTERP: tl.constexpr,
):
    """BLOCK columns of `length` rows per program, one row after another: dweight, or dx from `slopes`, or both."""
    program = tl.program_id(0).to(tl.int64)
    begin = program * length
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < cols
    if dx is not None and weight is not None:
        gain = load_gain(weight, offset, column, mask, INTERP)
    acc = tl.zeros([BLOCK], tl.float32)
    for step in tl.range(0, tl.minimum(length, rows - begin), loop_unroll_factor=UNROLL):
        row = begin + step
        g = load(dy + row_offset(row, inner, dy_outer, dy_inner, NESTED) + column, mask, INTERP)
        values = load(x + row_offset(row, inner, x_outer, x_inner, NESTED) + column, mask, INTERP)
        scale = tl.load(rstd + row)
        x_hat = values * scale
        acc += g * x_hat
        if dx is not None:
            u = g
            if weight is not None:
                u = g * gain
            result = input_gradient(u, x_hat, tl.load(k + row), scale)
            if dh is not None:
                result += load(dh + row_offset(row, inner, dh_outer, dh_inner, NESTED) + column, mask, INTERP)
            store(dx + row_offset(row, inner, dx_outer, dx_inner, NESTED) + column, result, mask, INTERP)
    if partial is not None:
        store(partial + program * cols + column, acc, mask, INTERP)


@triton.jit
def fold(
    partial, dweight, blocks: tl.int32, cols: tl.int32, BLOCK: tl.constexpr, UNROLL: tl.constexpr, INTERP: tl.constexpr
):
    """dweight: the sums of the blocks, added in their order and rounded once."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < cols
    acc = tl.zeros([BLOCK], tl.float32)
    partial += column
    for _ in tl.range(0, blocks, loop_unroll_factor=UNROLL):
        acc += load(partial, mask, INTERP)
        partial += cols
    store(dweight + column, acc, mask, INTERP)
