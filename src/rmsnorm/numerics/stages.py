"""What stands around the norm, in plain PyTorch: the residual sum before it, the gate before or after it.

    residual sum:   s = float(t) + float(residual),   h = s rounded to residual's dtype,   t = x, or x * alpha rounded
    gate:           act(z) = sigmoid(z)  or  silu(z) = z * sigmoid(z)

The exponential inside sigmoid is made of IEEE operations alone, because the last bit of a library's depends on the
library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm.numerics.fixed_sum import compute_dtype, power_of_two
from rmsnorm.spec import ACTIVATIONS, NormSpec

LOG2_E = 1.4426950408889634
# 2^f = (p + q) / (p - q) for |f| <= 1/2, right to within 2^-38: the Pade approximant [4/4] of exp(r), r = f * ln(2),
# with p = r^4 + 180 r^2 + 1680 and q = 20 r^3 + 840 r, both divided by ln(2)^4.
P_2, P_0, Q_3, Q_1 = 374.6464165810094, 7277.922682955102, 28.85390081777927, 2522.3357940118008
# Beyond it the sigmoid is 0 or 1 in float32, and 2^n is an ordinary float64.
LARGEST_EXPONENT = 200.0


def add_residual(x: Tensor, residual: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """The residual sum and what is normalised: h in residual's dtype, and u, which is h or the sum before rounding."""
    compute = compute_dtype(x)
    branch = scale_branch(x, spec)
    s = branch.to(compute) + residual.to(compute)
    h = s.to(residual.dtype)
    return h, s if spec.exact_sum else h


def scale_branch(x: Tensor, spec: NormSpec) -> Tensor:
    """x * alpha in x's dtype; also the gradient of x, of that of the scaled branch."""
    return x if spec.alpha == 1.0 else (x.to(compute_dtype(x)) * spec.alpha).to(x.dtype)


def activate(gate: Tensor, activation: int, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """act(gate) and its derivative, in the computation dtype.

    sigmoid' = s * (1 - s),    silu' = s * (1 + z * (1 - s))
    """
    z = gate.to(compute)
    s = sigmoid(z)
    if ACTIVATIONS[activation] == "sigmoid":
        return s, s * (1.0 - s)
    return z * s, s * (1.0 + z * (1.0 - s))


def sigmoid(z: Tensor) -> Tensor:
    """1 / (1 + exp(-z)) in float64, rounded to z's dtype.

    n + f = z * log2(e), with an integer n;  e = 2^n * (p + q)
    sigmoid(z) = 2^(n + f) / (1 + 2^(n + f)) = e / ((p - q) + e)

    A polynomial as accurate as the quotient takes twice the operations, and the one division would still be there.
    """
    if z.dtype == torch.float64:
        return torch.sigmoid(z)
    exponent = z.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).double() * LOG2_E
    n = torch.round(exponent)
    f = exponent - n
    square = f * f
    p = (square + P_2) * square + P_0
    q = (square * Q_3 + Q_1) * f
    e = (p + q) * power_of_two(n.nan_to_num().to(torch.int64))
    return (e / ((p - q) + e)).to(z.dtype)
