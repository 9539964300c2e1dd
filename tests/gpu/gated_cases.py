"""Calls of the gated and grouped operators for the interpreter; see cases.py."""

from itertools import product

import torch

from tests.gpu.cases import WIDTHS
from tests.kernels import gated_cases
from tests.kernels.gated_cases import FORMS, gate_rows
from tests.kernels.kernel_calls import plain_weight
from tests.support import layouts
from tests.support.rows import DTYPES, all_rows, finite_rows, from_bits, random_rows, special_weight

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
WEIGHTS = (None, *DTYPES)


def normalize(x, gate, weight, form, size, eps=1e-6, offset=0.0, rounding=0):
    return "gated_forward_train", (x, gate, weight, eps, offset, rounding, size, *(form or (0, False)))


def backward(dy, x, gate, weight, form, size, offset=0.0, eps=1e-6, needed=(True, True, True)):
    options = size, *(form or (0, False))
    rstd = torch.ops.rmsnorm.gated_forward_train(x, gate, weight, eps, offset, 0, *options)[1]
    need_dx, need_dgate, need_dweight = needed
    needed = need_dx, need_dgate and gate is not None, need_dweight
    return "gated_backward", (dy, x, gate, rstd, weight, None, offset, *options, *needed)


def group_size(width, number):
    """The row itself, or a half, third, ... of it; the interpreter takes its time for each group."""
    return width // max(n for n in range(1, 2 + number % 4) if width % n == 0)


def dtype_of_dy(form, x_dtype, number):
    """A gate that comes last makes y x's dtype."""
    return x_dtype if form is not None and not form[1] else DTYPES[number % 3]


# ---------------------------------------------------------------- in tall tiles


def gated_widths():
    for number, (width, dtype) in enumerate(product(WIDTHS, DTYPES)):
        # Five forms in turn, which meet the three dtypes in every order.
        form, size = FORMS[(number + number // 15) % 5], group_size(width, number // 3)
        weight = plain_weight(width, WEIGHTS[number % 4])
        x = all_rows(width, dtype, seed=width)
        gate = None if form is None else gate_rows(len(x), width, dtype, seed=number)
        yield normalize(x, gate, weight, form, size, offset=float(number % 2), rounding=number // 2 % 3)
        x = finite_rows(width, dtype, seed=width + 1)
        gate = None if form is None else gate_rows(len(x), width, dtype, seed=number, kinds=1)
        dy = random_rows(len(x), width, dtype_of_dy(form, dtype, number), seed=width)
        yield backward(dy, x, gate, weight, form, size, float(number % 2))


def gated_values():
    """Rows, gates, weights and dy of every kind."""
    for number, (width, dtype, form) in enumerate(product((6, 33, 130), DTYPES, FORMS)):
        x = all_rows(width, dtype, seed=number)
        gate = None if form is None else gate_rows(len(x), width, dtype, seed=number)
        dy = all_rows(width, dtype_of_dy(form, dtype, number), seed=number + 1).roll(number, 0)
        weight, size = special_weight(width, DTYPES[number % 3], seed=number), group_size(width, number)
        eps = (1e-6, 0.0, 1e-300, 3.0, 1e30)[number % 5]
        yield normalize(x, gate, weight, form, size, eps, rounding=number % 3)
        yield backward(dy, x, gate, weight if number % 2 else None, form, size)
        # Where all is finite every row counts in dweight.
        gate = None if form is None else gate_rows(len(x), width, dtype, seed=number, kinds=5)
        finite = dy.isfinite().all(-1) & x.isfinite().all(-1)
        x, dy, gate = (None if t is None else t[finite] for t in (x, dy, gate))
        yield backward(dy, x, gate, plain_weight(width, SINGLE), form, size, eps=eps)


def gated_roundings():
    for number, (x_dtype, w_dtype, rounding) in enumerate(product(DTYPES, WEIGHTS, range(3))):
        for form in (FORMS[number % 4], FORMS[(number + 1) % 4], None):
            x = all_rows(12, x_dtype, seed=number)
            gate = None if form is None else gate_rows(len(x), 12, x_dtype, seed=number)
            offset = (0.0, 0.1, 1.0)[number % 3]
            yield normalize(x, gate, plain_weight(12, w_dtype), form, 4, offset=offset, rounding=rounding)


def gated_row_counts():
    """Leaves of dweight of every length, with every choice of gradients."""
    needs = list(product((True, False), repeat=3))
    for number, (rows, form) in enumerate(product((0, 1, 3, 64, 65, 129, 257), FORMS)):
        width, dtype = (6, 33)[number % 2], DTYPES[number % 3]
        x, dy = random_rows(rows, width, dtype, 1), random_rows(rows, width, dtype_of_dy(form, dtype, number), 2)
        gate = None if form is None else random_rows(rows, width, dtype, 3)
        weight, size = plain_weight(width, WEIGHTS[number % 4]), group_size(width, number // 5)
        yield normalize(x, gate, weight, form, size)
        yield backward(dy, x, gate, weight, form, size, needed=needs[number * 3 % 8])


def gated_layouts():
    """Rows that lie in every way: all of them, or those of one tensor alone."""
    for number, (dtype, view) in enumerate(product(DTYPES, layouts.STRIDES.values())):
        x, gate, dy = (view(seed, dtype) for seed in (1, 2, 3))
        weight, size = plain_weight(2 * x.shape[-1], SINGLE)[::2], group_size(x.shape[-1], 1)
        form = FORMS[number % 5]
        if form is None:
            gate = None
        yield normalize(x, gate, weight, form, size)
        yield backward(dy, x, gate, weight, form, size)
        if gate is not None and number % 2:
            yield normalize(x.contiguous(), gate, None, form, size)
            yield backward(dy.contiguous(), x, gate.contiguous(), weight, form, size)
        elif gate is not None:
            yield normalize(x, gate.contiguous(), None, form, size)
            yield backward(dy, x.contiguous(), gate, None, form, size)


def gated_sigmoids():
    """Where single operations are seen; and every gate of 16 bits, in float32, so that no bit is rounded away."""
    for case in gated_cases.sigmoids_between_two_floats():
        yield "gated_forward_train", case.arguments
    for dtype, form in product((HALF, BRAIN), FORMS[:-1]):
        gate = from_bits(torch.arange(1 << 16), dtype).float().view(64, 1024)
        x = torch.ones_like(gate)
        yield normalize(x, gate, None, form, 1024)
        finite = gate.isfinite().all(-1)
        yield backward(x[finite], x[finite], gate[finite], None, form, 1024)


# ---------------------------------------------------------------- in the tiles that GPUs get


def gated_shipped_tiles():
    for number, (width, groups) in enumerate(product((1, 3, 64, 130, 576, 1024, 4096), (1, 2))):
        dtype, rows = DTYPES[number % 3], 3 if width > 500 else 70
        cols = width * groups
        x, gate, dy = (random_rows(rows, cols, dtype, seed) for seed in (1, 2, 3))
        weight = plain_weight(cols, dtype)
        for form in (FORMS[number % 5], FORMS[(number + 2) % 5]):
            z = None if form is None else gate
            yield normalize(x, z, weight, form, width)
            yield backward(dy, x, z, weight, form, width)
            yield backward(dy, x, z, weight, form, width, needed=(False, True, False))


def gated_more_than_a_tile():
    for number, (width, groups, rows) in enumerate(((4097, 2, 3), (8192, 1, 2), (9000, 2, 2), (32769, 1, 2))):
        for dtype, form in (
            (DTYPES[number % 3], FORMS[number % 5]),
            (DTYPES[(number + 1) % 3], FORMS[(number + 3) % 5]),
        ):
            cols = width * groups
            x, gate, dy = (random_rows(rows, cols, dtype, seed) for seed in (1, 2, 3))
            x[:, width - 1] = 1000.0  # in the last piece of the first group
            z = None if form is None else gate
            weight = plain_weight(cols, dtype)
            yield normalize(x, z, weight, form, width, offset=1.0)
            yield backward(dy, x, z, weight, form, width)
            yield backward(dy, x, z, None, form, width, needed=(number % 2 == 0, True, False))


TALL = {
    f.__name__: f
    for f in (gated_widths, gated_values, gated_roundings, gated_row_counts, gated_layouts, gated_sigmoids)
}
SHIPPED = {f.__name__: f for f in (gated_shipped_tiles, gated_more_than_a_tile)}
