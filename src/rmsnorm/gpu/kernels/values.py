"""Elements and rows of a tile: loading, storing, rounding, the gain, where a row lies.

A trap of Triton's: after `if CONSTANT: return a` the rest of a function is compiled too. So there is one return each.
"""

import triton
import triton.language as tl


@triton.jit
def widen(values, INTERP: tl.constexpr):
    """To float32, exactly."""
    if INTERP and values.dtype == tl.bfloat16:
        # The interpreter takes subnormal bfloat16 for zeros.
        wide = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def narrow(values, DTYPE: tl.constexpr, INTERP: tl.constexpr):
    """From float32, to nearest, ties to even."""
    if INTERP and DTYPE == tl.bfloat16:
        # The interpreter truncates. 64 bits, because it checks 32-bit sums for overflow.
        bits = values.to(tl.uint32, bitcast=True).to(tl.int64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        narrowed = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrowed = values.to(DTYPE)
    return narrowed


@triton.jit
def round_to(values, DTYPE: tl.constexpr, INTERP: tl.constexpr):
    """float32 values rounded to DTYPE and widened again."""
    rounded = values
    if DTYPE != tl.float32:
        rounded = widen(narrow(values, DTYPE, INTERP), INTERP)
    return rounded


@triton.jit
def load(pointers, mask, INTERP: tl.constexpr):
    """float32 values, 0 where masked out; a mask of None is everything."""
    if mask is None:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=mask, other=0.0)
    return widen(values, INTERP)


@triton.jit
def store(pointers, values, mask, INTERP: tl.constexpr):
    """float32 values, rounded to what the pointers point to."""
    tl.store(pointers, narrow(values, pointers.dtype.element_ty, INTERP), mask=mask)


@triton.jit
def load_gain(weight, offset, columns, mask, INTERP: tl.constexpr):
    """float32(weight + offset) of some columns; an offset of None is zero, which must not be added to -0."""
    gain = load(weight + columns, mask, INTERP)
    if offset is not None:
        gain += offset
    return gain


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride, NESTED: tl.constexpr):
    """Where rows begin, in elements, as int64: rows lie a stride apart, or in groups of `inner` that do."""
    if NESTED:
        offset = (row // inner) * outer_stride + (row % inner) * inner_stride
    else:
        offset = row * inner_stride
    return offset


@triton.jit
def group_and_block(program, GROUPS: tl.constexpr):
    """Which group of which rows a program has; the groups of a row are neighbours."""
    if GROUPS == 1:
        group = 0
        block = program
    else:
        group = program % GROUPS
        block = program // GROUPS
    return group, block.to(tl.int64)


@triton.jit
def first_row(leaf, rows, log_leaves):
    """Where a leaf of dweight begins, for int64 `leaf` and `rows`; the one after the last begins at the end."""
    return leaf * rows >> log_leaves
