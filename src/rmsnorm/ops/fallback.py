"""The operators in plain PyTorch: what they are where there are no kernels; reference.py is what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm import checks
from rmsnorm.numerics import gated_reference, reference
from rmsnorm.ops.layouts import laid_out_like


def check(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> None:
    """What the kernels check: plain PyTorch would broadcast, truncate and go on."""
    checks.check_inputs(x, weight, None)
    checks.check_eps(eps)
    checks.check_weight_offset(weight_offset)


def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0) -> Tensor:
    return forward_train(x, weight, eps, weight_offset, rounding)[0]


def forward_train(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    check(x, weight, eps, weight_offset)
    y, rstd = reference.forward(x, weight, eps, weight_offset, reference.ROUNDINGS[rounding])
    return laid_out_like(x, y), rstd.contiguous()


def forward_out(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, weight_offset: float = 0.0, rounding: int = 0
) -> None:
    y = forward(x, weight, eps, weight_offset, rounding)
    checks.check_out(out, x, weight, y.dtype)
    out.copy_(y)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, weight, eps, weight_offset)
    checks.check_residual(x, residual)
    y, h, rstd = reference.add_forward(x, residual, weight, eps, weight_offset, reference.ROUNDINGS[rounding])
    return laid_out_like(x, y), laid_out_like(x, h), rstd.contiguous()


def backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    dh: Tensor | None,
    rebuilt_dtype: torch.dtype | None,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    given = x
    if rebuilt_dtype is not None:
        x = reference.rebuild(x, rstd, weight, weight_offset, rebuilt_dtype)
    dx, dweight = reference.backward(dy, x, rstd, weight, weight_offset, dh)
    return (
        laid_out_like(given, dx) if need_dx else None,
        dweight if need_dweight else None,
    )


# ---------------------------------------------------------------- gated and grouped

# eps, weight_offset, rounding, group_size, activation, gate_first
Options = tuple[float, float, int, int, int, bool]


def named(options: Options) -> tuple[float, float, str, int, str, bool]:
    """The options as the reference and the formula take them: names instead of indices."""
    eps, weight_offset, rounding, group_size, activation, gate_first = options
    names = reference.ROUNDINGS[rounding], gated_reference.ACTIVATIONS[activation]
    return eps, weight_offset, names[0], group_size, names[1], not gate_first


def check_gated(x: Tensor, gate: Tensor | None, weight: Tensor | None, options: Options) -> None:
    """What the kernels check: plain PyTorch would broadcast, truncate and go on."""
    eps, weight_offset, _, group_size, _, _ = options
    check(x, weight, eps, weight_offset)
    checks.check_group_size(group_size or None, x.shape[-1])
    if gate is not None:
        checks.check_gate(gate, x)


def gated_forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    return gated_forward_train(x, gate, weight, *options)[0]


def gated_forward_train(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    check_gated(x, gate, weight, options)
    y, rstd = gated_reference.forward(x, gate, weight, *named(_with_group_size(x, options)))
    return laid_out_like(x, y), rstd.contiguous()


def _with_group_size(x: Tensor, options: Any) -> Options:
    """The options of a forward, group_size 0 replaced by the whole row that it means."""
    return *options[:3], options[3] or x.shape[-1], *options[4:]


def gated_forward_out(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> None:
    *options, out = options  # type: ignore[assignment]
    y = gated_forward(x, gate, weight, *options)
    checks.check_out(out, x, weight, y.dtype)
    if gate is not None:
        checks.check_out(out, gate, None, y.dtype)
    out.copy_(y)


def residual_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    exact_sum: bool,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (eps, weight_offset, rounding, group_size, 0, False)
    check_gated(x, None, weight, options)
    compute = reference.compute_dtype(x)
    branch = x if alpha == 1 else x * alpha
    total = branch.to(compute) + residual.to(compute)
    h = total.to(residual.dtype)
    u = total if exact_sum else h.to(compute)
    size, convention = group_size or x.shape[-1], reference.ROUNDINGS[rounding]
    x_hat, rstd = gated_reference.forward(u, None, None, eps, 0.0, "once", size, "silu", True)
    y = reference.round_x_hat(x_hat, x, weight, convention)
    if weight is not None:
        y = y * reference._gain(weight, weight_offset, compute)
    y = y.to(reference.result_dtype(x, weight, convention))
    return laid_out_like(x, y), laid_out_like(x, h), rstd.contiguous()


def gated_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, rstd: Tensor, weight: Tensor | None, dh: Tensor | None, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    weight_offset, group_size, activation, gate_first, need_dx, need_dgate, need_dweight = options
    name = gated_reference.ACTIVATIONS[activation]
    dx, dgate, dweight = gated_reference.backward(
        dy, x, gate, rstd, weight, weight_offset, group_size or x.shape[-1], name, not gate_first, dh
    )
    return (
        laid_out_like(x, dx) if need_dx else None,
        laid_out_like(x, dgate) if need_dgate and dgate is not None else None,
        dweight if need_dweight else None,
    )
