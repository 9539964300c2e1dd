"""Calls of the norm that closes a branch: h = norm(x) + residual."""

from itertools import product

from tests.kernels.kernel_calls import norm_add_case, plain_weight
from tests.support.layouts import STRIDES, base
from tests.support.rows import DTYPES, WIDTHS, all_rows, random_rows, special_weight

WEIGHTS = (None, *DTYPES)


def norms_added():
    """Every pair of dtypes, with the other options in turn."""
    for count, (width, x_dtype, dtype) in enumerate(product(WIDTHS, DTYPES, DTYPES)):
        x, residual = all_rows(width, x_dtype, seed=width), all_rows(width, dtype, seed=width + 1).roll(width % 7, 0)
        options = {"rounding": count // 4 % 3, "offset": (0.0, 1.0)[count % 2]}
        yield norm_add_case("added", x, residual, plain_weight(width, WEIGHTS[count % 4]), **options)
        yield norm_add_case(
            "special weight", x, residual, special_weight(width, DTYPES[count % 3], seed=width), **options
        )


def norms_added_layouts():
    """Rows that lie in every way, alone and many, for several threads."""
    pairs = list(product(DTYPES, DTYPES))
    for index, (name, view) in enumerate(STRIDES.items()):
        dtype, other = pairs[index % 9]
        x, residual = view(1, dtype), view(2, other)
        weight = plain_weight(2 * x.shape[-1], dtype)[::2]
        yield norm_add_case(name, x, residual, weight)
        yield norm_add_case(f"{name} x", x, residual.contiguous(), weight)
        yield norm_add_case(f"{name} residual", x.contiguous(), residual, weight)
    for index, (rows, width) in enumerate(((67, 1000), (3, 65537), (5000, 33), (257, 96), (0, 5), (1, 4093))):
        dtype, other = pairs[2 * index % 9]
        x, residual = base(index, dtype, rows, width), random_rows(rows, width, other, seed=index + 1)
        yield norm_add_case("rows", x, residual, plain_weight(width, WEIGHTS[index % 4]), rounding=index % 3)
