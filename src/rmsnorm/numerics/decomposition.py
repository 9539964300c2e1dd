"""RMSNorm as its textbook formula, in ordinary differentiable PyTorch operations.

Derivatives of higher order, functorch transforms, exporters and tensor subclasses take this way: they need operations
they know. It follows the same roundings as the kernels, and differs from them by the order of its sums alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm.numerics import gated_reference, reference


def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, rounding: str) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last dimension."""
    if exporting() and _is_one_operator(x, weight):
        gain = weight if weight is None or weight_offset == 0 else weight + weight_offset
        return torch.nn.functional.rms_norm(x, x.shape[-1:], gain, eps)
    compute = reference.compute_dtype(x)
    wide = x.to(compute)
    x_hat = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    x_hat = reference.round_x_hat(x_hat, x, weight, rounding)
    if weight is not None:
        x_hat = x_hat * reference._gain(weight, weight_offset, compute)
    return x_hat.to(reference.result_dtype(x, weight, rounding))


def exporting() -> bool:
    """Whether `torch.export` is looking."""
    # The flag itself: in all that torch 2.10 compiles, torch.compiler.is_exporting() is True.
    return torch.compiler._is_exporting_flag


def _is_one_operator(x: Tensor, weight: Tensor | None) -> bool:
    """Whether exporters have a single operator for it: `aten.rms_norm`, which ONNX has as RMSNormalization.

    That one rounds a 16-bit x_hat before the weight multiplies it, by the standard, and after it in onnxruntime.
    """
    return x.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == x.dtype)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, dh: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dx and dweight as functions that can be differentiated again (docs/math.md)."""
    compute = reference.compute_dtype(x)
    wide, g = x.to(compute), dy.to(compute)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    x_hat = wide * rstd
    u = g if weight is None else g * reference._gain(weight, weight_offset, compute)
    dx = rstd * (u - x_hat * (u * x_hat).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + dh.to(compute)
    dweight = None if weight is None else (g * x_hat).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return dx.to(x.dtype), dweight


def gated_forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: str,
    group_size: int,
    activation: str,
    norm_before_gate: bool,
) -> Tensor:
    """The norms of gated_reference.py: over groups of the last dimension, and with a gate before or after."""
    compute = reference.compute_dtype(x)
    u = x.to(compute)
    act = None
    if gate is not None:
        z = gate.to(compute)
        act = torch.sigmoid(z) if activation == "sigmoid" else z * torch.sigmoid(z)
    if act is not None and not norm_before_gate:
        u = u * act
    u = u.reshape(*u.shape[:-1], u.shape[-1] // group_size, group_size)
    y = (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = reference.round_x_hat(y, x, weight, rounding)
    if weight is not None:
        y = y * reference._gain(weight, weight_offset, compute)
    if act is not None and norm_before_gate:
        if rounding != "once":
            y = y.to(reference.result_dtype(x, weight, rounding)).to(compute)
        y = y * act
    return y.to(gated_reference.result_dtype(x, gate, weight, rounding, norm_before_gate))
