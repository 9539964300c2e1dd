"""Sums whose order cannot matter (docs/numerics.md), and what RMSNorm computes from them.

    fixed_sum(t) = q * sum_i floor(t_i / q),    q = 2^(E + ceil(log2 d) - 51),    |t_i| <= 2^E

Rows are the last dimension. Every function works on any device that has float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class RowReductions:
    """What is taken over a whole row: its length, magnitudes, sums. split_rows.py has rows that several ranks share."""

    def length(self, piece: Tensor) -> int:
        return piece.shape[-1]

    def largest(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        """The largest magnitude in each."""
        return tuple(piece.abs().amax(-1, keepdim=True) for piece in pieces)

    def total(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        """The sum of each, all integers."""
        return tuple(piece.sum(-1, keepdim=True) for piece in pieces)

    def inverse_rms(self, x: Tensor, eps: float) -> Tensor:
        return inverse_rms(x, eps, self)


WHOLE_ROWS = RowReductions()


def inverse_rms(x: Tensor, eps: float, rows: RowReductions = WHOLE_ROWS) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), scaled by powers of two so that nothing leaves float64's range.

    The sum by the row's own, whose square its quantum goes with; mean and eps by that of the larger of the two.
    """
    wide = x.double()
    (largest,) = rows.largest(wide)
    exponent = exponent_of(largest)
    scaled = wide * power_of_two(-exponent)
    total = fixed_sum(scaled * scaled, rows, two_quanta=x.dtype == torch.float64)
    common = torch.maximum(exponent, (exponent_of(torch.full_like(largest, abs(eps))) + 1) // 2)
    mean = total * (1.0 / rows.length(x)) * power_of_two(exponent - common) * power_of_two(exponent - common)
    variance = mean + eps * power_of_two(-common) * power_of_two(-common)
    rstd = ieee_rsqrt(variance) * power_of_two(-common)
    # An infinite or NaN row has no quantum: S = m * m, and rstd is 0 or NaN.
    rstd = torch.where(largest.isfinite(), rstd, ieee_rsqrt(largest * largest))
    return rstd.to(compute_dtype(x))


def row_dot(u: Tensor, x: Tensor, rows: RowReductions = WHOLE_ROWS) -> Tensor:
    """fixed_sum(u * x) per row as float64; NaN where either row is not finite."""
    u_wide, x_wide = u.double(), x.double()
    u_max, x_max = rows.largest(u_wide, x_wide)
    u_exponent, x_exponent = exponent_of(u_max), exponent_of(x_max)
    terms = (u_wide * power_of_two(-u_exponent)) * (x_wide * power_of_two(-x_exponent))
    total = fixed_sum(terms, rows, two_quanta=u.dtype == torch.float64)
    total = total * power_of_two(u_exponent) * power_of_two(x_exponent)
    return torch.where(u_max.isfinite() & x_max.isfinite(), total, torch.nan)


def fixed_sum(terms: Tensor, rows: RowReductions = WHOLE_ROWS, *, two_quanta: bool) -> Tensor:
    """Sum of float64 terms of magnitude at most 1: floored to multiples of 2^(L - 51), every partial sum is exact.

    The terms of float64 inputs lose more bits to the floor than float64 results may: what the floor leaves of them
    is summed with a second, smaller quantum.
    """
    quanta_per_unit = 2.0 ** (51 - (rows.length(terms) - 1).bit_length())
    counts = torch.floor(terms * quanta_per_unit)
    if not two_quanta:
        (total,) = rows.total(counts)
        return total / quanta_per_unit
    rest = torch.floor((terms * quanta_per_unit - counts) * quanta_per_unit)
    total, total_rest = rows.total(counts, rest)
    return total / quanta_per_unit + total_rest / quanta_per_unit**2


def leaves(rows: int) -> int:
    """How many leaves the sum over so many rows has: a power of two, so that none has more than 64 rows."""
    return int(1 << ((max(rows, 1) + 63) // 64 - 1).bit_length())


def sum_rows(terms: Tensor) -> Tensor:
    """Sum of (..., d) over all rows as a binary tree: row after row within its leaves, and from there on in pairs.

    leaf i = the rows from i * rows // leaves to (i + 1) * rows // leaves

    The sum of twice as many rows is the sum of the first half plus the sum of the second: what ranks with equal shares
    of the rows have are nodes of the tree (weight_gradient.py).
    """
    d = terms.shape[-1]
    terms = terms.reshape(-1, d)
    rows = terms.shape[0]
    count = leaves(rows)
    edges = torch.arange(count + 1, device=terms.device) * rows // count
    sums = terms.new_zeros(count, d)
    for step in range(-(-rows // count)):
        row = edges[:-1] + step
        term = terms[row.clamp(max=rows - 1)]
        # A sum that starts at +0 is never -0, so adding 0 to a leaf that is shorter changes no bit.
        sums = sums + torch.where((row < edges[1:]).unsqueeze(-1), term, 0.0)
    return add_in_pairs(sums)


def add_in_pairs(sums: Tensor) -> Tensor:
    """Sum of (n, d) over n, a power of two: of neighbours, then of neighbours among those, up to one."""
    while sums.shape[0] > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]


def exponent_of(magnitude: Tensor) -> Tensor:
    """The e with magnitude < 2^e <= 2 * magnitude, read from the bits: `torch.frexp` calls infinity's exponent 0.

    Kept where 2^e and 2^-e are normal float64 numbers; only float64 inputs reach those ends.
    """
    return ((magnitude.view(torch.int64) >> 52) - 1022).clamp(-400, 1022)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly."""
    return ((exponent + 1023) << 52).view(torch.float64)


def ieee_rsqrt(v: Tensor) -> Tensor:
    """1 / sqrt(v) with both operations correctly rounded."""
    # On the CPU torch.sqrt calls a vector library whose last bit is off in about 1 % of long float64 tensors, while
    # torch.rsqrt is a correctly rounded square root and division; elsewhere it is the other way round.
    return torch.rsqrt(v) if v.device.type == "cpu" else 1.0 / torch.sqrt(v)
