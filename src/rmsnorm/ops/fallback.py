"""The reference behind every operator (library.py): float64, and devices that have no kernels.

Devices without float64 have no reference either. There the operator of the CPU does the work: same bits, and the price
is a copy there and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rmsnorm import checks
from rmsnorm.numerics import blocks, modulation, quantization, reference
from rmsnorm.numerics.rotation import Rotation, rotate, rotate_back
from rmsnorm.numerics.stages import add_residual
from rmsnorm.ops.layouts import laid_out_like, shared_shape
from rmsnorm.spec import NormSpec, check_eps, check_group_size, check_number, check_partial

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64, which the reference needs."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def _or_on_the_cpu(function: _Function) -> _Function:
    @functools.wraps(function)
    def call(x: Tensor, *arguments: Any) -> Any:
        if has_float64(x.device):
            return function(x, *arguments)
        moved = [a.cpu() if isinstance(a, Tensor) else a for a in (x, *arguments)]
        results = getattr(torch.ops.rmsnorm, function.__name__)(*moved)
        return tuple(r if r is None else r.to(x.device) for r in results)

    return cast(_Function, call)


def _rows_of(x: Tensor) -> ModuleType:
    """What computes: on the CPU the reference in blocks of rows, which has its bits."""
    return blocks if x.device.type == "cpu" and x.dtype != torch.float64 else reference


def check(x: Tensor, weight: Tensor | None, spec: NormSpec, *, gate: Tensor | None = None) -> None:
    """What the kernels check: plain PyTorch would broadcast, truncate and go on."""
    checks.check_inputs(x, weight, None)
    check_eps(spec.eps)
    check_number(spec.weight_offset, "weight_offset")
    if spec.group_size:
        check_group_size(spec.group_size, x.shape[-1])
    check_partial(spec.partial or None, x.shape[-1])
    if gate is not None:
        checks.check_gate(gate, x)


def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0) -> Tensor:
    return forward_train(x, weight, eps, weight_offset, rounding)[0]


@_or_on_the_cpu
def forward_train(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    return _normalize(x, None, weight, NormSpec(eps, weight_offset, rounding))


def forward_out(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, weight_offset: float = 0.0, rounding: int = 0
) -> None:
    _write(out, x, weight, forward(x, weight, eps, weight_offset, rounding))


@_or_on_the_cpu
def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return _add_and_normalize(x, residual, weight, NormSpec(eps, weight_offset, rounding))


@_or_on_the_cpu
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
    spec = NormSpec(0.0, weight_offset)
    dx, _, dweight = _rows_of(given).backward(dy, x, None, rstd, weight, dh, spec, need_dweight)
    return laid_out_like(given, dx) if need_dx else None, dweight


def gated_forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    return gated_forward_train(x, gate, weight, *options)[0]


@_or_on_the_cpu
def gated_forward_train(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return _normalize(x, gate, weight, NormSpec(*options))


def gated_forward_out(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> None:
    *fields, out = options
    y = gated_forward(x, gate, weight, *fields)
    if gate is not None:
        checks.check_apart(out, gate, "gate")
    _write(out, x, weight, y)


@_or_on_the_cpu
def residual_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    eps, weight_offset, rounding, group_size, exact_sum, alpha = options
    spec = NormSpec(eps, weight_offset, rounding, group_size, exact_sum=exact_sum, alpha=alpha)
    return _add_and_normalize(x, residual, weight, spec)


@_or_on_the_cpu
def quantized_forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    *fields, need_norm = options
    spec, scale, quant = NormSpec(*fields[:8]), fields[8], quantization.QuantSpec(*fields[9:])
    if residual is None:
        y, h = _normalize(x, gate, weight, spec)[0], None
    else:
        y, h, _ = _add_and_normalize(x, residual, weight, spec)
    return *quantization.quantize(y, scale, quant), y if need_norm else None, h


@_or_on_the_cpu
def norm_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    spec = NormSpec(eps, weight_offset, rounding)
    n, rstd = _normalize(x, None, weight, spec)
    checks.check_residual(residual, x)
    return laid_out_like(x, add_residual(n, residual, spec)[0]), rstd


@_or_on_the_cpu
def norm_add_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, next_weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    eps, next_eps, *rest = options
    n, rstd = _normalize(x, None, weight, NormSpec(eps, *rest))
    y, h, next_rstd = _add_and_normalize(n, residual, next_weight, NormSpec(next_eps, *rest))
    return y, h, rstd, next_rstd


@_or_on_the_cpu
def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    *options: Any,
) -> Gradients:
    weight_offset, group_size, activation, gate_first, *needed = options
    spec = NormSpec(0.0, weight_offset, 0, group_size, activation, gate_first)
    need_dx, need_dgate, need_dweight = needed
    dx, dgate, dweight = _rows_of(x).backward(dy, x, gate, rstd, weight, dh, spec, need_dweight)
    return (
        laid_out_like(x, dx) if need_dx else None,
        laid_out_like(x, dgate) if need_dgate and dgate is not None else None,
        dweight,
    )


def _normalize(x: Tensor, gate: Tensor | None, weight: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    check(x, weight, spec, gate=gate)
    y, rstd = _rows_of(x).forward(x, gate, weight, spec)
    return laid_out_like(x, y), rstd.contiguous()


def _add_and_normalize(
    x: Tensor, residual: Tensor, weight: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, weight, spec)
    checks.check_residual(residual, x)
    y, h, rstd = _rows_of(x).add_forward(x, residual, weight, spec)
    return laid_out_like(x, y), laid_out_like(x, h), rstd.contiguous()


def _write(out: Tensor, x: Tensor, weight: Tensor | None, y: Tensor) -> None:
    checks.check_out(out, x, weight, y.dtype)
    out.copy_(y)


def modulated_forward(x: Tensor, *arguments: Any) -> Tensor:
    return modulated_forward_train(x, *arguments)[0]


@_or_on_the_cpu
def modulated_forward_train(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    rounding: int = 0,
) -> tuple[Tensor, Tensor]:
    spec = NormSpec(eps, weight_offset, rounding)
    check(x, weight, spec)
    for name, t in (("scale", scale), ("shift", shift)):
        if t is not None:
            checks.check_broadcast(t, x, name)
    y, rstd = modulation.forward(x, weight, scale, shift, spec)
    return laid_out_like(x, y), rstd.contiguous()


@_or_on_the_cpu
def modulated_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, scale: Tensor | None, *options: Any
) -> tuple[Tensor | None, ...]:
    weight_offset, rounding, shared, need_dx, need_dweight, dscale_dtype, dshift_dtype = options
    spec = NormSpec(0.0, weight_offset, rounding)
    dn, *terms = modulation.input_gradients(dy, x, rstd, weight, scale, spec)
    dx = dweight = None
    if need_dx or need_dweight:
        dx, _, dweight = _rows_of(x).backward(dn, x, None, rstd, weight, None, spec, need_dweight)
    shape = shared_shape(x, shared)
    sums = (
        None if dtype is None else modulation.sum_shared(t, shape).to(dtype)
        for t, dtype in zip(terms, (dscale_dtype, dshift_dtype), strict=True)
    )
    return laid_out_like(x, dx) if need_dx and dx is not None else None, dweight, *sums


@_or_on_the_cpu
def rotary_forward(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    spec, rotation = NormSpec(*options[:3]), Rotation(*options[3:])
    checks.check_angles(cos, sin, x, checks.check_rotary_dim(rotation.dim, x))
    if x.is_cuda and x.dtype != torch.float64:  # which may have kernels for the norm
        n, rstd = torch.ops.rmsnorm.forward_train(x, weight, *spec[:3])
    else:
        n, rstd = _normalize(x, None, weight, spec)
    return laid_out_like(x, rotate(n, cos, sin, rotation)), rstd


def rotary_forward_out(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, *options: Any) -> None:
    *others, out = options
    y, _ = rotary_forward(x, weight, cos, sin, *others)
    for name, t in (("cos", cos), ("sin", sin)):
        checks.check_apart(out, t, name)
    _write(out, x, weight, y)


@_or_on_the_cpu
def rotary_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, *options: Any
) -> tuple[Tensor | None, Tensor | None]:
    weight_offset, *rotation, need_dx, need_dweight = options
    dn = rotate_back(dy, cos, sin, Rotation(*rotation))
    norm_backward = torch.ops.rmsnorm.backward if x.is_cuda and x.dtype != torch.float64 else backward
    dx, dweight = norm_backward(dn, x, rstd, weight, weight_offset, None, None, need_dx, need_dweight)
    return dx, dweight


def partial_forward(x: Tensor, *arguments: Any) -> Tensor:
    return partial_forward_train(x, *arguments)[0]


@_or_on_the_cpu
def partial_forward_train(x: Tensor, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return _normalize(x, None, weight, partial_spec(*options))


@_or_on_the_cpu
def partial_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor | None, Tensor | None]:
    weight_offset, partial, need_dx, need_dweight = options
    spec = partial_spec(0.0, weight_offset, 0, partial)
    dx, _, dweight = _rows_of(x).backward(dy, x, None, rstd, weight, None, spec, need_dweight)
    return laid_out_like(x, dx) if need_dx else None, dweight


def partial_spec(eps: float, weight_offset: float, rounding: int, partial: int) -> NormSpec:
    """Of a norm whose options these are."""
    return NormSpec(eps, weight_offset, rounding, partial=partial)
