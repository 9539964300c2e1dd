"""What is right: the formula in arithmetic so much wider than the implementation's that its own error does not count.

For float32 and 16-bit inputs that is float64: squares of float32 are exact in it, a sum of n of them in pairwise
order is off by at most 64 * 2^-53, and the rest by six roundings of 2^-53. That is 2^-22 of a unit in float32's last
place. For float64 inputs it is rational arithmetic (`float64_errors`).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isqrt

import torch
from torch import Tensor

# Where eps stands: 1 / sqrt(mean + eps) is "inside". Each gives the reciprocal from the mean square, eps and the width.
PLACES: dict[str, Callable[[Tensor, float, int], Tensor]] = {
    "inside": lambda ms, eps, d: 1 / torch.sqrt(ms + eps),
    "outside": lambda ms, eps, d: 1 / (torch.sqrt(ms) + eps),
    "maximum": lambda ms, eps, d: 1 / torch.sqrt(ms).clamp_min(eps),
    "maximum inside": lambda ms, eps, d: 1 / torch.sqrt(ms.clamp_min(eps)),
    "outside, as a root": lambda ms, eps, d: 1 / (torch.sqrt(ms) + eps**0.5),
    "in the sum": lambda ms, eps, d: 1 / torch.sqrt(ms + eps / d),
    "nowhere": lambda ms, eps, d: 1 / torch.sqrt(ms),
}
FORMULAS = {
    "inside": "x / sqrt(mean(x^2) + eps)",
    "outside": "x / (sqrt(mean(x^2)) + eps)",
    "maximum": "x / max(sqrt(mean(x^2)), eps)",
    "maximum inside": "x / sqrt(max(mean(x^2), eps))",
    "outside, as a root": "x / (sqrt(mean(x^2)) + sqrt(eps))",
    "in the sum": "x / sqrt((sum(x^2) + eps) / d)",
    "nowhere": "x / sqrt(mean(x^2))",
}
_BITS = 200


def reciprocal(x: Tensor, eps: float, place: str) -> Tensor:
    """1 / rms of each row of x, (..., 1), in float64."""
    return PLACES[place](x.double().square().mean(-1, keepdim=True), eps, x.shape[-1])


def grouped(x: Tensor, group: int | None) -> Tensor:
    """(..., d) as (..., groups, size), with one group for a whole row."""
    return x.reshape(*x.shape[:-1], -1, group or x.shape[-1]) if x.numel() else x.unsqueeze(-2)


def normalized(x: Tensor, gain: Tensor | None, eps: float, place: str = "inside", group: int | None = None) -> Tensor:
    """y in float64, of whole rows or of groups; the gain is the weight plus its offset, in float64."""
    rows = grouped(x.double(), group)
    y = (rows * reciprocal(rows, eps, place)).flatten(-2)
    return y if gain is None else y * gain


def unit(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of each number, as a number of `dtype`: 2^(floor(log2 |e|) - precision + 1)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.abs().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def errors(y: Tensor, exact: Tensor, precision: torch.dtype | None = None) -> Tensor:
    """|y - exact| in units in the last place of y's dtype, or of a coarser one; infinite where y is not finite.

    Where the exact value rounds to infinity or NaN, y must be the same.
    """
    rounded = exact.to(y.dtype)
    error = (y.double() - exact).abs() / unit(exact, precision or y.dtype)
    error = torch.where(y.isfinite() & rounded.isfinite(), error, torch.inf)
    same = (y == rounded) | (y.isnan() & rounded.isnan())
    return torch.where(same & ~rounded.isfinite(), 0.0, error)


def float64_errors(y: Tensor, x: Tensor, gain: Tensor | None, eps: float, place: str) -> Tensor:
    """`errors` of float64 rows, in rational arithmetic; eps inside the root alone."""
    if place != "inside":
        raise ValueError(f"exact arithmetic knows eps inside the root alone, not {place!r}")
    units = unit(normalized(x, gain, eps), torch.float64)
    found = []
    for row, got, ulp in zip(x.tolist(), y.tolist(), units.tolist(), strict=True):
        r = _inverse_rms(row, eps)
        gains = [1.0] * len(row) if gain is None else gain.tolist()
        exact = (Fraction(v) * r * Fraction(g) for v, g in zip(row, gains, strict=True))
        found.append([float(abs(Fraction(g) - e) / Fraction(u)) for g, e, u in zip(got, exact, ulp, strict=True)])
    return torch.tensor(found, dtype=torch.float64)


def _inverse_rms(row: list[float], eps: float) -> Fraction:
    """1 / sqrt(mean(x^2) + eps), to some 200 bits."""
    v = sum((Fraction(value) ** 2 for value in row), Fraction(0)) / len(row) + Fraction(eps)
    shift = _BITS + max(0, (v.numerator.bit_length() - v.denominator.bit_length()) // 2 + 1)
    return Fraction(isqrt((v.denominator << (2 * shift)) // v.numerator), 2**shift)
