"""dweight from the sums of its leaves: a binary tree, as docs/numerics.md has it."""

import triton
import triton.language as tl

from rmsnorm.gpu.kernels.values import load, store


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
