"""The backward of whole rows, and x rebuilt from y."""

import triton
import triton.language as tl

from rmsnorm.gpu.kernels.fixed_sum import (
    FLOOR,
    SINGLE,
    accumulate,
    exponent,
    fixed_sum,
    is_finite,
    largest_bits,
    single_fits,
    start,
    total,
)
from rmsnorm.gpu.kernels.values import first_row, load, load_gain, row_offset, store


@triton.jit
def slope(dot, u_largest, x_largest, rstd, reciprocal):
    """k = float32(rstd c / d), in float64; NaN where u or x is not finite."""
    defined = is_finite(u_largest) & is_finite(x_largest)
    dot = tl.where(defined, dot, float("nan"))
    return (rstd.to(tl.float64) * dot * reciprocal).to(tl.float32)


@triton.jit
def input_gradient(u, x_hat, k, rstd):
    return rstd * (u - x_hat * k)


@triton.jit
def _tile(
    row,
    dy,
    x,
    dh,
    dx,
    rstd,
    gain,
    rows,
    cols,
    inner,
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    dh_outer,
    dh_inner,
    dx_outer,
    dx_inner,
    reciprocal,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """dx of ROWS rows; returns their terms of dweight."""
    column = tl.arange(0, BLOCK)[None, :]
    live = row < rows
    column_mask = None if FULL else column < cols
    if ROWS == 1:
        mask = column_mask
    elif FULL:
        mask = live[:, None]
    else:
        mask = live[:, None] & column_mask
    g = load(dy + row_offset(row, inner, dy_outer, dy_inner, NESTED)[:, None] + column, mask, INTERP)
    values = load(x + row_offset(row, inner, x_outer, x_inner, NESTED)[:, None] + column, mask, INTERP)
    scale = tl.load(rstd + row, mask=live, other=0.0)
    u = g
    if gain is not None:
        u = g * gain
    u_largest = largest_bits(u)
    x_largest = largest_bits(values)
    dot = fixed_sum(u, values, exponent(u_largest) + exponent(x_largest), LOG_COLS, FORM, INTERP)
    k = slope(dot, u_largest, x_largest, scale, reciprocal)
    x_hat = values * scale[:, None]
    result = input_gradient(u, x_hat, k[:, None], scale[:, None])
    if dh is not None:
        result += load(dh + row_offset(row, inner, dh_outer, dh_inner, NESTED)[:, None] + column, mask, INTERP)
    store(dx + row_offset(row, inner, dx_outer, dx_inner, NESTED)[:, None] + column, result, mask, INTERP)
    return g * x_hat


@triton.jit
def backward(
    dy,
    x,
    dh,
    dx,
    rstd,
    weight,
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
    reciprocal: tl.float64,
    offset: tl.float32,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """dx of ROWS whole rows per program; with `partial`, of a leaf, row by row, and its dweight."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    column_mask = None if FULL else column < cols
    gain = None
    if weight is not None:
        gain = load_gain(weight, offset, column, column_mask, INTERP)
    if partial is None:
        # fmt: off
        _tile(
            program * ROWS + tl.arange(0, ROWS), dy, x, dh, dx, rstd, gain, rows, cols, inner, dy_outer, dy_inner,
            x_outer, x_inner, dh_outer, dh_inner, dx_outer, dx_inner, reciprocal,
            NESTED, ROWS, BLOCK, FULL, LOG_COLS, FORM, INTERP,
        )
    else:
        begin = first_row(program, rows, log_leaves)
        acc = tl.zeros([1, BLOCK], tl.float32)
        for step in range(first_row(program + 1, rows, log_leaves) - begin):
            acc += _tile(
                begin + step + tl.arange(0, 1),
                dy,
                x,
                dh,
                dx,
                rstd,
                gain,
                rows,
                cols,
                inner,
                dy_outer,
                dy_inner,
                x_outer,
                x_inner,
                dh_outer,
                dh_inner,
                dx_outer,
                dx_inner,
                reciprocal,
                NESTED,
                1,
                BLOCK,
                FULL,
                LOG_COLS,
                FORM,
                INTERP,
            )
        # fmt: on
        store(partial + program * cols + column, acc, column_mask, INTERP)


@triton.jit
def _dot(
    dy,
    x,
    weight,
    offset,
    cols,
    e,
    BLOCK: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    acc = start(e, LOG_COLS, 1, BLOCK, FORM)
    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = column < cols
        u = load(dy + column, mask, INTERP)
        if weight is not None:
            u = u * load_gain(weight, offset, column, mask, INTERP)
        acc = accumulate(acc, u, load(x + column, mask, INTERP), e, LOG_COLS, FORM, INTERP)
    return total(acc, e, LOG_COLS, BLOCK, FORM)


@triton.jit
def slopes(
    dy,
    x,
    rstd,
    weight,
    k,
    cols: tl.int32,
    inner: tl.int64,
    dy_outer: tl.int64,
    dy_inner: tl.int64,
    x_outer: tl.int64,
    x_inner: tl.int64,
    reciprocal: tl.float64,
    offset: tl.float32,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """k of one row per program, too wide for registers: read twice."""
    row = tl.program_id(0).to(tl.int64)
    dy += row_offset(row, inner, dy_outer, dy_inner, NESTED)
    x += row_offset(row, inner, x_outer, x_inner, NESTED)
    u_bits = tl.zeros([1, BLOCK], tl.int32)
    x_bits = u_bits
    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = column < cols
        u = load(dy + column, mask, INTERP)
        if weight is not None:
            u = u * load_gain(weight, offset, column, mask, INTERP)
        u_bits = tl.maximum(u_bits, u.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        x_bits = tl.maximum(x_bits, load(x + column, mask, INTERP).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    u_largest = tl.max(u_bits, axis=1)
    x_largest = tl.max(x_bits, axis=1)

    e = exponent(u_largest) + exponent(x_largest)
    if FORM == SINGLE:
        if tl.min(single_fits(e, LOG_COLS).to(tl.int32), axis=0) == 1:
            dot = _dot(dy, x, weight, offset, cols, e, BLOCK, LOG_COLS, SINGLE, INTERP)
        else:
            dot = _dot(dy, x, weight, offset, cols, e, BLOCK, LOG_COLS, FLOOR, INTERP)
    else:
        dot = _dot(dy, x, weight, offset, cols, e, BLOCK, LOG_COLS, FORM, INTERP)
    at = row + tl.arange(0, 1)
    tl.store(k + at, slope(dot, u_largest, x_largest, tl.load(rstd + at), reciprocal))


@triton.jit
def rebuild(
    y,
    x,
    rstd,
    weight,
    cols: tl.int32,
    inner: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    x_outer: tl.int64,
    x_inner: tl.int64,
    offset: tl.float32,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERP: tl.constexpr,
):
    """x = y / gain / rstd of BLOCK columns of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < cols
    values = load(y + row_offset(row, inner, y_outer, y_inner, NESTED) + column, mask, INTERP)
    if weight is not None:
        values = tl.div_rn(values, load_gain(weight, offset, column, mask, INTERP))
    # Otherwise `/` of float32 would be an approximation.
    values = tl.div_rn(values, tl.broadcast_to(tl.load(rstd + row), values.shape))
    store(x + row_offset(row, inner, x_outer, x_inner, NESTED) + column, values, mask, INTERP)
