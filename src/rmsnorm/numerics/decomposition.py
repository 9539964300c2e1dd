"""The norm as its textbook formula, in ordinary differentiable PyTorch operations.

Derivatives of higher order and in forward mode, exporters and tensor subclasses need operations they know. They
follow the roundings of the kernels, and differ from them by the order of the sums alone. They have the kernels' range:
a row is scaled by a power of two, on which the result does not depend, and which no derivative needs to know of.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rmsnorm.numerics import reference
from rmsnorm.numerics.fixed_sum import compute_dtype
from rmsnorm.numerics.stages import add_residual
from rmsnorm.spec import ACTIVATIONS, ROUNDINGS, NormSpec


def forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, spec: NormSpec) -> Tensor:
    """y of `reference.forward`."""
    if exporting() and gate is None and _is_one_operator(x, weight, spec):
        gain = weight if weight is None or spec.weight_offset == 0 else weight + spec.weight_offset
        return torch.nn.functional.rms_norm(x, x.shape[-1:], gain, spec.eps)
    compute = compute_dtype(x)
    act = None if gate is None else _activate(gate.to(compute), spec)[0]
    u = x if act is None or not spec.gate_first else x.to(compute) * act
    y = _normalize(u, x.dtype, weight, spec)
    if act is not None and not spec.gate_first:
        if ROUNDINGS[spec.rounding] != "once":
            y = y.to(reference.result_dtype(x.dtype, weight, spec)).to(compute)
        y = y * act
    return y.to(reference.y_dtype(x.dtype, gate, weight, spec))


def add_forward(x: Tensor, residual: Tensor, weight: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """y and h of `reference.add_forward`."""
    h, u = add_residual(x, residual, spec)
    if exporting() and u.dtype == x.dtype:
        return forward(u, None, weight, spec), h
    return _normalize(u, x.dtype, weight, spec).to(reference.result_dtype(x.dtype, weight, spec)), h


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    dh: Tensor | None,
    spec: NormSpec,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dgate and dweight of `reference.backward`, as functions that can be differentiated again (docs/math.md)."""
    compute = compute_dtype(x)
    wide, g = x.to(compute), dy.to(compute)
    act = slope = dgate = None
    if gate is not None:
        act, slope = _activate(gate.to(compute), spec)
    u = wide if act is None or not spec.gate_first else wide * act
    x_hat, rstd = _x_hat(u, spec)
    scale = None if weight is None else reference.gain(weight, spec.weight_offset, compute)
    if act is not None and slope is not None and not spec.gate_first:
        dgate = g * (x_hat if scale is None else x_hat * scale) * slope
        g = g * act
    dx = _project(g if scale is None else g * scale, x_hat, rstd, spec)
    if act is not None and slope is not None and spec.gate_first:
        dx, dgate = dx * act, dx * wide * slope
    if dh is not None:
        dx = dx + dh.to(compute)
    dweight = None if weight is None else (g * x_hat).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return dx.to(x.dtype), None if gate is None or dgate is None else dgate.to(gate.dtype), dweight


def tangent(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    spec: NormSpec,
    dx: Tensor | None,
    dgate: Tensor | None,
    dweight: Tensor | None,
    x_dtype: torch.dtype | None = None,
) -> Tensor:
    """The derivative of `forward` in the direction of dx, dgate and dweight, None where they are zero.

    Of y of `add_forward` too, where x is h and `x_dtype` the dtype of its x.
    """
    compute = compute_dtype(x)
    act, dact = torch.ones((), dtype=compute, device=x.device), None
    if gate is not None:
        act, slope = _activate(gate.to(compute), spec)
        dact = None if dgate is None else dgate.to(compute) * slope
    u, du = x.to(compute), None if dx is None else dx.to(compute)
    if gate is not None and spec.gate_first:
        du = _sum(None if du is None else du * act, None if dact is None else u * dact)
        u = u * act
    x_hat, rstd = _x_hat(u, spec)
    dx_hat = None if du is None else _project(du, x_hat, rstd, spec, transposed=False)
    y, dy = x_hat, dx_hat
    if weight is not None:
        scale = reference.gain(weight, spec.weight_offset, compute)
        from_weight = None if dweight is None else x_hat * dweight.to(compute)
        y, dy = x_hat * scale, _sum(None if dx_hat is None else dx_hat * scale, from_weight)
    if gate is not None and not spec.gate_first:
        dy = _sum(None if dy is None else dy * act, None if dact is None else y * dact)
    result = reference.y_dtype(x_dtype or x.dtype, gate, weight, spec)
    return torch.zeros_like(x, dtype=result) if dy is None else dy.to(result)


def exporting() -> bool:
    """Whether `torch.export` is looking."""
    # The flag itself: in all that torch 2.10 compiles, torch.compiler.is_exporting() is True.
    return torch.compiler._is_exporting_flag


def _is_one_operator(x: Tensor, weight: Tensor | None, spec: NormSpec) -> bool:
    """Whether exporters have a single operator for it: `aten.rms_norm`, which ONNX has as RMSNormalization.

    That one rounds a 16-bit x_hat before the weight multiplies it, by the standard, and after it in onnxruntime.
    """
    plain = spec.group_size in (0, x.shape[-1]) and not spec.partial and (weight is None or weight.dtype == x.dtype)
    return plain and x.dtype in (torch.float32, torch.float64)


def _normalize(u: Tensor, x_dtype: torch.dtype, weight: Tensor | None, spec: NormSpec) -> Tensor:
    compute = compute_dtype(u)
    x_hat = reference.round_x_hat(_x_hat(u.to(compute), spec)[0], x_dtype, weight, spec)
    return x_hat if weight is None else x_hat * reference.gain(weight, spec.weight_offset, compute)


def _x_hat(u: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """u / rms(u), in u's shape, and 1 / rms(u) of each row, or of each group, which `reference.groups` has."""
    if exporting():  # the formula as it is read
        grouped = reference.groups(u, spec)
        rms = torch.sqrt(reference.counted(grouped, spec).square().mean(-1, keepdim=True) + spec.eps)
        return reference.ungrouped(grouped / rms, spec), 1.0 / rms
    grouped = reference.groups(u, spec)
    scale = _scale(reference.counted(grouped, spec), spec.eps)
    scaled = grouped * scale
    rms = torch.sqrt(reference.counted(scaled, spec).square().mean(-1, keepdim=True) + spec.eps * scale * scale)
    return reference.ungrouped(scaled / rms, spec), scale / rms


def _scale(u: Tensor, eps: float) -> Tensor:
    """A power of two for each row, or nearly one, that brings it near 1; a constant to every derivative."""
    largest = u.detach().abs().amax(-1, keepdim=True)
    limit = 100.0 if u.dtype == torch.float32 else 500.0
    floor = max(math.sqrt(abs(eps)), 2.0**-limit)
    return torch.exp2(-torch.log2(largest.clamp(floor, 2.0**limit)).floor())


def _project(v: Tensor, x_hat: Tensor, rstd: Tensor, spec: NormSpec, *, transposed: bool = True) -> Tensor:
    """The derivative of u / rms(u) applied to v: rstd * (v - x_hat * mean(v * x_hat)).

    It is symmetric, but for partial statistics: `transposed` is what gradients need, and tangents do not.
    """
    v, x_hat = reference.groups(v, spec), reference.groups(x_hat, spec)
    if spec.partial:
        counts = torch.arange(v.shape[-1], device=v.device) < spec.partial
        if transposed:
            return rstd * (v - x_hat * counts * ((v * x_hat).sum(-1, keepdim=True) / spec.partial))
        return rstd * (v - x_hat * ((v * x_hat * counts).sum(-1, keepdim=True) / spec.partial))
    return reference.ungrouped(rstd * (v - x_hat * (v * x_hat).mean(-1, keepdim=True)), spec)


def _activate(z: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """act(z) and its derivative."""
    s = torch.sigmoid(z)
    if ACTIVATIONS[spec.activation] == "sigmoid":
        return s, s * (1.0 - s)
    return z * s, s * (1.0 + z * (1.0 - s))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
