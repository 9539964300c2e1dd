"""Calls of the gated and grouped operators; see kernel_cases.py."""

from itertools import product

import torch

from rmsnorm.spec import ACTIVATIONS, ROUNDINGS
from tests.kernels.kernel_calls import (
    GATED,
    Case,
    describe,
    describe_gate,
    gated_backward_case,
    gated_case,
    plain_weight,
)
from tests.support import reference
from tests.support.layouts import STRIDES, base
from tests.support.rows import DTYPES, ROWS, WIDTHS, all_rows, finite_rows, generator, random_rows, special_weight

WEIGHTS = (None, *DTYPES)
# The activation and whether the gate comes first; None has no gate.
FORMS = (*product(range(len(ACTIVATIONS)), (False, True)), None)
SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def group_sizes(width):
    """The row itself, and the divisors nearest to sizes that models and vectors have."""
    return sorted({width, *(size for size in (1, 2, 4, 8, 31, 64, 127, 500) if width % size == 0)})


def gate_rows(rows, width, dtype, seed, kinds=None):
    """Gates of every kind, a kind a row: where the sigmoid bends, ends and leaves its range, and what is not finite."""
    g = generator(seed)
    ordinary = torch.randn(rows, width, generator=g)
    corners = torch.tensor(
        [0.0, -0.0, 88.0, -88.0, 88.8, -88.8, 103.9, -103.9, 104.0, -104.0, 200.0, -200.0, 17.0, -17.0]
    )
    small = torch.tensor([1e-30, -1e-30, 1e-38, -1e-40, 1e-45, 6e-8, -6e-8])
    wild = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e4, -1e4, 0.0])

    def picked(values):
        return values[torch.randint(len(values), (rows, width), generator=g)]

    made = [3 * ordinary, 30 * ordinary, picked(corners), picked(small), 100 * ordinary, picked(wild), ordinary]
    kinds = made if kinds is None else made[:kinds]
    found = torch.stack([kinds[(row + seed) % len(kinds)][row] for row in range(rows)]) if rows else ordinary
    return found.to(dtype)


def _call(form):
    """What the operators get in the place of a form."""
    return (0, False) if form is None else form


def _spread(width, index):
    """All forms for short rows; for long ones two, which change with the dtype and the width."""
    if width <= 127:
        return FORMS
    start = WIDTHS.index(width) + 2 * index
    return FORMS[start % len(FORMS)], FORMS[(start + 1) % len(FORMS)]


def _gate_dtype(x_dtype, count):
    """x's own, or each of the three in turn."""
    return DTYPES[count // 2 % 3] if count % 2 else x_dtype


def gated_forms():
    count = 0
    for width, (index, x_dtype) in product(WIDTHS, enumerate(DTYPES)):
        sizes = group_sizes(width)
        for form in _spread(width, index):
            x = all_rows(width, x_dtype, seed=width)
            for w_dtype in WEIGHTS if width <= 127 else (x_dtype,):
                count += 1
                gate = None if form is None else gate_rows(len(x), width, _gate_dtype(x_dtype, count), seed=count)
                weight, size, rounding = plain_weight(width, w_dtype), sizes[count % len(sizes)], count // 4 % 3
                offset = 0.1 if rounding == 1 else float(count % 2)
                yield gated_case("all rows", x, gate, weight, _call(form), size, offset, rounding)
            weight = special_weight(width, DTYPES[count % 3], seed=width)
            eps = (1e-6, 0.0, 1e-300, 3.0, 1e30)[count % 5]
            yield gated_case("special weight", x, gate, weight, _call(form), sizes[0], rounding=count % 3, eps=eps)


def gated_gradients():
    count = 0
    for width, (index, x_dtype) in product(WIDTHS, enumerate(DTYPES)):
        sizes = group_sizes(width)
        for form in _spread(width, index):
            for _ in range(2 if width <= 127 else 1):
                count += 1
                dy_dtype = x_dtype if form is not None and not form[1] else DTYPES[count % 3]
                weight, size = plain_weight(width, WEIGHTS[count // 2 % 4]), sizes[count % len(sizes)]
                # Finite rows of every kind, and dy and gates of order one: then every row counts in dweight.
                x = finite_rows(width, x_dtype, seed=count)
                gate_dtype = _gate_dtype(x_dtype, count)
                gate = None if form is None else gate_rows(len(x), width, gate_dtype, seed=count, kinds=1)
                dy = random_rows(len(x), width, dy_dtype, seed=count)
                dh = random_rows(len(x), width, x_dtype, seed=count + 1) if form is None and count % 3 else None
                yield gated_backward_case("gradients", dy, x, gate, weight, _call(form), size, float(count % 2), dh=dh)
                x = all_rows(width, x_dtype, seed=count)
                gate = None if form is None else gate_rows(len(x), width, gate_dtype, seed=count)
                dy = all_rows(width, dy_dtype, seed=count + 1).roll(count, 0)
                weight = special_weight(width, SINGLE, seed=width) if count % 3 else weight
                yield gated_backward_case("any values", dy, x, gate, weight, _call(form), size)


def sigmoids_between_two_floats():
    """Gates whose sigmoid, in float64, is within a few of its last bits of the middle between two float32.

    Near 0 it is 1/2 + z/4, and so these are the odd multiples of half a step of float32 there; the others were found by
    trying all float32 from 2^-13 to 104. Almost any other order of operations rounds some of them differently.
    """
    odd = 2.0 * torch.arange(140) + 1
    found = [0.0008872748, 0.00223577116, 0.039486412, 0.210552856, 0.90876174]
    found += [-0.00111788523, -0.140874624, -0.599194527, -14.8347883, -35.6645699]
    z = torch.cat([odd * 2.0**-23, -odd * 2.0**-24, torch.tensor(found)])[None]
    for form in FORMS[:-1]:
        yield gated_case("sigmoid between two floats", torch.ones_like(z), z, None, form, z.shape[-1], eps=0.0)


def gated_layouts():
    """Rows that lie in every way, alone and many, for several threads, and past the cache."""
    for index, (dtype, (name, view)) in enumerate(product(DTYPES, STRIDES.items())):
        x, gate, dy = view(1, dtype), view(2, DTYPES[index // 2 % 3]), view(3, dtype)
        size = group_sizes(x.shape[-1])[-1 - index % 2 * (x.shape[-1] > 1)]
        weight = plain_weight(2 * x.shape[-1], SINGLE)[::2]
        for form in FORMS[index % 2 :: 2]:
            z = None if form is None else gate
            yield gated_case(name, x, z, weight, _call(form), size)
            yield gated_backward_case(name, dy, x, z, weight, _call(form), size)
            if z is not None:
                yield gated_case(f"{name} x", x, z.contiguous(), None, _call(form), size)
                yield gated_case(f"{name} gate", x.contiguous(), z, None, _call(form), size)
                yield gated_backward_case(f"{name} x", dy.contiguous(), x, z.contiguous(), None, _call(form), size)
                yield gated_backward_case(f"{name} gate", dy.contiguous(), x.contiguous(), z, None, _call(form), size)
    shapes = [(rows, width, size) for rows in ROWS for width, size in ((96, 32), (5, 5), (1000, 8), (4093, 4093))]
    shapes += [(67, 1000, 250), (5000, 33, 11), (1, 65536, 64), (3, 65537, 65537)]
    for index, (rows, width, size) in enumerate(shapes):
        dtype = DTYPES[index % 3]
        x, gate, dy = (base(seed, dtype, rows, width) for seed in (1, 2, 3))
        weight = plain_weight(width, WEIGHTS[index % 4])
        for form in FORMS:
            z = None if form is None else gate
            yield gated_case("rows", x, z, weight, _call(form), size)
            yield gated_backward_case("rows", dy, x, z, weight, _call(form), size)
    for form, dtype, cols, size in (
        (FORMS[0], SINGLE, 1040, 208),
        (FORMS[1], BRAIN, 4096, 64),
        (None, HALF, 2080, 160),
    ):
        # As in kernel_cases.larger_than_the_cache: one set of rows again and again.
        x, weight = all_rows(cols, dtype), plain_weight(cols, dtype)
        copies = (17 << 20) // dtype.itemsize // cols // len(x) + 1
        gate = None if form is None else gate_rows(len(x), cols, dtype, seed=1)
        activation, first = _call(form)
        options = (size, ACTIVATIONS[activation], not first)
        y, rstd = reference.gated_forward(x, gate, weight, 1e-6, 0.0, ROUNDINGS[0], *options)
        many = [None if t is None else t.expand(copies, *t.shape) for t in (x, gate, y, rstd)]
        name = f"past the cache {describe_gate(gate, _call(form), size)} {describe(x, weight, 0.0)}"
        arguments = (*many[:2], weight, 1e-6, 0.0, 0, size, activation, first)
        yield Case(name, GATED, arguments, tuple(many[2:]))
