"""The forward of groups of rows, with a gate or without.

A program has one group of its rows, the same of each: its columns of the weight are the same too. `rows` are whole
rows, `cols` the columns of a group, and rstd has a number for each group of each row. FIRST: the gate multiplies x;
otherwise it multiplies the result, rounded to NORMED.
"""

import triton
import triton.language as tl

from rmsnorm.gpu.kernels.fixed_sum import (
    FLOOR,
    SINGLE,
    accumulate,
    exponent,
    fixed_sum,
    largest_bits,
    single_fits,
    start,
    total,
)
from rmsnorm.gpu.kernels.forward import inverse_rms, scale
from rmsnorm.gpu.kernels.gate import activated, sigmoid
from rmsnorm.gpu.kernels.values import load, round_to, row_offset, store


@triton.jit
def load_act(gate, pointers, mask, SILU: tl.constexpr, INTERP: tl.constexpr):
    z = load(gate + pointers, mask, INTERP)
    return activated(z, sigmoid(z), SILU)


@triton.jit
def gated_forward(
    x,
    gate,
    weight,
    y,
    rstd,
    rows: tl.int64,
    groups: tl.int32,
    cols: tl.int32,
    inner: tl.int64,
    x_outer: tl.int64,
    x_inner: tl.int64,
    gate_outer: tl.int64,
    gate_inner: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    reciprocal: tl.float64,
    eps: tl.float64,
    offset: tl.float32,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
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
    """A group of ROWS rows per program, in one tile. FULL: cols == BLOCK."""
    group = tl.program_id(0) % groups
    row = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
    if gate is not None:
        z = load(gate + row_offset(row, inner, gate_outer, gate_inner, NESTED)[:, None] + column, mask, INTERP)
        if FIRST:
            values = values * activated(z, sigmoid(z), SILU)
    largest = largest_bits(values)
    squares = fixed_sum(values, values, 2 * exponent(largest), LOG_COLS, FORM, INTERP)
    scale_of_row = inverse_rms(squares, largest, reciprocal, eps)
    if rstd is not None:
        tl.store(rstd + row * groups + group, scale_of_row, mask=live)
    if gate is not None and not FIRST:
        act = activated(z, sigmoid(z), SILU)  # before the weight is loaded: both would fill the registers
    result = scale(values, scale_of_row, weight, offset, column, column_mask, X_HAT, INTERP)
    if gate is not None and not FIRST:
        result = round_to(result, NORMED, INTERP) * act
    store(y + row_offset(row, inner, y_outer, y_inner, NESTED)[:, None] + column, result, mask, INTERP)


@triton.jit
def load_gated(x, gate, column, mask, SILU: tl.constexpr, FIRST: tl.constexpr, INTERP: tl.constexpr):
    """What is normalised: x, or its product with the gate."""
    values = load(x + column, mask, INTERP)
    if gate is not None and FIRST:
        values = values * load_act(gate, column, mask, SILU, INTERP)
    return values


@triton.jit
def _sum_of_squares(
    x,
    gate,
    cols,
    e,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    acc = start(e, LOG_COLS, 1, BLOCK, FORM)
    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        values = load_gated(x, gate, column, column < cols, SILU, FIRST, INTERP)
        acc = accumulate(acc, values, values, e, LOG_COLS, FORM, INTERP)
    return total(acc, e, LOG_COLS, BLOCK, FORM)


@triton.jit
def gated_forward_in_pieces(
    x,
    gate,
    weight,
    y,
    rstd,
    groups: tl.int32,
    cols: tl.int32,
    inner: tl.int64,
    x_outer: tl.int64,
    x_inner: tl.int64,
    gate_outer: tl.int64,
    gate_inner: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    reciprocal: tl.float64,
    eps: tl.float64,
    offset: tl.float32,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    X_HAT: tl.constexpr,
    NORMED: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """A group of one row per program, too wide for registers: read three times, and its gate with it."""
    group = tl.program_id(0) % groups
    row = (tl.program_id(0) // groups).to(tl.int64)
    x += row_offset(row, inner, x_outer, x_inner, NESTED) + group * cols
    y += row_offset(row, inner, y_outer, y_inner, NESTED) + group * cols
    if gate is not None:
        gate += row_offset(row, inner, gate_outer, gate_inner, NESTED) + group * cols
    if weight is not None:
        weight += group * cols

    bits = tl.zeros([1, BLOCK], tl.int32)
    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        values = load_gated(x, gate, column, column < cols, SILU, FIRST, INTERP)
        bits = tl.maximum(bits, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(bits, axis=1)

    e = 2 * exponent(largest)
    if FORM == SINGLE:
        if tl.min(single_fits(e, LOG_COLS).to(tl.int32), axis=0) == 1:
            squares = _sum_of_squares(x, gate, cols, e, SILU, FIRST, BLOCK, LOG_COLS, SINGLE, INTERP)
        else:
            squares = _sum_of_squares(x, gate, cols, e, SILU, FIRST, BLOCK, LOG_COLS, FLOOR, INTERP)
    else:
        squares = _sum_of_squares(x, gate, cols, e, SILU, FIRST, BLOCK, LOG_COLS, FORM, INTERP)
    scale_of_row = inverse_rms(squares, largest, reciprocal, eps)
    if rstd is not None:
        tl.store(rstd + row * groups + group + tl.arange(0, 1), scale_of_row)

    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = column < cols
        values = load_gated(x, gate, column, mask, SILU, FIRST, INTERP)
        result = scale(values, scale_of_row, weight, offset, column, mask, X_HAT, INTERP)
        if gate is not None and not FIRST:
            result = round_to(result, NORMED, INTERP) * load_act(gate, column, mask, SILU, INTERP)
        store(y + column, result, mask, INTERP)
