"""What every operator's results look like, for tracing and the meta device; the values are nobody's business here.

The dispatcher comes here when any argument is on the meta device, without the kernels' checks: they are made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm import checks
from rmsnorm.numerics import reference
from rmsnorm.numerics.quantization import QuantSpec
from rmsnorm.ops.fallback import Gradients, check, partial_spec
from rmsnorm.ops.layouts import like, rstd_like, shared_shape
from rmsnorm.spec import NormSpec


def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0) -> Tensor:
    return _y(x, None, weight, NormSpec(eps, weight_offset, rounding))


def forward_train(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    spec = NormSpec(eps, weight_offset, rounding)
    return _y(x, None, weight, spec), rstd_like(x, spec)


def forward_out(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, weight_offset: float = 0.0, rounding: int = 0
) -> None:
    forward(x, weight, eps, weight_offset, rounding)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return _sum_and_y(x, residual, weight, NormSpec(eps, weight_offset, rounding))


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
    dx = like(x, rebuilt_dtype or x.dtype) if need_dx else None
    return dx, _dweight(x, rstd, weight) if need_dweight else None


def gated_forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    return _y(x, gate, weight, NormSpec(*options))


def gated_forward_train(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    spec = NormSpec(*options)
    return _y(x, gate, weight, spec), rstd_like(x, spec)


def gated_forward_out(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> None:
    gated_forward(x, gate, weight, *options[:-1])


def residual_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    eps, weight_offset, rounding, group_size, exact_sum, alpha = options
    spec = NormSpec(eps, weight_offset, rounding, group_size, exact_sum=exact_sum, alpha=alpha)
    return _sum_and_y(x, residual, weight, spec)


def quantized_forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    *fields, need_norm = options
    spec, quant = NormSpec(*fields[:8]), QuantSpec(*fields[9:])
    y = _y(x, gate, weight, spec)
    blocks = x.shape[-1] // (quant.block_size or x.shape[-1])
    q, scale = x.new_empty(x.shape, dtype=quant.dtype), x.new_empty((*x.shape[:-1], blocks), dtype=quant.scale_dtype)
    return q, scale, y if need_norm else None, None if residual is None else like(x, residual.dtype)


def norm_add_forward(x: Tensor, residual: Tensor, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    spec = NormSpec(*options)
    if any(t is not None and t.is_meta for t in (x, residual, weight)):
        check(x, weight, spec)
        checks.check_residual(residual, x)
    return like(x, residual.dtype), rstd_like(x, spec)


def norm_add_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    next_eps: float,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = NormSpec(eps, *options)
    h, rstd = norm_add_forward(x, residual, weight, *spec[:3])
    if next_weight is not None and (x.is_meta or next_weight.is_meta):
        checks.check_next_weight(next_weight, x)
    n = _y(x, None, weight, spec)
    return _y(n, None, next_weight, spec._replace(eps=next_eps)), h, rstd, rstd_like(x, spec)


def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    *options: Any,
) -> Gradients:
    need_dx, need_dgate, need_dweight = options[-3:]
    return (
        like(x, x.dtype) if need_dx else None,
        like(x, gate.dtype) if need_dgate and gate is not None else None,
        _dweight(x, rstd, weight) if need_dweight else None,
    )


def _y(x: Tensor, gate: Tensor | None, weight: Tensor | None, spec: NormSpec) -> Tensor:
    if any(t is not None and t.is_meta for t in (x, gate, weight)):
        check(x, weight, spec, gate=gate)
    return like(x, reference.y_dtype(x.dtype, gate, weight, spec))


def _sum_and_y(x: Tensor, residual: Tensor, weight: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_meta or residual.is_meta:
        check(x, weight, spec)
        checks.check_residual(residual, x)
    return _y(x, None, weight, spec), like(x, residual.dtype), rstd_like(x, spec)


def _dweight(x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[-1], dtype=rstd.dtype if weight is None else weight.dtype)


def modulated_forward(x: Tensor, *arguments: Any) -> Tensor:
    return modulated_forward_train(x, *arguments)[0]


def modulated_forward_train(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, shift: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    spec = NormSpec(*options)
    for name, t in (("scale", scale), ("shift", shift)):
        if t is not None and (x.is_meta or t.is_meta):
            checks.check_broadcast(t, x, name)
    return _y(x, None, weight, spec), rstd_like(x, spec)


def modulated_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, scale: Tensor | None, *options: Any
) -> tuple[Tensor | None, ...]:
    _weight_offset, _rounding, shared, need_dx, need_dweight, *dtypes = options
    shape = shared_shape(x, shared)
    return (
        like(x, x.dtype) if need_dx else None,
        _dweight(x, rstd, weight) if need_dweight else None,
        *(None if dtype is None else x.new_empty(shape, dtype=dtype) for dtype in dtypes),
    )


def rotary_forward(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    spec, (rotary_dim, *_) = NormSpec(*options[:3]), options[3:]
    if any(t.is_meta for t in (x, cos, sin)):
        checks.check_angles(cos, sin, x, checks.check_rotary_dim(rotary_dim, x))
    return _y(x, None, weight, spec), rstd_like(x, spec)


def rotary_forward_out(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, *options: Any) -> None:
    rotary_forward(x, weight, cos, sin, *options[:-1])


def rotary_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor | None, Tensor | None]:
    need_dx, need_dweight = options[-2:]
    return like(x, x.dtype) if need_dx else None, _dweight(x, rstd, weight) if need_dweight else None


def partial_forward(x: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    return _y(x, None, weight, partial_spec(*options))


def partial_forward_train(x: Tensor, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    spec = partial_spec(*options)
    return _y(x, None, weight, spec), rstd_like(x, spec)


def partial_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor | None, Tensor | None]:
    need_dx, need_dweight = options[-2:]
    return like(x, x.dtype) if need_dx else None, _dweight(x, rstd, weight) if need_dweight else None
