"""x rebuilt from y."""

import triton
import triton.language as tl

from rmsnorm.gpu.kernels.values import load, load_gain, row_offset, store


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
