"""Rows in which one quantum more or less of a fixed-point sum is seen in the result.

Of ordinary rows it is not: the sums have some 50 bits, of which float32 keeps 24. A sum that rounds where it should
floor, or has another quantum, differs from the reference in few of them, by chance.
"""

import math
from itertools import product

import torch

from tests.kernels.kernel_calls import BACKWARD, Case, backward_case, normalize_case
from tests.support import reference
from tests.support.rows import DTYPES, WIDTHS, generator


def sums_to_the_last_quantum():
    """Each row with two neighbouring values of eps between which rstd changes.

    rstd is a step function of sum / d + eps. Just below a step, a little more in the sum does what a little more eps
    does; just above it, a little less. eps is found by bisection, and is about as large as sum / d, so that its last
    bit is worth no more than the sum's quantum.
    """
    for width, dtype, kind in product(WIDTHS, DTYPES, ("even", "outlier first", "outlier last")):
        row = torch.randn(width, generator=generator(width))
        if kind != "even":
            # Others near the square root of a quantum of the outlier: most of what they are is in the floors.
            row *= 2.0 ** -min(20, 10 + width.bit_length())
            row[0 if kind == "outlier first" else -1] = 1.7
        row = row.to(dtype)
        mean = row.double().square().mean().item()
        for eps in step_of_rstd(row, 0.5 * mean, 2 * mean):
            yield normalize_case(f"eps={eps!r}, {kind}", torch.stack([row, -row, row.flip(0)]), None, eps=eps)


def step_of_rstd(row, low, high):
    """Neighbouring float64 numbers low and high, between those given, of which rstd differs."""

    def rstd(eps):
        return reference.forward(row, None, eps, 0.0, "once")[1].item()

    while (middle := (low + high) / 2) not in (low, high):
        # The upper half keeps its step if the middle is still on low's side of one.
        low, high = (middle, high) if rstd(middle) == rstd(low) else (low, middle)
    assert rstd(low) != rstd(high)
    assert high == math.nextafter(low, math.inf)
    return low, high


def products_to_the_last_quantum():
    """Sums of u x that cancel but for their floors, seen where u is zero.

    Each term comes with its negative. Both floors together are one quantum below zero, or none if the term is a
    multiple of the quantum. Where dy is zero, dx = -rstd x_hat k, and k is that sum, to 24 bits.
    """
    for width, dtype in product([width for width in WIDTHS if width > 2], DTYPES):
        pairs = (width - 1) // 2
        g = generator(width)
        for spread in (0, 8, 20):
            # Terms of very different sizes: the small ones have bits below the quantum.
            scale = 2.0 ** -torch.randint(0, spread + 1, (4, pairs), generator=g)
            x, dy = (torch.randn(4, pairs, generator=g) * scale for _ in range(2))
            rest = torch.randn(4, width - 2 * pairs, generator=g)
            order = torch.randperm(width, generator=g)
            x_row = torch.cat([x, x, rest], -1)[:, order].to(dtype)
            dy_row = torch.cat([dy, -dy, 0 * rest], -1)[:, order].to(dtype)
            yield backward_case(f"cancelling, spread {spread}", dy_row, x_row, None)


def slopes_between_two_floats():
    """k = float32(rstd c (1/d)) where float64 comes within a rounding of its own of the middle of two floats.

    There the order of those multiplications decides, and whether 1/d is rounded first. c = a + b 2^-24 has 48 bits,
    so that of many rows some come that near; the last column, where u is zero, shows k.
    """
    for width in (3, 7, 33, 100, 1000):
        g = generator(width)
        rows = 3000
        rstd = 1 + torch.rand(rows, 1, generator=g)
        middle = (1 + torch.rand(rows, 1, generator=g)).double() + 2.0**-24
        c = middle * width / rstd.double()
        x, dy = torch.zeros(2, rows, width)
        x[:, 0], x[:, 1], x[:, -1] = 1.0, 2.0**-24, 1.0
        a = c.float()
        dy[:, :1], dy[:, 1:2] = a, ((c - a.double()) * 2.0**24).float()
        expected = reference.backward(dy, x, rstd, None, 0.0)
        yield Case(f"k at a tie ({rows}, {width})", BACKWARD, (dy, x, rstd, None, 0.0, None), expected)
