"""Calls of the residual modes: alpha, a residual of another dtype, the norm of the sum before it is rounded."""

from itertools import product

from tests.kernels.gated_cases import group_sizes
from tests.kernels.kernel_calls import plain_weight, residual_case
from tests.support.layouts import STRIDES, base
from tests.support.rows import DTYPES, WIDTHS, all_rows, random_rows, special_weight

WEIGHTS = (None, *DTYPES)
ALPHAS = (1.0, 0.22, -1.0, 12.0, 1e-30)


def residual_modes():
    """Every pair of dtypes, with the other options in turn."""
    count = 0
    for width, x_dtype, dtype in product(WIDTHS, DTYPES, DTYPES):
        x, sizes = all_rows(width, x_dtype, seed=width), (0, *group_sizes(width))
        residual = all_rows(width, dtype, seed=width + 1).roll(width % 7, 0)
        residual[0] = -x[0].to(dtype)
        for exact in (False, True):
            for _ in range(2 if width <= 127 else 1):
                count += 1
                options = {"rounding": count // 4 % 3, "group_size": sizes[count % len(sizes)], "exact": exact}
                options |= {"alpha": ALPHAS[count % 5], "offset": (0.0, 1.0)[count % 2]}
                yield residual_case("residual", x, residual, plain_weight(width, WEIGHTS[count % 4]), **options)
            weight = special_weight(width, DTYPES[count % 3], seed=width)
            yield residual_case("special weight", x, residual, weight, count % 3, exact=exact, alpha=ALPHAS[count % 4])


def residual_layouts():
    """Rows that lie in every way, alone and many, for several threads."""
    pairs = list(product(DTYPES, DTYPES))
    for index, (name, view) in enumerate(STRIDES.items()):
        for dtype, other in (pairs[index % 9], pairs[(index + 4) % 9]):
            x, residual = view(1, dtype), view(2, other)
            options = {"group_size": group_sizes(x.shape[-1])[0], "exact": index % 2 == 0, "alpha": ALPHAS[index % 5]}
            weight = plain_weight(2 * x.shape[-1], dtype)[::2]
            yield residual_case(name, x, residual, weight, **options)
            yield residual_case(f"{name} x", x, residual.contiguous(), weight, **options)
            yield residual_case(f"{name} residual", x.contiguous(), residual, weight, **options)
    shapes = ((67, 1000, 250), (3, 65537, 0), (5000, 33, 11), (257, 96, 32), (0, 5, 5), (1, 4093, 0))
    for index, ((rows, width, size), exact) in enumerate(product(shapes, (False, True))):
        dtype, other = pairs[2 * index % 9]
        x, residual = base(index, dtype, rows, width), random_rows(rows, width, other, seed=index + 1)
        options = {"group_size": size, "exact": exact, "alpha": ALPHAS[index % 5]}
        yield residual_case("rows", x, residual, plain_weight(width, WEIGHTS[index % 4]), **options)
