"""RMSNorm forward and backward in plain PyTorch: the definition of every bit the kernels produce.

Each function works on any device that has float64, differs from a kernel in speed alone, and can be traced by
`torch.compile`. Rows are the last dimension; `d` is its length, `m` the largest magnitude in the row.

The two sums of RMSNorm are taken in fixed point, so that their order cannot matter (docs/numerics.md):

    fixed_sum(t) = q * sum_i floor(t_i / q),    q = 2^(E + ceil(log2 d) - 51),    |t_i| <= 2^E

Everything else is one IEEE operation after another, in float32 (float64 for float64 inputs), and nothing is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Where x_hat is rounded before the weight multiplies it, and which dtype comes out (docs/numerics.md, "families").
ROUNDINGS = ("once", "before_scale", "weight_dtype")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def result_dtype(x: Tensor, weight: Tensor | None, rounding: str) -> torch.dtype:
    """The dtype of `y`: x's, the promotion of x and weight, or the weight's."""
    if weight is None or rounding == "once":
        return x.dtype
    return weight.dtype if rounding == "weight_dtype" else torch.promote_types(x.dtype, weight.dtype)


def round_x_hat(x_hat: Tensor, x: Tensor, weight: Tensor | None, rounding: str) -> Tensor:
    """x_hat as the weight multiplies it: rounded to x's dtype, to the weight's if that has 16 bits, or not at all."""
    rounded = x_hat
    if rounding == "before_scale":
        rounded = x_hat.to(x.dtype)
    elif rounding == "weight_dtype" and weight is not None and weight.dtype.itemsize == 2:
        rounded = x_hat.to(weight.dtype)
    return rounded.to(x_hat.dtype)


def leaves(rows: int) -> int:
    """How many leaves the sum over so many rows has: a power of two, so that none has more than 64 rows."""
    return int(1 << ((max(rows, 1) + 63) // 64 - 1).bit_length())


class Row:
    """What is taken over a whole row: its length, magnitudes, sums. sharding.py has rows in pieces on several ranks."""

    def length(self, piece: Tensor) -> int:
        return piece.shape[-1]

    def largest(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        """The largest magnitude in each."""
        return tuple(piece.abs().amax(-1, keepdim=True) for piece in pieces)

    def total(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        """The sum of each, all integers."""
        return tuple(piece.sum(-1, keepdim=True) for piece in pieces)


WHOLE = Row()


def forward(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, rounding: str, row: Row = WHOLE
) -> tuple[Tensor, Tensor]:
    """Normalises the last dimension.

    S    = fixed_sum(x^2)
    rstd = 1 / sqrt(S * (1/d) + eps)                in float64, then rounded to the computation dtype
    y    = (x * rstd) * (weight + weight_offset)    x * rstd is rounded first where `rounding` says so

    Args:
        x: (..., d).
        weight: (d,) or None.

    Returns:
        y (..., d) and rstd (..., 1), the latter in the computation dtype.
    """
    rstd = _inverse_rms(x, eps, row)
    x_hat = x.to(rstd.dtype) * rstd
    x_hat = round_x_hat(x_hat, x, weight, rounding)
    y = x_hat if weight is None else x_hat * _gain(weight, weight_offset, rstd.dtype)
    return y.to(result_dtype(x, weight, rounding)), rstd


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + residual, rounded to x's dtype; y = forward(h). Returns y, h (..., d) and rstd (..., 1)."""
    h = (x.to(compute_dtype(x)) + residual.to(compute_dtype(x))).to(x.dtype)
    y, rstd = forward(h, weight, eps, weight_offset, rounding)
    return y, h, rstd


def backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, weight_offset: float, dh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `forward`, and of `add_forward` when `dh`, the gradient of h, is given (docs/math.md).

    u       = dy * gain
    c       = fixed_sum(u * x)
    k       = rstd * c * (1/d)                      in float64, then rounded; this is mean(u * x_hat)
    dx      = rstd * (u - x_hat * k)  [+ dh]
    dweight = sum over rows of dy * x_hat           as `sum_rows` adds

    Returns:
        dx (..., d) in x's dtype and dweight (d,) in the weight's dtype (the computation dtype without a weight).
    """
    dx = input_gradient(dy, x, rstd, weight, weight_offset, dh)
    dweight = sum_rows(dy.to(rstd.dtype) * (x.to(rstd.dtype) * rstd))
    return dx, dweight if weight is None else dweight.to(weight.dtype)


def input_gradient(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    dh: Tensor | None = None,
    row: Row = WHOLE,
) -> Tensor:
    """The dx of `backward`."""
    compute = rstd.dtype
    x_wide, g = x.to(compute), dy.to(compute)
    u = g if weight is None else g * _gain(weight, weight_offset, compute)
    k = (rstd.double() * _row_dot(u, x_wide, row) * (1.0 / row.length(x))).to(compute)
    dx = rstd * (u - x_wide * rstd * k)
    if dh is not None:
        dx = dx + dh.to(compute)
    return dx.to(x.dtype)


def rebuild(y: Tensor, rstd: Tensor, weight: Tensor | None, weight_offset: float, x_dtype: torch.dtype) -> Tensor:
    """x = y / gain / rstd, rounded to `x_dtype`: undoes `forward` where no gain is zero (memory_efficient)."""
    x_hat = y.to(rstd.dtype)
    if weight is not None:
        x_hat = x_hat / _gain(weight, weight_offset, rstd.dtype)
    return (x_hat / rstd).to(x_dtype)


def _gain(weight: Tensor, weight_offset: float, compute: torch.dtype) -> Tensor:
    gain = weight.to(compute)
    return gain + weight_offset if weight_offset else gain  # adding 0 would turn -0 into +0


def _inverse_rms(x: Tensor, eps: float, row: Row = WHOLE) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), scaled by powers of two so that nothing leaves float64's range.

    The sum by the row's own, whose square its quantum goes with; mean and eps by that of the larger of the two.
    """
    wide = x.double()
    (largest,) = row.largest(wide)
    exponent = _exponent(largest)
    scaled = wide * _power_of_two(-exponent)
    total = _fixed_sum(scaled * scaled, row, two_quanta=x.dtype == torch.float64)
    common = torch.maximum(exponent, (_exponent(torch.full_like(largest, abs(eps))) + 1) // 2)
    mean = total * (1.0 / row.length(x)) * _power_of_two(exponent - common) * _power_of_two(exponent - common)
    variance = mean + eps * _power_of_two(-common) * _power_of_two(-common)
    rstd = _ieee_rsqrt(variance) * _power_of_two(-common)
    # An infinite or NaN row has no quantum: S = m * m, and rstd is 0 or NaN.
    rstd = torch.where(largest.isfinite(), rstd, _ieee_rsqrt(largest * largest))
    return rstd.to(compute_dtype(x))


def _row_dot(u: Tensor, x: Tensor, row: Row = WHOLE) -> Tensor:
    """fixed_sum(u * x) per row as float64; NaN where either row is not finite."""
    u_wide, x_wide = u.double(), x.double()
    u_max, x_max = row.largest(u_wide, x_wide)
    u_exponent, x_exponent = _exponent(u_max), _exponent(x_max)
    terms = (u_wide * _power_of_two(-u_exponent)) * (x_wide * _power_of_two(-x_exponent))
    total = _fixed_sum(terms, row, two_quanta=u.dtype == torch.float64)
    total = total * _power_of_two(u_exponent) * _power_of_two(x_exponent)
    return torch.where(u_max.isfinite() & x_max.isfinite(), total, torch.nan)


def _fixed_sum(terms: Tensor, row: Row = WHOLE, *, two_quanta: bool) -> Tensor:
    """Sum of float64 terms of magnitude at most 1: floored to multiples of 2^(L - 51), every partial sum is exact.

    The terms of float64 inputs lose more bits to the floor than float64 results may: what the floor leaves of them
    is summed with a second, smaller quantum.
    """
    quanta_per_unit = 2.0 ** (51 - (row.length(terms) - 1).bit_length())
    counts = torch.floor(terms * quanta_per_unit)
    if not two_quanta:
        (total,) = row.total(counts)
        return total / quanta_per_unit
    rest = torch.floor((terms * quanta_per_unit - counts) * quanta_per_unit)
    total, total_rest = row.total(counts, rest)
    return total / quanta_per_unit + total_rest / quanta_per_unit**2


def sum_rows(terms: Tensor) -> Tensor:
    """Sum of (..., d) over all rows as a binary tree: row after row within its leaves, and from there on in pairs.

    leaf i = the rows from i * rows // leaves to (i + 1) * rows // leaves

    The sum of twice as many rows is the sum of the first half plus the sum of the second: what ranks with equal shares
    of the rows have are nodes of the tree (sharded_rows.py).
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


def _exponent(magnitude: Tensor) -> Tensor:
    """The e with magnitude < 2^e <= 2 * magnitude, read from the bits: `torch.frexp` calls infinity's exponent 0.

    Kept where 2^e and 2^-e are normal float64 numbers; only float64 inputs reach those ends.
    """
    return ((magnitude.view(torch.int64) >> 52) - 1022).clamp(-400, 1022)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def _ieee_rsqrt(v: Tensor) -> Tensor:
    # On the CPU torch.sqrt calls a vector library whose last bit is off in about 1 % of long float64 tensors, while
    # torch.rsqrt is a correctly rounded square root and division; elsewhere it is the other way round.
    return torch.rsqrt(v) if v.device.type == "cpu" else 1.0 / torch.sqrt(v)
