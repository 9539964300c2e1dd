"""Calls of the operators and what the reference gives for them.

They are made once and saved, because the reference is the slow side and each instruction set needs a process of its
own (kernel_worker.py). Views that share memory still do when they are loaded: `torch.save` keeps strides and storage.
"""

from itertools import product

import torch

from rmsnorm import spec
from tests.kernels import closing_cases, gated_cases, modulation_cases, residual_cases, rotation_cases
from tests.kernels.kernel_calls import (
    ADD,
    NORMALIZE,
    REBUILD,
    Case,
    add_case,
    backward_case,
    describe,
    normalize_case,
    plain_weight,
    rebuild_case,
)
from tests.support import reference, sharp_cases
from tests.support.layouts import STRIDES, base
from tests.support.rows import DTYPES, ROWS, WIDTHS, all_rows, finite_rows, from_bits, random_rows, special_weight

ROUNDINGS = range(len(spec.ROUNDINGS))
WEIGHTS = (None, *DTYPES)
SHORT = tuple(width for width in WIDTHS if width <= 127)
SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16

# ---------------------------------------------------------------- the groups


def every_pair_of_dtypes():
    for width, x_dtype, w_dtype in product(WIDTHS, DTYPES, WEIGHTS):
        x = all_rows(width, x_dtype, seed=width)
        weight = plain_weight(width, w_dtype)
        for rounding in ROUNDINGS if weight is not None else (0,):
            yield normalize_case("all rows", x, weight, rounding=rounding)
        if weight is not None:
            yield normalize_case("offset", x, weight, offset=1.0, rounding=width % 3)
            yield normalize_case("odd offset", x[:3], weight, offset=0.1)


def row_counts():
    for width, rows, x_dtype in product(WIDTHS, ROWS, DTYPES):
        x = random_rows(rows, width, x_dtype, seed=rows)
        yield normalize_case("rows", x, plain_weight(width, x_dtype if width % 2 else SINGLE))
    yield normalize_case("one dimension", random_rows(1, 100, SINGLE, 1)[0], None)
    yield normalize_case("nothing", torch.empty(3, 0, 5, 8, dtype=BRAIN), plain_weight(8, BRAIN))


def unusual_weights_and_eps():
    for width, x_dtype, w_dtype in product(WIDTHS, DTYPES, DTYPES):
        x = all_rows(width, x_dtype, seed=width + 1)
        weight = special_weight(width, w_dtype, seed=width)
        for rounding, offset in ((0, 0.0), (1, 1.0), (2, 0.0), (0, 1e-300), (1, -1e-300), (0, -0.0)):
            yield normalize_case("special weight", x, weight, offset=offset, rounding=rounding)
    for width, x_dtype, eps in product(
        (7, 33, 1000), DTYPES, (0.0, 1e-300, 1e-12, 1e-5, 3.0, 1e30, 1e60, 1e69, 1e80, 1e150, 1e300)
    ):
        x = all_rows(width, x_dtype, seed=width + 2)
        yield normalize_case(f"eps={eps}", x, plain_weight(width, x_dtype), eps=eps)


def fused_add():
    for width, x_dtype in product(WIDTHS, DTYPES):
        x = all_rows(width, x_dtype, seed=width + 3)
        for shift, w_dtype in enumerate(WEIGHTS if width in SHORT else (None, x_dtype)):
            # Another kind of row meets each, and one negative of itself.
            residual = x.roll(shift + 1, 0)
            residual[0] = -x[0]
            yield add_case("add", x, residual, plain_weight(width, w_dtype), rounding=shift % 3)
    for rows, x_dtype in product((0, 1, 257), DTYPES):
        x, residual = random_rows(rows, 127, x_dtype, 1), random_rows(rows, 127, x_dtype, 2)
        yield add_case("add", x, residual, plain_weight(127, SINGLE), offset=1.0)


def gradients():
    for width, x_dtype, dy_dtype, w_dtype in product(WIDTHS, DTYPES, DTYPES, WEIGHTS):
        if width not in SHORT and (dy_dtype not in (x_dtype, SINGLE) or w_dtype not in (None, SINGLE, x_dtype)):
            continue
        # Finite rows of every kind, and dy of order one: then x_hat is too, and every row counts in dweight.
        x = finite_rows(width, x_dtype, seed=width + 4)
        dy = random_rows(len(x), width, dy_dtype, seed=width)
        dh = random_rows(len(x), width, x_dtype, seed=width + 1)
        weight, offset = plain_weight(width, w_dtype), float(width % 2)
        yield backward_case("gradients", dy, x, weight, offset)
        yield backward_case("gradients", dy, x, weight, offset, dh)


def gradients_of_any_values():
    for width, x_dtype in product(WIDTHS, DTYPES):
        x = all_rows(width, x_dtype, seed=width + 5)
        for shift, dy_dtype, weight in (
            (0, x_dtype, None),
            (5, SINGLE, plain_weight(width, x_dtype)),
            (11, BRAIN, plain_weight(width, SINGLE)),
            (1, HALF, special_weight(width, BRAIN)),
        ):
            dy = all_rows(width, dy_dtype, seed=width + 6).roll(shift, 0)
            dh = x.roll(-shift, 0) if shift % 2 else None
            yield backward_case(f"any values {shift}", dy, x, weight, dh=dh)
            finite = dy.isfinite().all(-1) & x.isfinite().all(-1)  # else every column of dweight is NaN
            yield backward_case(f"any finite values {shift}", dy[finite], x[finite], weight)
        # Products that lose bits, or all of them, where float32 ends. eps = 0 brings them back into k.
        for exponent in (-60, -70, -80):
            x, dy = (random_rows(5, width, SINGLE, seed=width + i) * 2.0**exponent for i in (7, 8))
            x = x.to(x_dtype) if x_dtype != HALF else x
            yield backward_case(f"products of 2^{2 * exponent}", dy, x, None, eps=0.0)
        # k underflows to zero, and where dy is -0 its sign is seen.
        x, dy = torch.full((1, width), 1000.0, dtype=x_dtype), torch.full((1, width), -0.0)
        dy[0, 0] = 2.0**-149
        yield backward_case("k underflows", dy, x, None)


def gradients_of_row_counts():
    # 257 rows are 8 leaves of dweight, 8223 are 256: of 32 and 33 rows.
    shapes = [*product(WIDTHS, ROWS), (5, 64), (5, 65), (5, 128), (5, 130), (9, 8192), (9, 8223), (33, 1000)]
    for index, (width, rows) in enumerate(shapes):
        x_dtype, dy_dtype = DTYPES[index % 3], DTYPES[(index // 3) % 3]
        x, dy = random_rows(rows, width, x_dtype, seed=index), random_rows(rows, width, dy_dtype, seed=index + 1)
        yield backward_case("rows", dy, x, plain_weight(width, WEIGHTS[index % 4]), offset=float(index % 2))


def rebuilding_x():
    for width, x_dtype, w_dtype in product(WIDTHS, DTYPES, WEIGHTS):
        if width not in SHORT and w_dtype not in (None, x_dtype):
            continue
        x = finite_rows(width, x_dtype, seed=width + 7)
        weight = plain_weight(width, w_dtype)
        for rounding in ROUNDINGS if width in SHORT and weight is not None else (0,):
            dh = random_rows(len(x), width, x_dtype, 1) if rounding == 1 else None
            yield rebuild_case("rebuild", x, weight, float(width % 2), rounding, dh=dh)
        yield rebuild_case("any values", all_rows(width, x_dtype, seed=width + 8), weight)
    # NaNs that carry into the sign when they are rounded: no forward makes such a y, but the operator takes any.
    dy, y, rstd = random_rows(5, 33, SINGLE, 1), random_rows(5, 33, SINGLE, 2), torch.ones(5, 1)
    y[1, 3], y[3, 32] = from_bits(torch.tensor([0x7FFFFFFF, -1]), SINGLE)
    for x_dtype in DTYPES:
        rebuilt = reference.rebuild(y, rstd, None, 0.0, x_dtype)
        expected = reference.backward(dy, rebuilt, rstd, None, 0.0)
        yield Case("rebuild from NaNs", REBUILD, (dy, y, rstd, None, 0.0, None, x_dtype), expected)


def layouts():
    """Every way in which rows can lie in memory; dy, dh, residual and x each in each of them."""
    for dtype, (name, view) in product(DTYPES, STRIDES.items()):
        x, other, third = (view(seed, dtype) for seed in (1, 2, 3))
        weight = plain_weight(x.shape[-1], SINGLE)
        strided_weight = plain_weight(2 * x.shape[-1], dtype)[::2]
        yield normalize_case(name, x, strided_weight)
        yield add_case(f"{name} twice", x, other, weight)
        yield add_case(f"{name} x", x, other.contiguous(), weight)
        yield add_case(f"{name} residual", x.contiguous(), other, weight)
        yield backward_case(f"{name} dy", other, x.contiguous(), weight)
        yield backward_case(f"{name} x", other.contiguous(), x, strided_weight)
        yield backward_case(f"{name} dh", other.contiguous(), x.contiguous(), weight, dh=third)
        yield backward_case(f"{name} all", other, x, weight, dh=third)
        yield rebuild_case(name, x, weight)


def many_elements():
    """Enough for several threads, in shapes that divide unevenly; the worker runs these with 1, 2 and 3."""
    for index, (shape, dtype) in enumerate(product(((67, 1000), (3, 65537), (5000, 33), (1, 131072)), DTYPES)):
        x, residual, dy = (base(seed, dtype, *shape) for seed in (1, 2, 3))
        weight = plain_weight(shape[-1], WEIGHTS[index % 4])
        yield normalize_case("threads", x, weight)
        yield add_case("threads", x, residual, weight)
        yield backward_case("threads", dy, x, weight, dh=residual if index % 2 else None)
        yield rebuild_case("threads", x, weight)
    x = base(1, BRAIN, 40, 3, 6, 500)[:, 1].transpose(0, 1)
    yield normalize_case("threads, strided", x, plain_weight(500, BRAIN))
    yield backward_case("threads, strided", x.roll(1, 1), x, plain_weight(500, BRAIN))


def larger_than_the_cache():
    """Then y is written past the cache (csrc/ops/tensors.h), if its rows are cache lines; here 17 MiB each of x and y.

    Most of it is one row again and again, so that files stay small: rows decide nothing for each other.
    """
    for dtype, cols in ((SINGLE, 1040), (BRAIN, 4096), (HALF, 2080)):
        copies = (17 << 20) // dtype.itemsize // cols // 30 + 1
        x, weight = all_rows(cols, dtype), plain_weight(cols, dtype)
        residual = x.roll(1, 0)
        y, rstd = reference.forward(x, weight, 1e-6, 0.0, "once")
        summed = reference.add_forward(x, residual, weight, 1e-6, 0.0, "once")
        many = [t.expand(copies, *t.shape) for t in (x, residual, y, rstd, *summed)]
        name = f"past the cache {describe(x, weight, 0.0)}"
        yield Case(name, NORMALIZE, (many[0], weight, 1e-6, 0.0, 0), tuple(many[2:4]))
        yield Case(name, ADD, (*many[:2], weight, 1e-6, 0.0, 0), tuple(many[4:]))


GROUPS = {
    function.__name__: function
    for function in (
        every_pair_of_dtypes,
        row_counts,
        unusual_weights_and_eps,
        fused_add,
        gradients,
        gradients_of_any_values,
        gradients_of_row_counts,
        rebuilding_x,
        layouts,
        many_elements,
        larger_than_the_cache,
        gated_cases.gated_forms,
        gated_cases.gated_gradients,
        gated_cases.gated_layouts,
        gated_cases.sigmoids_between_two_floats,
        residual_cases.residual_modes,
        residual_cases.residual_layouts,
        closing_cases.norms_added,
        closing_cases.norms_added_layouts,
        modulation_cases.modulation_forms,
        modulation_cases.modulation_gradients,
        rotation_cases.rotations,
        rotation_cases.rotations_of_heads,
        rotation_cases.rotation_gradients,
        sharp_cases.sums_to_the_last_quantum,
        sharp_cases.products_to_the_last_quantum,
        sharp_cases.slopes_between_two_floats,
    )
}


def save(directory):
    """Writes the cases of each group to `directory`/<group>.pt."""
    for group, cases in GROUPS.items():
        found = [(case.name, case.op, case.arguments, case.expected) for case in cases()]
        torch.save(found, directory / f"{group}.pt")
