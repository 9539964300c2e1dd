"""Calls of the operators for the interpreter, in groups; every form of forms.py walks through them.

The interpreter takes milliseconds for each program of a grid and nothing for the elements in it. So most calls are made
in tall tiles, where all rows are one program; the tiles that GPUs get are a group of their own.
"""

from itertools import product

import torch

from tests.gpu.forms import ADD, EXACT, FORMS, GATES, PLAIN, SCALED, backward, dy_dtype, normalize, rebuilding
from tests.kernels import gated_cases, kernel_cases
from tests.kernels.gated_cases import gate_rows
from tests.kernels.kernel_calls import plain_weight
from tests.support import layouts as memory
from tests.support.rows import DTYPES, all_rows, finite_rows, from_bits, generator, random_rows, special_weight

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
# Every power of two and its neighbours up to 64, what models have, primes, the last one-tile backward and the next.
# fmt: off
WIDTHS = (
    1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129, 255, 256, 257, 500, 576,
    768, 1000, 1024, 1536, 2049, 2880, 4093, 4096, 5120, 8192, 8193,
)
# fmt: on
assert len(WIDTHS) == 40
ROWS = (0, 1, 63, 64, 65, 255, 256, 257, 600)
WEIGHTS = (None, *DTYPES)


def second_rows(form, x, number, kinds=None):
    """The residual or the gate that goes with x, of x's dtype or of another."""
    # The judge of a gate of another dtype knows no rounding before the end, and is slow: every third.
    dtype = DTYPES[(DTYPES.index(x.dtype) + number % 3) % 3] if form.residual or number % 3 == 1 else x.dtype
    if form.gated:
        return gate_rows(len(x), x.shape[-1], dtype, seed=number, kinds=kinds)
    if form.residual:
        second = x.roll(1 + number % 5, 0).to(dtype)
        second[:1] = -x[:1]
        return second if form != ADD else second.to(x.dtype)
    return None


def rounding_of(form, x, second, number):
    return 0 if form.gated and second.dtype != x.dtype else number // 2 % 3


def group_size(width, number):
    """The row itself, or a half, third, ... of it; the interpreter takes its time for each group."""
    return width // max(n for n in range(1, 2 + number % 4) if width % n == 0)


# ---------------------------------------------------------------- in tall tiles


def rows_of_every_width():
    for number, (width, dtype) in enumerate(product(WIDTHS, DTYPES)):
        x, weight = all_rows(width, dtype, seed=width), plain_weight(width, dtype if number % 4 else SINGLE)
        yield normalize(PLAIN, x, None, weight)
        yield normalize(ADD, x, second_rows(ADD, x, number), weight, offset=float(number % 2))
        x = finite_rows(width, dtype, seed=width + 1)
        dy = random_rows(len(x), width, dtype, seed=width)
        dh = dy.roll(1, 0) if number % 3 else None
        yield backward(PLAIN, dy, x, None, weight, offset=float(number % 2), dh=dh)


def widths():
    """Forms in turn, which meet the dtypes in every order, with groups and without."""
    for number, (width, dtype) in enumerate(product(WIDTHS, DTYPES)):
        form = FORMS[(number + number // 15) % len(FORMS)]
        size = group_size(width, number // 3) if number % 5 else 0
        weight, offset = plain_weight(width, WEIGHTS[number % 4]), float(number % 2)
        x = all_rows(width, dtype, seed=width)
        second = second_rows(form, x, number)
        yield normalize(form, x, second, weight, size, offset=offset, rounding=rounding_of(form, x, second, number))
        x = finite_rows(width, dtype, seed=width + 1)
        second = second_rows(form, x, number, kinds=1)
        dy = random_rows(len(x), width, dy_dtype(form, dtype, DTYPES[number % 3]), seed=width)
        dh = dy.roll(1, 0).to(dtype) if number % 2 else None
        yield backward(form, dy, x, second, weight, size, offset, dh=dh)


def any_values():
    """Rows that are not finite, and weights that are not; dy of every kind."""
    for width, dtype in product((7, 33, 130, 1000), DTYPES):
        x, dy = all_rows(width, dtype, seed=width + 5), all_rows(width, dtype, seed=width + 6)
        for shift, weight in ((0, None), (5, plain_weight(width, SINGLE)), (11, special_weight(width, BRAIN))):
            yield normalize(PLAIN, x, None, weight, rounding=shift % 3)
            yield backward(PLAIN, dy.roll(shift, 0), x, None, weight, dh=x.roll(-shift, 0) if shift % 2 else None)
            finite = dy.roll(shift, 0).isfinite().all(-1) & x.isfinite().all(-1)
            yield backward(PLAIN, dy.roll(shift, 0)[finite], x[finite], None, weight)


def values():
    """The same around the norm: rows, residuals, gates, weights and dy of every kind."""
    for number, (width, dtype, form) in enumerate(product((6, 33, 130), DTYPES, FORMS)):
        x = all_rows(width, dtype, seed=number)
        second = second_rows(form, x, number)
        dy = all_rows(width, dy_dtype(form, dtype, DTYPES[number % 3]), seed=number + 1).roll(number, 0)
        weight, size = special_weight(width, DTYPES[number % 3], seed=number), group_size(width, number)
        eps = (1e-6, 0.0, 1e-300, 3.0, 1e30)[number % 5]
        rounding = rounding_of(form, x, second, number)
        yield normalize(form, x, second, weight, size, eps, rounding=rounding)
        yield backward(form, dy, x, second, weight if number % 2 else None, size)
        # Where all is finite every row counts in dweight.
        second = second_rows(form, x, number, kinds=5)
        finite = dy.isfinite().all(-1) & x.isfinite().all(-1)
        x, dy, second = (None if t is None else t[finite] for t in (x, dy, second))
        yield backward(form, dy, x, second, plain_weight(width, SINGLE), size, eps=eps)


def where_float32_ends():
    """Rows of the smallest subnormals, products that vanish, a k that is zero and has a sign to keep."""
    for width, dtype in product((3, 33, 130), DTYPES):
        g = generator(width)
        sign = torch.randint(2, (6, width), generator=g) << (8 * dtype.itemsize - 1)
        x = from_bits(torch.randint(8, (6, width), generator=g) | sign, dtype)
        dy = random_rows(6, width, dtype, seed=width)
        yield normalize(PLAIN, x, None, None, eps=0.0)
        yield normalize(SCALED, x, x.roll(1, 0).float(), None, eps=0.0)
        yield backward(PLAIN, dy, x, None, None, eps=0.0)
        yield backward(PLAIN, x, dy, None, None, eps=0.0)
        dy[:, -1] = 0.0  # there dx is x_hat k, which no rstd of this x would show
        yield "backward", (dy, x, torch.full((6, 1), 1e30), None, 0.0, None, None, True, True)
        for exponent in (-60, -70, -80):
            x, dy = (random_rows(5, width, SINGLE, seed=width + i) * 2.0**exponent for i in (7, 8))
            yield backward(PLAIN, dy, x.to(dtype) if dtype != HALF else x, None, None, eps=0.0)
        x, dy = torch.full((1, width), 1000.0, dtype=dtype), torch.full((1, width), -0.0)
        yield backward(PLAIN, dy, x, None, None)
        dy[0, 0] = 2.0**-149
        yield backward(PLAIN, dy, x, None, None)


def roundings():
    for number, (x_dtype, w_dtype, rounding) in enumerate(product(DTYPES, WEIGHTS, range(3))):
        for width, form in product((12, 130), (PLAIN, *(FORMS[(number + i) % len(FORMS)] for i in range(3)))):
            x = all_rows(width, x_dtype, seed=number)
            second = second_rows(form, x, number if form.residual else 0)
            size, offset = (4 if width == 12 else 0), (0.0, 0.1, 1.0)[(number + width) % 3]
            yield normalize(form, x, second, plain_weight(width, w_dtype), size, offset=offset, rounding=rounding)
        if w_dtype is not None:  # what is zero in float32 alone is added to the weight's -0
            weight = special_weight(130, w_dtype)
            yield normalize(PLAIN, x, None, weight, offset=1e-300 * (-1) ** rounding, rounding=rounding)
    for width, dtype, eps in product((7, 33, 130), DTYPES, (0.0, 1e-300, 1e-12, 1e-5, 3.0, 1e30, 1e69, 1e80, 1e300)):
        yield normalize(PLAIN, all_rows(width, dtype, seed=width + 2), None, plain_weight(width, dtype), eps=eps)
    for width, x_dtype, other, w_dtype in product((5, 130), DTYPES, DTYPES, WEIGHTS):
        x, dy = finite_rows(width, x_dtype, seed=width), random_rows(16, width, other, seed=width)
        yield backward(PLAIN, dy, x, None, plain_weight(width, w_dtype))


def row_counts():
    """Leaves of dweight of every length, with every choice of gradients."""
    for number, (width, rows) in enumerate((*product((1, 33, 130), ROWS), (5, 2049))):
        x, dy = random_rows(rows, width, DTYPES[number % 3], 1), random_rows(rows, width, DTYPES[number // 3 % 3], 2)
        yield normalize(PLAIN, x, None, plain_weight(width, SINGLE))
        yield backward(PLAIN, dy, x, None, plain_weight(width, WEIGHTS[number % 4]))
    yield normalize(PLAIN, torch.empty(3, 0, 5, 8, dtype=BRAIN), None, plain_weight(8, BRAIN))
    needs = list(product((True, False), repeat=3))
    for number, (rows, form) in enumerate(product((0, 1, 3, 64, 65, 129, 257), FORMS)):
        width, dtype = (6, 33)[number % 2], DTYPES[number % 3]
        x, second = random_rows(rows, width, dtype, 1), random_rows(rows, width, dtype, 3)
        dy = random_rows(rows, width, dy_dtype(form, dtype, DTYPES[number // 3 % 3]), 2)
        weight, size = plain_weight(width, WEIGHTS[number % 4]), group_size(width, number // 5)
        yield normalize(form, x, second, weight, size)
        dh = x if form.residual else None
        yield backward(form, dy, x, second, weight, size, dh=dh, needed=needs[number * 3 % 8])


def layouts():
    """Rows that lie in every way: all of them, or those of one tensor alone."""
    for number, (dtype, view) in enumerate(product(DTYPES, memory.STRIDES.values())):
        x, second, dy = (view(seed, dtype) for seed in (1, 2, 3))
        weight = plain_weight(2 * x.shape[-1], dtype)[::2]
        for form in (PLAIN if number % 2 else ADD, FORMS[number % len(FORMS)]):
            size = group_size(x.shape[-1], 1) if form in FORMS[2:] else 0
            one = [t.contiguous() if number % 3 == i else t for i, t in enumerate((x, second, dy))]
            yield normalize(form, x, second, weight, size)
            yield backward(form, dy, x, second, weight, size, dh=None if form.gated else second)
            yield normalize(form, *one[:2], None, size)
            yield backward(form, one[2], one[0], one[1], weight, size)
        y, rstd = torch.ops.rmsnorm.forward_train(x, weight, 1e-6)
        yield rebuilding(dy, view(1, dtype) if number % 2 else y, rstd, weight, 0.0, x.dtype)


def rebuilt():
    for width, dtype in product((1, 33, 130, 1000), DTYPES):
        x = finite_rows(width, dtype, seed=width + 7)
        weight, offset = plain_weight(width, SINGLE if width == 33 else dtype), float(width % 2)
        y, rstd = torch.ops.rmsnorm.forward_train(x, weight, 1e-6, offset)
        yield rebuilding(random_rows(len(x), width, dtype, 1), y, rstd, weight, offset, dtype)


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


def sigmoids():
    """Where single operations are seen; and every gate of 16 bits, in float32, so that no bit is rounded away."""
    for case in gated_cases.sigmoids_between_two_floats():
        yield "gated_forward_train", case.arguments
    for dtype, form in product((HALF, BRAIN), GATES):
        gate = from_bits(torch.arange(1 << 16), dtype).float().view(64, 1024)
        x = torch.ones_like(gate)
        yield normalize(form, x, gate, None, 1024)
        finite = gate.isfinite().all(-1)
        yield backward(form, x[finite], x[finite], gate[finite], None, 1024)


# ---------------------------------------------------------------- in the tiles that GPUs get


def shipped_tiles():
    for number, width in enumerate((1, 3, 64, 128, 130, 576, 1000, 1024, 4096, 8192)):
        dtype = DTYPES[number % 3]
        rows = 3 if width > 500 else 70
        x, dy, dh = (random_rows(rows, width, dtype, seed) for seed in (1, 2, 3))
        weight = plain_weight(width, dtype)
        yield normalize(PLAIN, x, None, weight)
        yield normalize(ADD, x, dy, weight)
        yield backward(PLAIN, dy, x, None, weight, dh=dh)
        yield backward(PLAIN, dy, x, None, weight, needed=(True, False, False))
        yield backward(PLAIN, dy, x, None, weight, needed=(False, False, True))
    for number, (width, groups) in enumerate(product((1, 3, 64, 130, 576, 1024, 4096), (1, 2))):
        dtype, rows = DTYPES[number % 3], 3 if width > 500 else 70
        cols = width * groups
        x, dy = (random_rows(rows, cols, dtype, seed) for seed in (1, 3))
        weight = plain_weight(cols, dtype)
        for form in (FORMS[number % len(FORMS)], FORMS[(number + 3) % len(FORMS)]):
            second = random_rows(rows, cols, SINGLE if number % 4 == 3 and form != ADD else dtype, 2)
            yield normalize(form, x, second, weight, width)
            yield backward(form, dy, x, second, weight, width, dh=None if form.gated else dy)
            if form.gated:
                yield backward(form, dy, x, second, weight, width, needed=(False, True, False))


def more_than_a_tile():
    for number, (width, rows) in enumerate(((8193, 3), (12345, 2), (32769, 2), (65536, 1), (100_003, 1))):
        for dtype in (DTYPES[number % 3], DTYPES[(number + 1) % 3]):
            x, dy = random_rows(rows, width, dtype, 1, scale=1e-3), random_rows(rows, width, dtype, 2)
            x[:, -1] = 1000.0  # in the last piece
            weight = plain_weight(width, dtype)
            yield normalize(PLAIN, x, None, weight, offset=1.0)
            yield normalize(ADD, x, dy, weight)
            yield backward(PLAIN, dy, x, None, weight, dh=dy if number % 2 else None)
    x = torch.stack([torch.randn(32_769, generator=generator(1)) * scale for scale in (1e-30, 1e30, torch.inf, 0.0)])
    yield normalize(PLAIN, x, None, None)
    yield backward(PLAIN, x.roll(1, 0)[:, :8200], x[:, :8200], None, None)
    yield normalize(PLAIN, random_rows(1, 1 << 20, BRAIN, 3), None, plain_weight(1 << 20, BRAIN))
    for number, (width, groups, rows) in enumerate(((4097, 2, 3), (8192, 1, 2), (17_000, 2, 2), (32769, 1, 2))):
        forms = FORMS[2 * number : 2 * number + 2]
        for dtype, form in zip((DTYPES[number % 3], DTYPES[(number + 1) % 3]), (*forms, GATES[number]), strict=False):
            cols = width * groups
            x, second, dy = (random_rows(rows, cols, dtype, seed) for seed in (1, 2, 3))
            x[:, width - 1] = 1000.0  # in the last piece of the first group
            weight = plain_weight(cols, dtype)
            yield normalize(form, x, second, weight, width, offset=1.0)
            yield backward(form, dy, x, second, weight, width)
            if form.gated:
                yield backward(form, dy, x, second, None, width, needed=(number % 2 == 0, True, False))
        for second in (x.float(), x.to(BRAIN)):
            yield normalize(EXACT if number % 2 else SCALED, x, second, weight, width)


# fmt: off
TALL = {f.__name__: f for f in (
    rows_of_every_width, widths, any_values, values, where_float32_ends, roundings, row_counts, layouts, rebuilt,
    to_the_last_quantum, slopes_at_ties, sigmoids,
)}
# fmt: on
# Of these every call meets every form of the sums, of the others one after another.
EVERY_SUM = {"rows_of_every_width", "any_values", "where_float32_ends", "to_the_last_quantum", "slopes_at_ties"}
SHIPPED = {f.__name__: f for f in (shipped_tiles, more_than_a_tile)}
# Functions of memory_checks.py and interpreter_checks.py, which take Triton to import.
CHECKS = ("out", "far_rows", "permutations", "beyond_reach", "refusals", "freed", "repeated", "public_functions")
