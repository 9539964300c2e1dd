"""Calls of the operators for the interpreter, in groups. What they must give is what the CPU's kernels give.

The interpreter takes milliseconds for each program of a grid and nothing for the elements in it. So most calls are made
in tall tiles, where all rows are one program; the tiles that GPUs get are a group of their own.
"""

from itertools import product

import torch

from tests.kernels import kernel_cases
from tests.kernels.kernel_calls import plain_weight
from tests.support.rows import DTYPES, all_rows, finite_rows, from_bits, generator, random_rows, special_weight

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
# Every power of two and its neighbours up to 64, what models have, primes, the last one-tile backward and the next.
WIDTHS = (
    *(
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        15,
        16,
        17,
        31,
        32,
        33,
        48,
        63,
        64,
        65,
        80,
        96,
        100,
        127,
        128,
        129,
        255,
        256,
        257,
        500,
        576,
    ),
    *(768, 1000, 1024, 1536, 2049, 2880, 4093, 4096, 5120, 8192, 8193),
)
assert len(WIDTHS) == 40
ROWS = (0, 1, 63, 64, 65, 255, 256, 257, 600)
WEIGHTS = (None, *DTYPES)


def normalize(x, weight, eps=1e-6, offset=0.0, rounding=0):
    return "forward_train", (x, weight, eps, offset, rounding)


def add(x, residual, weight, eps=1e-6, offset=0.0, rounding=0):
    return "add_forward", (x, residual, weight, eps, offset, rounding)


def backward(dy, x, weight, offset=0.0, dh=None, rebuilt=None, need_dx=True, need_dweight=True, eps=1e-6):
    rstd = torch.ops.rmsnorm.forward_train(x, weight, eps, offset, 0)[1]
    if rebuilt is not None:
        x = torch.ops.rmsnorm.forward(x, weight, 1e-6, offset, 0)
    return "backward", (dy, x, rstd, weight, offset, dh, rebuilt, need_dx, need_dweight)


# ---------------------------------------------------------------- in tall tiles


def widths():
    for index, (width, dtype) in enumerate(product(WIDTHS, DTYPES)):
        x, weight = all_rows(width, dtype, seed=width), plain_weight(width, dtype if index % 4 else SINGLE)
        yield normalize(x, weight)
        residual = x.roll(1 + index % 5, 0)
        residual[0] = -x[0]
        yield add(x, residual, weight, offset=float(index % 2))
        x = finite_rows(width, dtype, seed=width + 1)
        dy = random_rows(len(x), width, dtype, seed=width)
        yield backward(dy, x, weight, offset=float(index % 2), dh=dy.roll(1, 0) if index % 3 else None)


def any_values():
    """Rows that are not finite, and weights that are not; dy of every kind."""
    for width, dtype in product((7, 33, 130, 1000), DTYPES):
        x, dy = all_rows(width, dtype, seed=width + 5), all_rows(width, dtype, seed=width + 6)
        for shift, weight in ((0, None), (5, plain_weight(width, SINGLE)), (11, special_weight(width, BRAIN))):
            yield normalize(x, weight, rounding=shift % 3)
            yield backward(dy.roll(shift, 0), x, weight, dh=x.roll(-shift, 0) if shift % 2 else None)
            finite = dy.roll(shift, 0).isfinite().all(-1) & x.isfinite().all(-1)
            yield backward(dy.roll(shift, 0)[finite], x[finite], weight)


def where_float32_ends():
    """Rows of the smallest subnormals, products that vanish, a k that is zero and has a sign to keep."""
    for width, dtype in product((3, 33, 130), DTYPES):
        g = generator(width)
        sign = torch.randint(2, (6, width), generator=g) << (8 * dtype.itemsize - 1)
        x = from_bits(torch.randint(8, (6, width), generator=g) | sign, dtype)
        dy = random_rows(6, width, dtype, seed=width)
        yield normalize(x, None, eps=0.0)
        yield backward(dy, x, None, eps=0.0)
        yield backward(x, dy, None, eps=0.0)
        dy[:, -1] = 0.0  # there dx is x_hat k, which no rstd of this x would show
        yield "backward", (dy, x, torch.full((6, 1), 1e30), None, 0.0, None, None, True, True)
        for exponent in (-60, -70, -80):
            x, dy = (random_rows(5, width, SINGLE, seed=width + i) * 2.0**exponent for i in (7, 8))
            yield backward(dy, x.to(dtype) if dtype != HALF else x, None, eps=0.0)
        x, dy = torch.full((1, width), 1000.0, dtype=dtype), torch.full((1, width), -0.0)
        yield backward(dy, x, None)
        dy[0, 0] = 2.0**-149
        yield backward(dy, x, None)


def roundings():
    for width, x_dtype, w_dtype, rounding in product((7, 130), DTYPES, WEIGHTS, range(3)):
        x = all_rows(width, x_dtype, seed=width)
        yield normalize(x, plain_weight(width, w_dtype), rounding=rounding)
        yield normalize(x, plain_weight(width, w_dtype), offset=0.1, rounding=rounding)
        if w_dtype is not None:  # what is zero in float32 alone is added to the weight's -0
            yield normalize(x, special_weight(width, w_dtype), offset=1e-300 * (-1) ** rounding, rounding=rounding)
    for width, dtype, eps in product((7, 33, 130), DTYPES, (0.0, 1e-300, 1e-12, 1e-5, 3.0, 1e30, 1e69, 1e80, 1e300)):
        yield normalize(all_rows(width, dtype, seed=width + 2), plain_weight(width, dtype), eps=eps)
    for width, x_dtype, dy_dtype, w_dtype in product((5, 130), DTYPES, DTYPES, WEIGHTS):
        x, dy = finite_rows(width, x_dtype, seed=width), random_rows(16, width, dy_dtype, seed=width)
        yield backward(dy, x, plain_weight(width, w_dtype))


def row_counts():
    for index, (width, rows) in enumerate((*product((1, 33, 130), ROWS), (5, 2049))):
        x, dy = random_rows(rows, width, DTYPES[index % 3], 1), random_rows(rows, width, DTYPES[index // 3 % 3], 2)
        yield normalize(x, plain_weight(width, SINGLE))
        yield backward(dy, x, plain_weight(width, WEIGHTS[index % 4]))
    yield normalize(torch.empty(3, 0, 5, 8, dtype=BRAIN), plain_weight(8, BRAIN))


def layouts():
    """Every way in which rows can lie in memory; some of the calls for each."""
    for index, (dtype, view) in enumerate(product(DTYPES, kernel_cases.STRIDES.values())):
        x, other, third = (view(seed, dtype) for seed in (1, 2, 3))
        weight = plain_weight(2 * x.shape[-1], dtype)[::2]
        calls = (
            lambda x=x, weight=weight: normalize(x, weight),
            lambda x=x, other=other, weight=weight: add(x, other, weight),
            lambda x=x, other=other, weight=weight: add(x.contiguous(), other, weight),
            lambda x=x, other=other, weight=weight: backward(other, x.contiguous(), weight),
            lambda x=x, other=other, third=third, weight=weight: backward(other, x, weight, dh=third),
            lambda x=x, other=other, weight=weight: backward(other, x, weight, rebuilt=x.dtype),
        )
        yield calls[index % 6]()
        yield calls[(index + 3) % 6]()


def rebuilding():
    for width, dtype in product((1, 33, 130, 1000), DTYPES):
        x = finite_rows(width, dtype, seed=width + 7)
        weight = plain_weight(width, SINGLE if width == 33 else dtype)
        yield backward(random_rows(len(x), width, dtype, 1), x, weight, float(width % 2), rebuilt=dtype)


def to_the_last_quantum():
    """tests/support/sharp_cases.py: rows of which one quantum more or less is seen."""
    for index, case in enumerate(kernel_cases.sharp_cases.sums_to_the_last_quantum()):
        if case.arguments[0].shape[-1] <= 4096 and index % 2:
            yield "forward_train", case.arguments
    for case in kernel_cases.sharp_cases.products_to_the_last_quantum():
        if case.arguments[0].shape[-1] <= 4096:
            yield "backward", (*case.arguments, None, True, True)


def slopes_at_ties():
    for case in kernel_cases.sharp_cases.slopes_between_two_floats():
        yield "backward", (*case.arguments, None, True, False)


# ---------------------------------------------------------------- in the tiles that GPUs get


def shipped_tiles():
    for index, width in enumerate((1, 3, 64, 128, 130, 576, 1000, 1024, 4096, 8192)):
        dtype = DTYPES[index % 3]
        rows = 3 if width > 500 else 70
        x, dy, dh = (random_rows(rows, width, dtype, seed) for seed in (1, 2, 3))
        weight = plain_weight(width, dtype)
        yield normalize(x, weight)
        yield add(x, dy, weight)
        yield backward(dy, x, weight, dh=dh)
        yield backward(dy, x, weight, need_dweight=False)
        yield backward(dy, x, weight, need_dx=False)


def more_than_a_tile():
    for index, (width, rows) in enumerate(((8193, 3), (12345, 2), (32769, 2), (65536, 1), (100_003, 1))):
        for dtype in (DTYPES[index % 3], DTYPES[(index + 1) % 3]):
            x, dy = random_rows(rows, width, dtype, 1, scale=1e-3), random_rows(rows, width, dtype, 2)
            x[:, -1] = 1000.0  # in the last piece
            weight = plain_weight(width, dtype)
            yield normalize(x, weight, offset=1.0)
            yield add(x, dy, weight)
            yield backward(dy, x, weight, dh=dy if index % 2 else None)
    x = torch.stack([torch.randn(32_769, generator=generator(1)) * scale for scale in (1e-30, 1e30, torch.inf, 0.0)])
    yield normalize(x, None)
    yield backward(x.roll(1, 0)[:, :8200], x[:, :8200], None)
    yield normalize(random_rows(1, 1 << 20, BRAIN, 3), plain_weight(1 << 20, BRAIN))


TALL = {
    f.__name__: f
    for f in (
        *(widths, any_values, where_float32_ends, roundings, row_counts, layouts, rebuilding),
        *(to_the_last_quantum, slopes_at_ties),
    )
}
SHIPPED = {f.__name__: f for f in (shipped_tiles, more_than_a_tile)}
# Functions of interpreter_checks.py, which takes Triton to import.
CHECKS = ("out", "far_rows", "permutations", "beyond_reach", "refusals", "repeated", "public_functions")
