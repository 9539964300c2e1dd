"""Calls of the rotation's operators: every pair of dtypes, all kinds of values, every way to make pairs."""

from itertools import product

import torch

from rmsnorm.numerics import reference
from rmsnorm.numerics.rotation import Rotation, rotate, rotate_back
from rmsnorm.spec import NormSpec
from tests.kernels.kernel_calls import ROTATED, ROTATED_BACKWARD, Case, describe, plain_weight, short
from tests.support.rows import DTYPES, all_rows, random_rows, special_weight

WEIGHTS = (None, *DTYPES)
# Widths, and how many columns of them are rotated.
DIMS = ((2, 2), (8, 8), (16, 6), (34, 34), (33, 32), (64, 64), (128, 128), (80, 40), (600, 600), (4096, 4094))


def rotations():
    """Every pair of dtypes, with the other options in turn; angles for all rows, or for each."""
    count = 0
    for (width, dim), x_dtype, dtype in product(DIMS, DTYPES, DTYPES):
        x = all_rows(width, x_dtype, seed=width)
        for interleaved, each in product((False, True), repeat=2):
            count += 1
            cols = dim if count % 2 else max(1, dim // 2)
            angles = [all_rows(cols, dtype, seed=width + i)[: len(x)] for i in (1, 2)]
            cos, sin = (t[3:4] if count % 3 or len(t) != len(x) else t for t in angles)
            weight = plain_weight(width, WEIGHTS[count % 4])
            yield rotated_case(x, weight, cos, sin, Rotation(dim, interleaved, each), (0.0, 1.0)[count % 2], count % 3)
            if dtype == x_dtype:
                special = special_weight(width, DTYPES[count % 3], seed=width)
                yield rotated_case(x, special, cos, sin, Rotation(dim, interleaved, each), 0.0, count % 3)


def rotations_of_heads():
    """Rows for several threads; heads before tokens and after them, and out of a fused projection."""
    for index, (dtype, other) in enumerate(product(DTYPES, DTYPES)):
        qkv = random_rows(2 * 60, 12 * 64, dtype, seed=index).view(2, 60, 12, 64)
        cos, sin = (random_rows(60, 64, other, seed=i) for i in (1, 2))
        rotation = Rotation(64, bool(index % 2), bool(index % 4 // 2))
        weight = plain_weight(64, WEIGHTS[index % 4])
        for x, place in ((qkv[:, :, :8], 1), (qkv[:, :, 8:10].transpose(1, 2), 0), (qkv[..., ::2], 1)):
            angles = (t[..., : x.shape[-1]].unsqueeze(place) for t in (cos, sin))
            by = rotation._replace(dim=x.shape[-1])
            yield rotated_case(x, weight if len(x[0, 0, 0]) == 64 else None, *angles, by, 0.0, index % 3)


def rotation_gradients():
    """dx and dweight of what the forward's cases are."""
    count = 0
    for (width, dim), x_dtype, dtype in product(DIMS[:-1], DTYPES, DTYPES):
        for interleaved, each in product((False, True), repeat=2):
            count += 1
            rows = (1, 5, 70)[count % 3]
            x = random_rows(rows, width, x_dtype, seed=count)
            cols = dim if count % 2 else dim // 2
            cos, sin = (random_rows(rows if count % 5 else 1, cols, dtype, seed=i) for i in (1, 2))
            weight = plain_weight(width, WEIGHTS[count % 4])
            rotation = Rotation(dim, interleaved, each)
            yield rotated_backward_case(x, weight, cos, sin, rotation, (0.0, 1.0)[count % 2], count % 3)
    x = all_rows(64, torch.bfloat16)
    cos, sin = all_rows(64, torch.float32, seed=3)[: len(x)], all_rows(64, torch.float32, seed=4)[: len(x)]
    for each in (False, True):
        yield rotated_backward_case(x, None, cos[:1], sin[2:3], Rotation(64, False, each), 0.0, 0)
    x = random_rows(2 * 700, 4 * 32, torch.bfloat16, seed=0).view(2, 700, 4, 32)
    cos, sin = (random_rows(700, 32, torch.float32, seed=i).unsqueeze(1) for i in (1, 2))
    yield rotated_backward_case(x[:, :, :3], plain_weight(32, torch.float32), cos, sin, Rotation(32), 0.0, 0)


def rotated_case(x, weight, cos, sin, rotation, offset, rounding, eps=1e-6):
    n, rstd = reference.forward(x, None, weight, NormSpec(eps, offset, rounding))
    arguments = (x, weight, cos, sin, eps, offset, rounding, *rotation)
    return Case(_name("rotated", x, weight, cos, rotation, offset, rounding), ROTATED, arguments,
                (rotate(n, cos, sin, rotation), rstd))  # fmt: skip


def rotated_backward_case(x, weight, cos, sin, rotation, offset, rounding):
    spec = NormSpec(1e-6, offset, rounding)
    n, rstd = reference.forward(x, None, weight, spec)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(n.dtype)
    dx, _, dweight = reference.backward(
        rotate_back(dy, cos, sin, rotation), x, None, rstd, weight, None, spec._replace(eps=0.0)
    )
    arguments = (dy, x, rstd, weight, cos, sin, offset, *rotation)
    name = _name("rotated back", x, weight, cos, rotation, offset, rounding)
    return Case(name, ROTATED_BACKWARD, arguments, (dx, dweight))


def _name(name, x, weight, cos, rotation, offset, rounding):
    angles = f"{short(cos.dtype)} {tuple(cos.shape)}"
    return f"{name} {describe(x, weight, offset, rounding)} angles={angles} {tuple(rotation)}"
