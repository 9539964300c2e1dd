"""The forward of rows or of groups of their columns, with a residual, a gate, or neither.

A program has one group of its rows, the same group of each, so that its columns of the weight are the same too. A plain
norm has one group: GROUPS is a constant, and with 1 nothing is left of it. `rows` are whole rows, `cols` the columns
of a group, and rstd has a number for each group of each row.

    SILU, FIRST     the gate's activation, and whether the gate multiplies x or, if not, the result
    EXACT           whether the sum with the residual is normalised before it is rounded
    X_HAT, NORMED   what x * rstd is rounded to, and the norm before a gate multiplies it
"""

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
from rmsnorm.gpu.kernels.stages import activated, add_residual, load_activation, load_input, normed_sum, sigmoid
from rmsnorm.gpu.kernels.values import group_and_block, load, load_gain, round_to, row_offset, store


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
    gate,
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
    gate_outer: tl.int64,
    gate_inner: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    h_outer: tl.int64,
    h_inner: tl.int64,
    reciprocal: tl.float64,
    eps: tl.float64,
    offset: tl.float32,
    alpha: tl.float32,
    GROUPS: tl.constexpr,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    EXACT: tl.constexpr,
    X_HAT: tl.constexpr,
    NORMED: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """A group of ROWS rows per program, in one tile. `residual` and `h`: both or neither. FULL: cols == BLOCK."""
    group, block = group_and_block(tl.program_id(0), GROUPS)
    row = block * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, BLOCK)[None, :]
    column = group * cols + within
    live = row < rows
    column_mask = None if FULL else within < cols
    if ROWS == 1:
        mask = column_mask
    elif FULL:
        mask = live[:, None]
    else:
        mask = live[:, None] & column_mask

    values = load(x + row_offset(row, inner, x_outer, x_inner, NESTED)[:, None] + column, mask, INTERP)
    if residual is not None:
        other = residual + row_offset(row, inner, residual_outer, residual_inner, NESTED)[:, None] + column
        values = add_residual(values, load(other, mask, INTERP), alpha, x.dtype.element_ty, INTERP)
        store(h + row_offset(row, inner, h_outer, h_inner, NESTED)[:, None] + column, values, mask, INTERP)
        values = normed_sum(values, h.dtype.element_ty, EXACT, INTERP)
    if gate is not None:
        z = load(gate + row_offset(row, inner, gate_outer, gate_inner, NESTED)[:, None] + column, mask, INTERP)
        if FIRST:
            values = values * activated(z, sigmoid(z), SILU)
    largest = largest_bits(values)
    squares = fixed_sum(values, values, 2 * exponent(largest), LOG_COLS, FORM, INTERP)
    scale_of_row = inverse_rms(squares, largest, reciprocal, eps)
    if rstd is not None:
        tl.store(rstd + row * GROUPS + group, scale_of_row, mask=live)
    if gate is not None and not FIRST:
        act = activated(z, sigmoid(z), SILU)  # before the weight is loaded: both would fill the registers
    result = scale(values, scale_of_row, weight, offset, column, column_mask, X_HAT, INTERP)
    if gate is not None and not FIRST:
        result = round_to(result, NORMED, INTERP) * act
    store(y + row_offset(row, inner, y_outer, y_inner, NESTED)[:, None] + column, result, mask, INTERP)


@triton.jit
def _sum_of_squares(
    x,
    residual,
    gate,
    alpha,
    cols,
    e,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    acc = start(e, LOG_COLS, 1, BLOCK, FORM)
    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        values = load_input(x, residual, gate, alpha, column, column < cols, SILU, FIRST, EXACT, INTERP)
        acc = accumulate(acc, values, values, e, LOG_COLS, FORM, INTERP)
    return total(acc, e, LOG_COLS, BLOCK, FORM)


@triton.jit
def forward_in_pieces(
    x,
    residual,
    gate,
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
    gate_outer: tl.int64,
    gate_inner: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    h_outer: tl.int64,
    h_inner: tl.int64,
    reciprocal: tl.float64,
    eps: tl.float64,
    offset: tl.float32,
    alpha: tl.float32,
    GROUPS: tl.constexpr,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    EXACT: tl.constexpr,
    X_HAT: tl.constexpr,
    NORMED: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """A group of one row per program, too wide for registers: read three times, and what comes before it again.

    h is formed again each time and never read: what other threads wrote need not be visible yet. y may be x: all of a
    group has been read twice before the last pass writes any of it, and that pass writes where it reads.
    """
    tl.static_assert(residual is None or gate is None)
    group, row = group_and_block(tl.program_id(0), GROUPS)
    x += row_offset(row, inner, x_outer, x_inner, NESTED) + group * cols
    y += row_offset(row, inner, y_outer, y_inner, NESTED) + group * cols
    if residual is not None:
        residual += row_offset(row, inner, residual_outer, residual_inner, NESTED) + group * cols
        h += row_offset(row, inner, h_outer, h_inner, NESTED) + group * cols
    if gate is not None:
        gate += row_offset(row, inner, gate_outer, gate_inner, NESTED) + group * cols
    if weight is not None:
        weight += group * cols

    bits = tl.zeros([1, BLOCK], tl.int32)
    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = column < cols
        if residual is not None:
            values = load(x + column, mask, INTERP)
            other = load(residual + column, mask, INTERP)
            values = add_residual(values, other, alpha, x.dtype.element_ty, INTERP)
            store(h + column, values, mask, INTERP)
            values = normed_sum(values, h.dtype.element_ty, EXACT, INTERP)
        else:
            values = load_input(x, None, gate, alpha, column, mask, SILU, FIRST, EXACT, INTERP)
        bits = tl.maximum(bits, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(bits, axis=1)

    e = 2 * exponent(largest)
    # fmt: off
    if FORM == SINGLE:
        if tl.min(single_fits(e, LOG_COLS).to(tl.int32), axis=0) == 1:
            squares = _sum_of_squares(
                x, residual, gate, alpha, cols, e, SILU, FIRST, EXACT, BLOCK, LOG_COLS, SINGLE, INTERP
            )
        else:
            squares = _sum_of_squares(
                x, residual, gate, alpha, cols, e, SILU, FIRST, EXACT, BLOCK, LOG_COLS, FLOOR, INTERP
            )
    else:
        squares = _sum_of_squares(
            x, residual, gate, alpha, cols, e, SILU, FIRST, EXACT, BLOCK, LOG_COLS, FORM, INTERP
        )
    # fmt: on
    scale_of_row = inverse_rms(squares, largest, reciprocal, eps)
    if rstd is not None:
        tl.store(rstd + row * GROUPS + group + tl.arange(0, 1), scale_of_row)

    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = column < cols
        values = load_input(x, residual, gate, alpha, column, mask, SILU, FIRST, EXACT, INTERP)
        result = scale(values, scale_of_row, weight, offset, column, mask, X_HAT, INTERP)
        if gate is not None and not FIRST:
            result = round_to(result, NORMED, INTERP) * load_activation(gate, column, mask, SILU, INTERP)
        store(y + column, result, mask, INTERP)
