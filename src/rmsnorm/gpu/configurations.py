"""Which form of the sums an architecture takes, and how tiles are cut: tables, and no tuning at run time.

Chosen from instruction counts, registers and the rates in NVIDIA's manuals, without a GPU: nothing here was timed
(docs/gpu.md). No choice changes a bit of any result.
"""

from typing import Any, NamedTuple

from rmsnorm.gpu.kernels import fixed_sum

# Triton's oldest NVIDIA architecture.
_OLDEST = 70
# Beyond these there is the reference: grids have limits, and columns are counted in 32 bits.
MOST_COLS = 1 << 23
MOST_ROWS = (1 << 31) - 1

# NVIDIA's architectures with a float64 unit for every second float32 unit. The others have one for 32 or 64.
_WITH_DOUBLE = (70, 80, 90, 100)


class Tile(NamedTuple):
    """`rows` rows by `block` columns per program, on `warps` warps."""

    rows: int
    block: int
    warps: int


def power_of_two(n: int) -> int:
    """The smallest not below n."""
    return 1 << (n - 1).bit_length()


def log_cols(cols: int) -> int:
    """L of the contract."""
    return (cols - 1).bit_length()


def form(target: Any, cols: int) -> int:
    """The form of the sums (fixed_sum.py)."""
    if target.backend != "cuda":
        return int(fixed_sum.FLOOR.value)
    # SINGLE's two parts have 45 bits, and sums of up to 32 terms need more.
    if target.arch in _WITH_DOUBLE or cols <= 32:
        return int(fixed_sum.DOUBLE.value)
    return int(fixed_sum.SINGLE.value)


def supported(target: Any) -> bool:
    """Whether Triton compiles for it."""
    return target.backend != "cuda" or target.arch >= _OLDEST


# ---------------------------------------------------------------- tiles: (columns up to, warps)

_FORWARD = ((1024, 1), (2048, 2), (4096, 4), (8192, 8), (16384, 16), (32768, 32))
_BACKWARD = ((512, 1), (1024, 2), (2048, 4), (4096, 8), (8192, 16))
FORWARD_COLS, BACKWARD_COLS = _FORWARD[-1][0], _BACKWARD[-1][0]
FORWARD_PIECES = Tile(1, 8192, 16)
SLOPES = Tile(1, 4096, 16)
# Elements of short rows that make a tile.
_ELEMENTS = 1024

# With at least so many blocks of dweight, one program takes whole rows of a block and makes dx as well: dy and x are
# read once. With fewer, too little of the device would be at work.
FUSED_BLOCKS = 64
COLUMNS_UNROLL, FOLD_UNROLL = 4, 8


def forward(cols: int) -> Tile | None:
    """Whole rows; None where they do not fit registers."""
    return _whole_rows(_FORWARD, cols)


def backward(cols: int) -> Tile | None:
    """Whole rows; None where they do not fit registers."""
    return _whole_rows(_BACKWARD, cols)


def _whole_rows(table: tuple[tuple[int, int], ...], cols: int) -> Tile | None:
    block = power_of_two(cols)
    for most, warps in table:
        if block <= most:
            rows = max(1, _ELEMENTS // block)
            return Tile(rows, block, max(warps, 4) if rows > 1 else warps)
    return None


def columns(itemsize: int) -> Tile:
    """Columns of rows that are added up one after another: one warp, 16 bytes a thread."""
    return Tile(1, 32 * 16 // itemsize, 1)
