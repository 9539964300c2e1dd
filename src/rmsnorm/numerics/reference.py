"""The norm and its gradients in plain PyTorch: the definition of every bit the kernels produce.

Each function works on any device that has float64, differs from a kernel in speed alone, and can be traced by
`torch.compile`. Rows are the last dimension; statistics are taken over the row, or over each of its groups.

The two sums of RMSNorm are taken in fixed point, so that their order cannot matter (fixed_sum.py). Everything else is
one IEEE operation after another, in float32 (float64 for float64 inputs), and nothing is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm.numerics.fixed_sum import WHOLE_ROWS, RowReductions, compute_dtype, row_dot, sum_rows
from rmsnorm.numerics.stages import activate, add_residual
from rmsnorm.spec import ROUNDINGS, NormSpec


def forward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, spec: NormSpec, rows: RowReductions = WHOLE_ROWS
) -> tuple[Tensor, Tensor]:
    """Normalises the last dimension or groups of it, and multiplies by the gate after or before.

    u    = x * act(gate)  if the gate comes first, else x
    S    = fixed_sum(u^2)                           of the row, or of each group
    rstd = 1 / sqrt(S * (1/d) + eps)                in float64, then rounded to the computation dtype
    y    = (u * rstd) * (weight + weight_offset)    u * rstd is rounded first where `rounding` says so
    y    = y * act(gate)  if the gate comes last; under those roundings y is rounded to its dtype before

    Returns:
        y (..., d) and rstd (..., groups), the latter in the computation dtype.
    """
    if gate is None:
        return _normalize(x, x.dtype, weight, spec, rows)
    act, _ = activate(gate, spec.activation, compute_dtype(x))
    if spec.gate_first:
        return _normalize(x.to(act.dtype) * act, x.dtype, weight, spec, rows)
    y, rstd = _normalize(x, x.dtype, weight, spec, rows, rounded=ROUNDINGS[spec.rounding] != "once")
    return (y.to(act.dtype) * act).to(x.dtype), rstd


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, spec: NormSpec, rows: RowReductions = WHOLE_ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual sum h (stages.py) and its norm. Returns y (in a dtype that x says), h and rstd."""
    h, u = add_residual(x, residual, spec)
    y, rstd = _normalize(u, x.dtype, weight, spec, rows)
    return y, h, rstd


def _normalize(
    u: Tensor,
    x_dtype: torch.dtype,
    weight: Tensor | None,
    spec: NormSpec,
    rows: RowReductions,
    *,
    rounded: bool = True,
) -> tuple[Tensor, Tensor]:
    """The norm of u, which may be wider than x; `rounded`: to its result's dtype."""
    rstd = rows.inverse_rms(counted(groups(u, spec), spec), spec.eps)
    x_hat = ungrouped(groups(u, spec).to(rstd.dtype) * rstd, spec)
    y = round_x_hat(x_hat, x_dtype, weight, spec)
    if weight is not None:
        y = y * gain(weight, spec.weight_offset, rstd.dtype)
    return y.to(result_dtype(x_dtype, weight, spec)) if rounded else y, rstd.squeeze(-1) if spec.group_size else rstd


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    spec: NormSpec,
    need_dweight: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `forward`, whose intermediate roundings count as the identity (docs/math.md).

    Those of `add_forward` too, where x is h and `dh` its gradient: dx is then the gradient of h.

    gate last:   dgate = dy * norm * act'(gate),  and the gradient of norm is dy * act(gate)
    gate first:  dx = du * act(gate),             dgate = du * x * act'(gate)
    dweight = sum over rows of the norm's gradient * x_hat, as `sum_rows` adds

    Returns:
        dx (..., d) in x's dtype, dgate in the gate's, dweight (d,) in the weight's (the computation dtype without one),
        or None where it is not needed.
    """
    dx, dgate, terms = input_gradients(dy, x, gate, rstd, weight, dh, spec)
    if not need_dweight:
        return dx, dgate, None
    dweight = sum_rows(terms)
    return dx, dgate, dweight if weight is None else dweight.to(weight.dtype)


def input_gradients(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    spec: NormSpec,
    rows: RowReductions = WHOLE_ROWS,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The dx and dgate of `backward`, and the terms whose sum over the rows is dweight.

    v  = dy * gain
    c  = fixed_sum(v * u)
    k  = rstd * c * (1/d)                      in float64, then rounded; this is mean(v * x_hat)
    du = rstd * (v - x_hat * k)  [+ dh]        with partial statistics, k is times 0 where elements do not count
    """
    compute = rstd.dtype
    wide, g = x.to(compute), dy.to(compute)
    act = slope = dgate = None
    if gate is not None:
        act, slope = activate(gate, spec.activation, compute)
    u = wide if act is None or not spec.gate_first else wide * act
    rstd = rstd.unsqueeze(-1) if spec.group_size else rstd
    x_hat = ungrouped(groups(u, spec) * rstd, spec)
    scale = None if weight is None else gain(weight, spec.weight_offset, compute)
    if act is not None and slope is not None and not spec.gate_first:
        dgate = (g * (x_hat if scale is None else x_hat * scale)) * slope
        g = g * act
    v = groups(g if scale is None else g * scale, spec)
    u = groups(u, spec)
    k = (rstd.double() * row_dot(v, u, rows) * (1.0 / rows.length(counted(u, spec)))).to(compute)
    if spec.partial:
        k = k * (torch.arange(x.shape[-1], device=x.device) < spec.partial)
    dx = ungrouped(rstd * (v - groups(x_hat, spec) * k), spec)
    if act is not None and slope is not None and spec.gate_first:
        dx, dgate = dx * act, (dx * wide) * slope
    if dh is not None:
        dx = dx + dh.to(compute)
    return dx.to(x.dtype), None if gate is None or dgate is None else dgate.to(gate.dtype), g * x_hat


def rebuild(y: Tensor, rstd: Tensor, weight: Tensor | None, weight_offset: float, x_dtype: torch.dtype) -> Tensor:
    """x = y / gain / rstd, rounded to `x_dtype`: undoes `forward` where no gain is zero (memory_efficient)."""
    x_hat = y.to(rstd.dtype)
    if weight is not None:
        x_hat = x_hat / gain(weight, weight_offset, rstd.dtype)
    return (x_hat / rstd).to(x_dtype)


def groups(t: Tensor, spec: NormSpec) -> Tensor:
    """(..., d) as (..., groups, group_size), where there are groups."""
    size = spec.group_size
    return t.reshape(*t.shape[:-1], t.shape[-1] // size, size) if size else t


def ungrouped(t: Tensor, spec: NormSpec) -> Tensor:
    """What `groups` made, as it was."""
    return t.reshape(*t.shape[:-2], t.shape[-2] * t.shape[-1]) if spec.group_size else t


def counted(t: Tensor, spec: NormSpec) -> Tensor:
    """The elements that the statistics are of."""
    return t[..., : spec.partial] if spec.partial else t


def gain(weight: Tensor, weight_offset: float, compute: torch.dtype) -> Tensor:
    """What multiplies x_hat."""
    wide = weight.to(compute)
    return wide + weight_offset if weight_offset else wide  # adding 0 would turn -0 into +0


def round_x_hat(x_hat: Tensor, x_dtype: torch.dtype, weight: Tensor | None, spec: NormSpec) -> Tensor:
    """x_hat as the weight multiplies it: rounded to x's dtype, to the weight's if that has 16 bits, or not at all."""
    rounding, rounded = ROUNDINGS[spec.rounding], x_hat
    if rounding == "before_scale":
        rounded = x_hat.to(x_dtype)
    elif rounding == "weight_dtype" and weight is not None and weight.dtype.itemsize == 2:
        rounded = x_hat.to(weight.dtype)
    return rounded.to(x_hat.dtype)


def result_dtype(x_dtype: torch.dtype, weight: Tensor | None, spec: NormSpec) -> torch.dtype:
    """The dtype of a norm's result: x's, the promotion of x and weight, or the weight's."""
    rounding = ROUNDINGS[spec.rounding]
    if weight is None or rounding == "once":
        return x_dtype
    return weight.dtype if rounding == "weight_dtype" else torch.promote_types(x_dtype, weight.dtype)


def y_dtype(x_dtype: torch.dtype, gate: Tensor | None, weight: Tensor | None, spec: NormSpec) -> torch.dtype:
    """The dtype of `y`: the norm's own, but x's where the gate comes last."""
    return x_dtype if gate is not None and not spec.gate_first else result_dtype(x_dtype, weight, spec)
