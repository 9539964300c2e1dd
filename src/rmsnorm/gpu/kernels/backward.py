"""The backward of rows or of groups of their columns; forward.py says what groups and FIRST are.

    u is what was normalised,  g the gradient of the norm's result, before its gain;  v = g * gain
    du = rstd * (v - x_hat * k)

Tensors that are None are not wanted, or not there.
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
from rmsnorm.gpu.kernels.stages import activated, activation_slope, load_activation, load_input, sigmoid
from rmsnorm.gpu.kernels.values import first_row, group_and_block, load, load_gain, row_offset, store


@triton.jit
def slope(dot, v_largest, u_largest, rstd, reciprocal):
    """k = float32(rstd c / d), in float64; NaN where v or u is not finite."""
    defined = is_finite(v_largest) & is_finite(u_largest)
    dot = tl.where(defined, dot, float("nan"))
    return (rstd.to(tl.float64) * dot * reciprocal).to(tl.float32)


@triton.jit
def backward(
    dy,
    x,
    gate,
    dh,
    dx,
    dgate,
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
    gate_outer: tl.int64,
    gate_inner: tl.int64,
    dh_outer: tl.int64,
    dh_inner: tl.int64,
    dx_outer: tl.int64,
    dx_inner: tl.int64,
    dgate_outer: tl.int64,
    dgate_inner: tl.int64,
    log_leaves: tl.int32,
    reciprocal: tl.float64,
    offset: tl.float32,
    GROUPS: tl.constexpr,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    UNROLL: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """A piece of a group of ROWS rows per program; with `partial`, of a leaf, row by row, and its terms of dweight.

    dweight is summed in float32 in the order of docs/numerics.md: one program goes through a leaf from row to row, each
    column in one accumulator, and `fold` adds the sums of the leaves in pairs.

    The piece is the group, and its sum is taken; or, with LOG_COLS of None, one of several, where `k` is given or
    neither dx nor dgate is wanted. FULL: cols == BLOCK.
    """
    group, block = group_and_block(tl.program_id(0), GROUPS)
    within = tl.arange(0, BLOCK)[None, :]
    if LOG_COLS is None:
        within += tl.program_id(1) * BLOCK
    column = group * cols + within
    column_mask = None if FULL else within < cols
    # Beside a gate registers are few, and the gain is loaded for each row again.
    if weight is not None and (ROWS > 1 or gate is None):
        gain = load_gain(weight, offset, column, column_mask, INTERP)
    if partial is None:
        begin = block * ROWS
        steps = 1
    else:
        tl.static_assert(ROWS == 1)
        begin = first_row(block, rows, log_leaves)
        steps = first_row(block + 1, rows, log_leaves) - begin
        acc = tl.zeros([1, BLOCK], tl.float32)
    for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
        row = begin + step + tl.arange(0, ROWS)
        live = None
        mask = column_mask
        if ROWS > 1:
            live = row < rows
            mask = live[:, None] if FULL else live[:, None] & column_mask
        g = load(dy + row_offset(row, inner, dy_outer, dy_inner, NESTED)[:, None] + column, mask, INTERP)
        values = load(x + row_offset(row, inner, x_outer, x_inner, NESTED)[:, None] + column, mask, INTERP)
        rstd_of_row = load(rstd + row * GROUPS + group, live, INTERP)
        if weight is not None and ROWS == 1 and gate is not None:
            gain = load_gain(weight, offset, column, column_mask, INTERP)
        u = values
        if gate is not None:
            gate_at = row_offset(row, inner, gate_outer, gate_inner, NESTED)[:, None] + column
            z = load(gate + gate_at, mask, INTERP)
            s = sigmoid(z)
            act = activated(z, s, SILU)
            if FIRST:
                u = values * act
        x_hat = u * rstd_of_row[:, None]
        if gate is not None and not FIRST:
            if dgate is not None:
                normed = x_hat
                if weight is not None:
                    normed = x_hat * gain
                of_gate = (g * normed) * activation_slope(z, s, SILU)
            g = g * act
        if partial is not None:
            acc += g * x_hat
        if dx is not None or (FIRST and dgate is not None):
            v = g
            if weight is not None:
                v = g * gain
            if k is not None:
                k_of_row = load(k + row * GROUPS + group, live, INTERP)
            else:
                v_largest = largest_bits(v)
                u_largest = largest_bits(u)
                dot = fixed_sum(v, u, exponent(v_largest) + exponent(u_largest), LOG_COLS, FORM, INTERP)
                k_of_row = slope(dot, v_largest, u_largest, rstd_of_row, reciprocal)
            du = rstd_of_row[:, None] * (v - x_hat * k_of_row[:, None])
            of_x = du
            if gate is not None and FIRST:
                of_x = du * act
                if dgate is not None:
                    of_gate = (du * values) * activation_slope(z, s, SILU)
            if dx is not None:
                if dh is not None:
                    dh_at = row_offset(row, inner, dh_outer, dh_inner, NESTED)[:, None] + column
                    of_x += load(dh + dh_at, mask, INTERP)
                store(dx + row_offset(row, inner, dx_outer, dx_inner, NESTED)[:, None] + column, of_x, mask, INTERP)
        if dgate is not None:
            dgate_at = row_offset(row, inner, dgate_outer, dgate_inner, NESTED)[:, None] + column
            store(dgate + dgate_at, of_gate, mask, INTERP)
    if partial is not None:
        store(partial + block * (GROUPS * cols) + column, acc, column_mask, INTERP)


# ---------------------------------------------------------------- k of groups too wide for registers


@triton.jit
def _load_gradient(
    dy,
    gate,
    weight,
    offset,
    column,
    mask,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    INTERP: tl.constexpr,
):
    """The v of the formulas above."""
    v = load(dy + column, mask, INTERP)
    if gate is not None and not FIRST:
        v = v * load_activation(gate, column, mask, SILU, INTERP)
    if weight is not None:
        v = v * load_gain(weight, offset, column, mask, INTERP)
    return v


@triton.jit
def _dot(
    dy,
    x,
    gate,
    weight,
    offset,
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
        mask = column < cols
        v = _load_gradient(dy, gate, weight, offset, column, mask, SILU, FIRST, INTERP)
        u = load_input(x, None, gate, None, column, mask, SILU, FIRST, False, INTERP)
        acc = accumulate(acc, v, u, e, LOG_COLS, FORM, INTERP)
    return total(acc, e, LOG_COLS, BLOCK, FORM)


@triton.jit
def slopes(
    dy,
    x,
    gate,
    rstd,
    weight,
    k,
    cols: tl.int32,
    inner: tl.int64,
    dy_outer: tl.int64,
    dy_inner: tl.int64,
    x_outer: tl.int64,
    x_inner: tl.int64,
    gate_outer: tl.int64,
    gate_inner: tl.int64,
    reciprocal: tl.float64,
    offset: tl.float32,
    GROUPS: tl.constexpr,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_COLS: tl.constexpr,
    FORM: tl.constexpr,
    INTERP: tl.constexpr,
):
    """k of a group of one row per program, too wide for registers: read twice."""
    group, row = group_and_block(tl.program_id(0), GROUPS)
    dy += row_offset(row, inner, dy_outer, dy_inner, NESTED) + group * cols
    x += row_offset(row, inner, x_outer, x_inner, NESTED) + group * cols
    if gate is not None:
        gate += row_offset(row, inner, gate_outer, gate_inner, NESTED) + group * cols
    if weight is not None:
        weight += group * cols
    v_bits = tl.zeros([1, BLOCK], tl.int32)
    u_bits = v_bits
    for begin in range(0, cols, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = column < cols
        v = _load_gradient(dy, gate, weight, offset, column, mask, SILU, FIRST, INTERP)
        u = load_input(x, None, gate, None, column, mask, SILU, FIRST, False, INTERP)
        v_bits = tl.maximum(v_bits, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        u_bits = tl.maximum(u_bits, u.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    v_largest = tl.max(v_bits, axis=1)
    u_largest = tl.max(u_bits, axis=1)

    e = exponent(v_largest) + exponent(u_largest)
    if FORM == SINGLE:
        if tl.min(single_fits(e, LOG_COLS).to(tl.int32), axis=0) == 1:
            dot = _dot(dy, x, gate, weight, offset, cols, e, SILU, FIRST, BLOCK, LOG_COLS, SINGLE, INTERP)
        else:
            dot = _dot(dy, x, gate, weight, offset, cols, e, SILU, FIRST, BLOCK, LOG_COLS, FLOOR, INTERP)
    else:
        dot = _dot(dy, x, gate, weight, offset, cols, e, SILU, FIRST, BLOCK, LOG_COLS, FORM, INTERP)
    at = row * GROUPS + group + tl.arange(0, 1)
    tl.store(k + at, slope(dot, v_largest, u_largest, tl.load(rstd + at), reciprocal))
