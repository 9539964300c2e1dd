"""What is computed column by column: dweight, and dx of rows too wide for registers.

dweight is summed in float32 in the order of docs/numerics.md: one program goes through a leaf from row to row, each
column in one accumulator, and `fold` adds the sums of the leaves in pairs.
"""

import triton
import triton.language as tl

from rmsnorm.gpu.kernels.backward import input_gradient
from rmsnorm.gpu.kernels.values import first_row, load, load_gain, row_offset, store


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
    log_leaves: tl.int32,
    offset: tl.float32,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    INTERP: tl.constexpr,
):
    """BLOCK columns of a leaf per program, one row after another: dweight, or dx from `slopes`, or both."""
    leaf = tl.program_id(0).to(tl.int64)
    begin = first_row(leaf, rows, log_leaves)
    length = first_row(leaf + 1, rows, log_leaves) - begin
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < cols
    if dx is not None and weight is not None:
        gain = load_gain(weight, offset, column, mask, INTERP)
    acc = tl.zeros([BLOCK], tl.float32)
    for step in tl.range(0, length, loop_unroll_factor=UNROLL):
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
        store(partial + leaf * cols + column, acc, mask, INTERP)


@triton.jit
def _sum_of_two(partial, leaf, column, leaves, cols, INTERP: tl.constexpr):
    """Leaves `leaf` and `leaf + 1`; those past the end are +0, which changes no sum: none of them is -0."""
    inside = column < cols
    partial += leaf * cols + column
    left = load(partial, (leaf < leaves) & inside, INTERP)
    return left + load(partial + cols, (leaf + 1 < leaves) & inside, INTERP)


@triton.jit
def fold(
    partial,
    total,
    leaves: tl.int64,
    cols: tl.int32,
    tiles: tl.int32,
    LEAVES: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERP: tl.constexpr,
):
    """BLOCK columns of LEAVES leaves per program, added in pairs: neighbours, then neighbours of their sums.

    A thread adds eight neighbours in its registers. What meets across threads are explicit pairs too: the order of a
    `tl.sum` would be the compiler's.
    """
    program = tl.program_id(0).to(tl.int64)
    part = program // tiles
    column = (program % tiles) * BLOCK + tl.arange(0, BLOCK)[None, :]
    leaf = part * LEAVES + 8 * tl.arange(0, LEAVES // 8)[:, None]
    sums = (
        _sum_of_two(partial, leaf, column, leaves, cols, INTERP)
        + _sum_of_two(partial, leaf + 2, column, leaves, cols, INTERP)
    ) + (
        _sum_of_two(partial, leaf + 4, column, leaves, cols, INTERP)
        + _sum_of_two(partial, leaf + 6, column, leaves, cols, INTERP)
    )
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(sums, [LEAVES >> (level + 4), 2, BLOCK])
        left, right = tl.split(tl.permute(pairs, (0, 2, 1)))
        sums = left + right
    store(total + part * cols + column, sums, column < cols, INTERP)
