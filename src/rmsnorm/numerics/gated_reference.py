"""The gated and grouped norms in plain PyTorch: the definition of every bit their kernels produce.

As reference.py, whose parts it uses: rows are the last dimension, statistics are taken over its groups of `group_size`.

    norm before gate:    y = norm(x) * act(gate)
    gate before norm:    y = norm(x * act(gate))         the product stays in the computation dtype
    act(z) = sigmoid(z)  or  silu(z) = z * sigmoid(z)

The exponential inside sigmoid is made of IEEE operations alone, because the last bit of a library's depends on the
library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm.numerics import reference

ACTIVATIONS = ("silu", "sigmoid")

_LOG2_E = 1.4426950408889634
# 2^f = (p + q) / (p - q) for |f| <= 1/2, right to within 2^-38: the Pade approximant [4/4] of exp(r), r = f * ln(2),
# with p = r^4 + 180 r^2 + 1680 and q = 20 r^3 + 840 r, both divided by ln(2)^4.
_P_2, _P_0, _Q_3, _Q_1 = 374.6464165810094, 7277.922682955102, 28.85390081777927, 2522.3357940118008
# Beyond it the sigmoid is 0 or 1 in float32, and 2^n is an ordinary float64.
_LARGEST = 200.0


def forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: str,
    group_size: int,
    activation: str,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor]:
    """Normalises groups of the last dimension, and multiplies by the gate after or before.

    u     = x * act(gate)  if the gate comes first, else x
    rstd  = 1 / sqrt(fixed_sum(u^2) * (1/group_size) + eps)      per group
    y     = (u * rstd) * (weight + weight_offset)                u * rstd is rounded first where `rounding` says so
    y     = y * act(gate)  if the gate comes last; under those roundings y is rounded to its dtype before

    Args:
        x: (..., d).
        gate: the same shape and dtype, or None.
        weight: (d,) or None.

    Returns:
        y (..., d) and rstd (..., d / group_size), the latter in the computation dtype.
    """
    act = None if gate is None else activate(gate, activation)[0]
    u = _gate_first(x, act, norm_before_gate)
    rstd = reference._inverse_rms(_groups(u, group_size), eps)
    x_hat = (_groups(u, group_size) * rstd).flatten(-2)
    y = reference.round_x_hat(x_hat, x, weight, rounding)
    if weight is not None:
        y = y * reference._gain(weight, weight_offset, rstd.dtype)
    result = result_dtype(x, gate, weight, rounding, norm_before_gate)
    if act is not None and norm_before_gate:
        if rounding != "once":
            y = y.to(reference.result_dtype(x, weight, rounding)).to(rstd.dtype)
        y = y * act
    return y.to(result), rstd.squeeze(-1)


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    group_size: int,
    activation: str,
    norm_before_gate: bool,
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of `forward`, whose intermediate roundings count as the identity (docs/math.md).

    gate last:   dgate = dy * norm * act'(gate),  and the gradient of norm is dy * act(gate)
    gate first:  dx = du * act(gate),             dgate = du * x * act'(gate)

    Returns:
        dx in x's dtype, dgate in the gate's, dweight (d,) in the weight's (the computation dtype without one).
    """
    compute = rstd.dtype
    wide, g = x.to(compute), dy.to(compute)
    act = slope = torch.ones((), dtype=compute)
    if gate is not None:
        act, slope = activate(gate, activation)
    u = wide if gate is None else _gate_first(x, act, norm_before_gate)
    rstd = rstd.unsqueeze(-1)
    x_hat = (_groups(u, group_size) * rstd).flatten(-2)
    gain = None if weight is None else reference._gain(weight, weight_offset, compute)
    dgate = None
    if gate is not None and norm_before_gate:
        normed = x_hat if gain is None else x_hat * gain
        dgate = (g * normed) * slope
        g = g * act
    v = g if gain is None else g * gain
    c = reference._row_dot(_groups(v, group_size), _groups(u, group_size))
    k = (rstd.double() * c * (1.0 / group_size)).to(compute)
    du = (rstd * (_groups(v, group_size) - _groups(x_hat, group_size) * k)).flatten(-2)
    dx = du if dh is None else du + dh.to(compute)
    if gate is not None and not norm_before_gate:
        dx, dgate = du * act, (du * wide) * slope
    dweight = reference.sum_rows(g * x_hat)
    return (
        dx.to(x.dtype),
        None if gate is None or dgate is None else dgate.to(gate.dtype),
        dweight if weight is None else dweight.to(weight.dtype),
    )


def result_dtype(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, rounding: str, norm_before_gate: bool
) -> torch.dtype:
    """The dtype of `y`: the norm's own, but x's where the gate comes last."""
    return x.dtype if gate is not None and norm_before_gate else reference.result_dtype(x, weight, rounding)


def activate(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(gate) and its derivative, in the computation dtype.

    sigmoid' = s * (1 - s),    silu' = s * (1 + z * (1 - s))
    """
    z = gate.to(reference.compute_dtype(gate))
    s = _sigmoid(z)
    if activation == "sigmoid":
        return s, s * (1.0 - s)
    return z * s, s * (1.0 + z * (1.0 - s))


def _sigmoid(z: Tensor) -> Tensor:
    """1 / (1 + exp(-z)) in float64, rounded to z's dtype.

    n + f = z * log2(e), with an integer n;  e = 2^n * (p + q)
    sigmoid(z) = 2^(n + f) / (1 + 2^(n + f)) = e / ((p - q) + e)

    A polynomial as accurate as the quotient takes twice the operations, and the one division would still be there.
    """
    if z.dtype == torch.float64:
        return torch.sigmoid(z)
    exponent = z.clamp(-_LARGEST, _LARGEST).double() * _LOG2_E
    n = torch.round(exponent)
    f = exponent - n
    square = f * f
    p = (square + _P_2) * square + _P_0
    q = (square * _Q_3 + _Q_1) * f
    e = (p + q) * reference._power_of_two(n.nan_to_num().to(torch.int64))
    return (e / ((p - q) + e)).to(z.dtype)


def _gate_first(x: Tensor, act: Tensor | None, norm_before_gate: bool) -> Tensor:
    wide = x.to(reference.compute_dtype(x))
    return wide if act is None or norm_before_gate else wide * act


def _groups(t: Tensor, group_size: int) -> Tensor:
    return t.reshape(*t.shape[:-1], t.shape[-1] // group_size, group_size)
