"""The forward of rows, plain and with a residual."""

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
from rmsnorm.gpu.kernels.values import load, load_gain, round_to, row_offset, store


@triton.jit
def inverse_rms(squares, largest, reciprocal, eps):
    """rstd = float32(1 / sqrt(S / d + eps)), in float64; an infinite or NaN row has S = m * m."""
    magnitude = largest.to(tl.float32, bitcast=True).to(tl.float64)
    squares = tl.where(is_finite(largest), squares, magnitude * magnitude)
    return (1.0 / tl.sqrt(squares * reciprocal + eps)).to(tl.float32)


@triton.jit
def scale(x, rstd, weight, offset, columns, mask, X_HAT: tl.constexpr, INTERP: tl.constexpr):
    """y = x * rstd * gain, with x * rstd rounded to X_HAT first."""
    y = round_to(x * rstd[:, None], X_HAT, INTERP)
    if weight is not None:
        y = y * load_gain(weight, offset, columns, mask, INTERP)
    return y


@triton.jit
def forward(
    x,
    residual,
    weight,
    y,
    h,
    rstd,
    rows: tl.int64,
    cols: tl.int32,
    inner: tl.int64,
    x_outer: tl.int64,
    x_inner: tl.int64,
    residual_outer: tl.int64,
    residual_inner: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    h_outer: tl.int64,
    h_inner: tl.int64,
    reciprocal: tl.float64,
    eps: tl.float64,
    offset: tl.float32,
    X_HAT: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """ROWS whole rows per program, in one tile. `residual` and `h`: both or neither. FULL: cols == BLOCK."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    live = row < rows
    column_mask = None if FULL else column < cols
    if ROWS == 1:
        mask = column_mask
    elif FULL:
        mask = live[:, None]
    else:
        mask = live[:, None] & column_mask

    values = load(x + row_offset(row, inner, x_outer, x_inner, NESTED)[:, None] + column, mask, INTERP)
    if residual is not None:
        other = residual + row_offset(row, inner, residual_outer, residual_inner, NESTED)[:, None] + column
        values = values + load(other, mask, INTERP)
        store(h + row_offset(row, inner, h_outer, h_inner, NESTED)[:, None] + column, values, mask, INTERP)
        values = round_to(values, h.dtype.element_ty, INTERP)
    largest = largest_bits(values)
    squares = fixed_sum(values, values, 2 * exponent(largest), LOG_COLS, FORM, INTERP)
    scale_of_row = inverse_rms(squares, largest, reciprocal, eps)
    if rstd is not None:
        tl.store(rstd + row, scale_of_row, mask=live)
    result = scale(values, scale_of_row, weight, offset, column, column_mask, X_HAT, INTERP)
    store(y + row_offset(row, inner, y_outer, y_inner, NESTED)[:, None] + column, result, mask, INTERP)


@triton.jit
def _load_row(x, residual, columns, mask, INTERP: tl.constexpr):
    """x, or x + residual rounded to their dtype."""
    values = load(x + columns, mask, INTERP)
    if residual is not None:
        values = round_to(values + load(residual + columns, mask, INTERP), residual.dtype.element_ty, INTERP)
    return values


@triton.jit
def _sum_of_squares(
    x,
    residual,
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
        values = _load_row(x, residual, column, column < cols, INTERP)
        acc = accumulate(acc, values, values, e, LOG_COLS, FORM, INTERP)
    return total(acc, e, LOG_COLS, BLOCK, FORM)


@triton.jit
def forward_in_pieces(
    x,
    residual,
    weight,
    y,
    h,
    rstd,
    cols: tl.int32,
    inner: tl.int64,
    x_outer: tl.int64,
    x_inner: tl.int64,
    residual_outer: tl.int64,
    residual_inner: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    h_outer: tl.int64,
    h_inner: tl.int64,
    reciprocal: tl.float64,
    eps: tl.float64,
    offset: tl.float32,
    X_HAT: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """One row per program, too wide for registers: read three times.

    h is formed again each time and never read: what other threads wrote need not be visible yet. y may be x: all of a
    row has been read twice before the last pass writes any of it, and that pass writes where it reads.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row_offset(row, inner, x_outer, x_inner, NESTED)
    y += row_offset(row, inner, y_outer, y_inner, NESTED)
    if residual is not None:
        residual += row_offset(row, inner, residual_outer, residual_inner, NESTED)
        h += row_offset(row, inner, h_outer, h_inner, NESTED)

    bits = tl.zeros([1, BLOCK], tl.int32)
    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        values = _load_row(x, residual, column, column < cols, INTERP)
        if residual is not None:
            store(h + column, values, column < cols, INTERP)
        bits = tl.maximum(bits, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(bits, axis=1)

    e = 2 * exponent(largest)
    if FORM == SINGLE:
        if tl.min(single_fits(e, LOG_COLS).to(tl.int32), axis=0) == 1:
            squares = _sum_of_squares(x, residual, cols, e, BLOCK, LOG_COLS, SINGLE, INTERP)
        else:
            squares = _sum_of_squares(x, residual, cols, e, BLOCK, LOG_COLS, FLOOR, INTERP)
    else:
        squares = _sum_of_squares(x, residual, cols, e, BLOCK, LOG_COLS, FORM, INTERP)
    scale_of_row = inverse_rms(squares, largest, reciprocal, eps)
    if rstd is not None:
        tl.store(rstd + row + tl.arange(0, 1), scale_of_row)

    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = column < cols
        values = _load_row(x, residual, column, mask, INTERP)
        store(y + column, scale(values, scale_of_row, weight, offset, column, mask, X_HAT, INTERP), mask, INTERP)
