"""Which form of the sums an architecture takes, and how tiles are cut: tables, and no tuning at run time.

Chosen from instruction counts, registers and the rates in NVIDIA's manuals, without a GPU: nothing here was timed
(docs/gpu.md). No choice changes a bit of any result.
"""

from typing import Any, NamedTuple

from rmsnorm.gpu.availability import OLDEST
from rmsnorm.gpu.kernels import fixed_sum

# Beyond these there is the reference: grids have limits, 65,535 pieces of a row (of 128 columns or more) among them.
MOST_COLS = 65_535 * 128
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


def form(target: Any, cols: int, gate: bool = False) -> int:
    """The form of the sums (fixed_sum.py)."""
    if target.backend != "cuda":
        return int(fixed_sum.FLOOR.value)
    # SINGLE's two parts have 45 bits, and sums of up to 32 terms need more.
    # Beside a gate's float64 operations, some 27 an element, one more is little, and SINGLE takes many registers.
    if not _lacks_double(target) or cols <= 32 or gate:
        return int(fixed_sum.DOUBLE.value)
    return int(fixed_sum.SINGLE.value)


def _lacks_double(target: Any) -> bool:
    return target.backend == "cuda" and target.arch not in _WITH_DOUBLE


def supported(target: Any) -> bool:
    """Whether Triton compiles for it."""
    return bool(target.backend != "cuda" or target.arch >= OLDEST)


# ---------------------------------------------------------------- tiles

# (cols up to, warps of 32 threads). SINGLE keeps twice as many numbers in registers. Beyond the last line rows are read
# in pieces; there the registers of the largest programs would not do, and the compiler would spill (tests/gpu). What is
# said of rows is true of groups.
_FORWARD = ((512, 1), (1024, 1), (2048, 2), (4096, 4), (8192, 8), (16384, 16))
_FORWARD_SINGLE = ((512, 1), (1024, 4), (2048, 4), (4096, 8), (8192, 16))
_BACKWARD = ((512, 1), (1024, 2), (2048, 4), (4096, 8), (8192, 16))
# A gate's sigmoid wants registers. Where float64 is scarce, and code for its division long, the last line is too much.
_GATED_FORWARD = ((512, 1), (1024, 2), (2048, 4), (4096, 8), (8192, 16))
_GATED_BACKWARD = ((512, 2), (1024, 4), (2048, 8), (4096, 16))
_FORWARD_PIECES = Tile(1, 8192, 16)
_PIECES = Tile(1, 4096, 16)
# Rows this short share a program.
_SHORT, _SHORT_ELEMENTS, _SHORT_WARPS = 256, 1024, 4

# With at least so many leaves of dweight, one program takes whole rows of a leaf and makes dx as well: dy and x are
# read once. With fewer, too little of the device would be at work; but of very few rows it is one launch less.
FUSED_LEAVES, FUSED_ROWS = 128, 4
# Of a multiprocessor, and the most of a thread.
_REGISTERS, _REGISTERS_OF_THREAD = 1 << 16, 255
# 256 leaves a program, 8 of them a thread.
_FOLD = Tile(256, 32, 8)


def forward(cols: int, target: Any, gate: bool) -> Tile | None:
    """Whole rows; None where they do not fit registers."""
    if gate:
        return _whole_rows(_GATED_FORWARD[:-1] if _lacks_double(target) else _GATED_FORWARD, cols, target)
    return _whole_rows(_FORWARD_SINGLE if _is_single(cols, target) else _FORWARD, cols, target)


def backward(cols: int, target: Any, gate: bool) -> Tile | None:
    """Whole rows; None where they do not fit registers."""
    return _whole_rows(_GATED_BACKWARD if gate else _BACKWARD, cols, target)


def forward_pieces(target: Any, gate: bool) -> Tile:
    """Pieces of one row, one after another."""
    return _of_threads(_PIECES if gate else _FORWARD_PIECES, target)


def slopes(target: Any) -> Tile:
    """Pieces of one row, one after another."""
    return _of_threads(_PIECES, target)


def columns(itemsize: int, target: Any) -> Tile:
    """Columns of rows that are added up one after another: one warp, 16 bytes a thread."""
    return Tile(1, target.warp_size * 16 // itemsize, 1)


def unroll(with_gradients: bool, gate: bool) -> int:
    """How many rows of some columns are loaded before they are added up; a gate's sigmoid leaves registers for one."""
    return 1 if gate else 2 if with_gradients else 4


def compiler_options(target: Any, warps: int, gate: bool, form: int | None) -> dict[str, int]:
    """All registers, where NVIDIA's compiler would spill a few of them so that more programs fit a multiprocessor."""
    if target.backend != "cuda" or not (gate or form == fixed_sum.SINGLE.value):
        return {}
    return {"maxnreg": min(_REGISTERS_OF_THREAD, _REGISTERS // (32 * warps))}


def fused(rows: int, programs: int) -> bool:
    """Whether dx and dweight are made by one program for each group of each leaf."""
    return programs >= FUSED_LEAVES or rows <= FUSED_ROWS


def fold(target: Any) -> Tile:
    """Leaves of dweight, and columns of them."""
    return _of_threads(_FOLD, target)


def _is_single(cols: int, target: Any) -> bool:
    return bool(form(target, cols) == fixed_sum.SINGLE.value)


def _whole_rows(table: tuple[tuple[int, int], ...], cols: int, target: Any) -> Tile | None:
    block = power_of_two(cols)
    if block <= _SHORT:
        return _of_threads(Tile(_SHORT_ELEMENTS // block, block, _SHORT_WARPS), target)
    for most, warps in table:
        if block <= most:
            return _of_threads(Tile(1, block, warps), target)
    return None


def _of_threads(tile: Tile, target: Any) -> Tile:
    """AMD's warps have 64 threads."""
    return tile._replace(warps=max(1, tile.warps * 32 // target.warp_size))
