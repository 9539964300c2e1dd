"""Calls whose arguments are checked before anything else: all that the fast paths of functional do not take."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from rmsnorm import checks, dispatch
from rmsnorm.numerics import reference
from rmsnorm.ops import doors
from rmsnorm.spec import NormSpec, check_group_size, make_spec


def normalize(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    spec: NormSpec,
    normalized_shape: int | Sequence[int] | None = None,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y, and h when there is a residual: tensors checked, every kind of them, gradients included."""
    dims = _check_tensors(x, residual, gate, weight, spec, normalized_shape)
    shape = x.shape
    if dims > 1:
        x = x.flatten(-dims)
        residual, gate = (t if t is None else t.flatten(-dims) for t in (residual, gate))
        weight = None if weight is None else weight.flatten()
    y, h = dispatch.normalize(x, residual, gate, weight, spec, memory_efficient)
    if dims > 1:
        y, h = y.reshape(shape), None if h is None else h.reshape(shape)
    return y, h


def spec_of(x: Tensor, eps: Any, **options: Any) -> NormSpec:
    checks.check_tensor(x, "x")
    return make_spec(eps, dtype=x.dtype, **options)


def _check_tensors(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    spec: NormSpec,
    normalized_shape: int | Sequence[int] | None,
) -> int:
    """Whether they fit together; returns how many trailing dimensions are normalised."""
    dims = checks.check_inputs(x, weight, normalized_shape)
    if residual is not None:
        checks.check_residual(residual, x)
    if gate is not None:
        checks.check_gate(gate, x)
    if spec.group_size:
        check_group_size(spec.group_size, prod(x.shape[-dims:]))
    return dims


def write_out(
    out: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    spec: NormSpec,
    normalized_shape: int | Sequence[int] | None,
) -> Tensor:
    """What the fast path does not take, on an operator where it can write to out, else through a copy."""
    if dispatch.differentiating() or torch._C._are_functorch_transforms_active():
        raise ValueError("out is for inference: leave it out inside torch.func transforms and forward-mode derivatives")
    if isinstance(out, Tensor) and dispatch.dispatches_itself(out):
        raise TypeError(f"out must be a plain torch.Tensor, got {type(out).__name__}")
    dims = _check_tensors(x, None, gate, weight, spec, normalized_shape)
    checks.check_out(out, x, weight, reference.y_dtype(x.dtype, gate, weight, spec))
    if gate is not None:
        checks.check_apart(out, gate, "gate")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gate, weight, out)):
        raise ValueError("out is for inference: call under torch.no_grad(), or leave it out where a gradient is needed")
    tensors = [t for t in (x, gate, weight, out) if t is not None]
    plain = all(type(t) in (Tensor, nn.Parameter) and t.dtype != torch.float64 and t.is_contiguous() for t in tensors)
    if torch.compiler.is_compiling() or not plain or out.is_neg() or x.is_neg():
        return out.copy_(normalize(x, None, gate, weight, spec, normalized_shape)[0])
    gate, weight = None if gate is None else gate.flatten(-dims), None if weight is None else weight.flatten()
    doors.forward_out(x.flatten(-dims), gate, weight, out.flatten(-dims), spec)
    if not out.is_inference():
        torch.autograd.graph.increment_version((out,))  # the operator does not: see autograd's check of what it saved
    return out


def explain(error: RuntimeError, tensors: Any, eps: Any, **options: Any) -> NoReturn:
    """Raises what the public face says of arguments that an operator refused; the error itself where they are right."""
    x, residual, gate, weight, out = tensors
    spec = spec_of(x, eps, **options)
    _check_tensors(x, residual, gate, weight, spec, None)
    if out is not None:
        checks.check_out(out, x, weight, reference.result_dtype(x.dtype, weight, spec))
    raise error


def rms_norm_keeping_y(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    *,
    weight_offset: float,
    rounding: str,
    normalized_shape: Sequence[int],
) -> Tensor:
    """`rms_norm` for modules with memory_efficient=True."""
    options: Any = {"weight_offset": weight_offset, "rounding": rounding}
    if is_proxy(x):
        options |= {"normalized_shape": normalized_shape}
        return handle_torch_function(rms_norm_keeping_y, (x,), x, weight, eps, **options)
    return normalize(x, None, None, weight, spec_of(x, eps, **options), normalized_shape, memory_efficient=True)[0]


def is_proxy(x: Any) -> bool:
    """No tensor, but something that stands for one, as those of torch.fx do."""
    return not isinstance(x, Tensor) and has_torch_function((x,))
