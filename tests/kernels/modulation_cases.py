"""Calls of the modulation's operators: every pair of dtypes, all kinds of values, whoever shares a scale or shift."""

from itertools import product

import torch

from rmsnorm.numerics import modulation, reference
from rmsnorm.spec import NormSpec
from tests.kernels.kernel_calls import MODULATED, MODULATED_BACKWARD, Case, describe, plain_weight, short
from tests.support.rows import DTYPES, WIDTHS, all_rows, random_rows

WEIGHTS = (None, *DTYPES)


def modulation_forms():
    """Every pair of dtypes, with the other options in turn; a row for all, a row each, or none."""
    count = 0
    for width, x_dtype, dtype in product(WIDTHS, DTYPES, DTYPES):
        x, other = all_rows(width, x_dtype, seed=width), all_rows(width, dtype, seed=width + 1)
        pairs = ((other, other.roll(3, 0)), (other[0], None), (None, other), (other[:1], other[0]))
        for _ in range(4 if width < 127 else 1):
            count += 1
            scale, shift = pairs[count % 4]
            weight = plain_weight(width, WEIGHTS[count % 4])
            yield modulated_case("modulated", x, weight, scale, shift, (0.0, 1.0)[count % 2], count // 4 % 3)


def modulation_gradients():
    """Sums over no leading dimension, one, or both."""
    count = 0
    shapes = ((3, 5), (1, 200), (130, 3), (2, 0), (4, 1))
    for (outer, inner), width, x_dtype, dtype in product(shapes, (1, 17, 127), DTYPES, DTYPES):
        for shared in (0, 1, 2):
            count += 1
            rounding, weight = count % 3, plain_weight(width, WEIGHTS[count % 4])
            x = random_rows(outer * inner, width, x_dtype, seed=count).view(outer, inner, width)
            scale = random_rows(outer, width, dtype, seed=1).unsqueeze(1) if count % 5 else None
            yield modulated_backward_case(x, weight, scale, (0.0, 1.0)[count % 2], rounding, shared, DTYPES[count % 3])


def modulated_case(name, x, weight, scale, shift, offset, rounding, eps=1e-6):
    expected = modulation.forward(x, weight, scale, shift, NormSpec(eps, offset, rounding))
    name = f"{name} {describe(x, weight, offset, rounding)}"
    name += "".join(f" {what}={short(t.dtype)}" for what, t in (("scale", scale), ("shift", shift)) if t is not None)
    return Case(name, MODULATED, (x, weight, scale, shift, eps, offset, rounding), expected)


def modulated_backward_case(x, weight, scale, offset, rounding, shared, sum_dtype):
    spec = NormSpec(0.0, offset, rounding)
    y, rstd = modulation.forward(x, weight, scale, None, NormSpec(1e-6, offset, rounding))
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    dn, *terms = modulation.input_gradients(dy, x, rstd, weight, scale, spec)
    dx, _, dweight = reference.backward(dn, x, None, rstd, weight, None, spec)
    kept = x.dim() - 1 - shared
    shape = (*x.shape[:kept], *(1,) * shared, x.shape[-1])
    sums = (modulation.sum_shared(t, shape).to(sum_dtype) for t in terms)
    name = f"gradients {describe(x, weight, offset, rounding)} scale={scale is not None} shared={shared}"
    arguments = (dy, x, rstd, weight, scale, offset, rounding, shared, sum_dtype)
    return Case(name, MODULATED_BACKWARD, arguments, (dx, dweight, *sums))
