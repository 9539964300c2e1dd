"""The public functions.

Fast path: common calls go directly to an operator, or to the `autograd.Function` around it, whose own checks guard
memory; of what it refuses, checked.py says why. Every other call is checked first, and dispatch.py chooses its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from rmsnorm import checked, checks, dispatch
from rmsnorm.ops import autograd, doors
from rmsnorm.ops.library import operators
from rmsnorm.spec import ACTIVATIONS, ROUNDINGS, NormSpec

_ROUNDINGS = {name: index for index, name in enumerate(ROUNDINGS)}
_ACTIVATIONS = {name: index for index, name in enumerate(ACTIVATIONS)}
_ONCE = ROUNDINGS[0]  # interned, as the default and every literal is
_FLOAT64, _TENSORS = torch.float64, (nn.Parameter, Tensor)
_direct, _on_gpu = operators.direct, operators.gpu
_has_gpu = _on_gpu is not _direct
_forward = _direct.forward
_train = super(torch.autograd.Function, autograd.Norm).apply  # less what Function.apply does for functorch
_functorch_active = torch._C._are_functorch_transforms_active
_forward_mode = torch.autograd.forward_ad
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_count_change = torch.autograd.graph.increment_version  # the operator does not: see autograd's check of what it saved
_new = tuple.__new__  # NormSpec's own constructor costs three times as much


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
    group_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Root mean square normalisation over the trailing dimensions that `weight` spans.

        y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> rms_norm(x, torch.tensor([1.0, 0.5]))
    tensor([[0.8485, 0.5657]])

    Args:
        x: (*, d), float32, bfloat16, float16 or float64, any strides. Computed in float32 (float64 for float64).
        weight: (d,), or several trailing dimensions of x; any of those dtypes. None means a gain of 1, and
            no offset is added to it.
        eps: any finite number, or text that reads as one; None means finfo(computation dtype).eps.
        weight_offset: added to the weight in float32; 1.0 for families that store it as an offset from one (Gemma).
        rounding: where the value is rounded, and to what:
            "once": at the end, to x's dtype (Gemma, OLMo 2, torch.nn.RMSNorm);
            "before_scale": x_hat to x's dtype, then the product to the promotion of x and weight (Llama, Qwen);
            "weight_dtype": x_hat to the weight's dtype if that has 16 bits, and the product to it (T5).
        normalized_shape: the trailing dimensions to normalise over, if weight does not say; the last one by default.
        group_size: how many consecutive elements of a row share their statistics; it divides d. None means all of them.
        out: receives the result; may be x itself. For inference: not together with a gradient.

    Returns:
        y of x's shape, in the dtype that `rounding` says. One row has one answer (docs/numerics.md).

    Raises:
        ValueError: shapes, devices or options that do not fit together.
        TypeError: arguments that are no dense floating-point tensors.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if (  # as _is_common, spelled out: at small sizes these tests are a quarter of the call
        type(x) is Tensor
        and type(eps) is float
        and (weight is None or (type(weight) in _TENSORS and weight.dim() == 1 and weight.dtype is not _FLOAT64))
        and x.dtype is not _FLOAT64
        and normalized_shape is None
        and type(weight_offset) is float
        and (rounding is _ONCE or (type(rounding) is str and rounding in _ROUNDINGS))
        and (group_size is None or (type(group_size) is int and group_size > 0))
        and not _functorch_active()
        and _forward_mode._current_level < 0
        and not _compiling()
        and (out is None or _can_write(out, x, weight))
    ):
        try:
            if out is None and _grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
                if x.is_inference() or (weight is not None and weight.is_inference()):
                    x, weight = dispatch.savable(x, weight)
                fields = eps, weight_offset, _ROUNDINGS[rounding], group_size or 0, 0, False, False, 1.0
                return _train(x, None, None, weight, _new(NormSpec, fields))  # type: ignore[no-any-return]
            if group_size is None and out is None:
                forward = _on_gpu.forward if _has_gpu and x.is_cuda else _forward
                if rounding is _ONCE and weight_offset == 0.0:
                    return forward(x, weight, eps)  # type: ignore[no-any-return]
                return forward(x, weight, eps, weight_offset, _ROUNDINGS[rounding])  # type: ignore[no-any-return]
            spec = NormSpec(eps, weight_offset, _ROUNDINGS[rounding], group_size or 0)
            if out is None:
                return doors.forward(x, None, weight, spec)
            doors.forward_out(x, None, weight, out, spec)
            _count_change((out,))
            return out
        except RuntimeError as error:
            refusal = error
        options: Any = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
        checked.explain(refusal, (x, None, None, weight, out), eps, **options)
    options = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
    if checked.is_proxy(x):
        options |= {"normalized_shape": normalized_shape, "out": out}
        return handle_torch_function(rms_norm, (x,), x, weight, eps, **options)
    spec = checked.spec_of(x, eps, **options)
    if out is not None:
        return checked.write_out(out, x, None, weight, spec, normalized_shape)
    return checked.normalize(x, None, None, weight, spec, normalized_shape)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
    group_size: int | None = None,
    sum: str = "rounded",  # noqa: A002 - as vLLM and STAGES say
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Adds a branch to the residual stream and normalises the sum, in one pass over memory.

        h = x + residual;  y = rms_norm(h, weight, eps)

    >>> y, h = add_rms_norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]))
    >>> h
    tensor([3., 4.])
    >>> torch.equal(y, rms_norm(h))
    True

    Args:
        x: (*, d), as for `rms_norm`.
        residual: of x's shape and device, in a dtype of its own: a stream may be float32 beside 16-bit branches.
        weight, eps, weight_offset, rounding, normalized_shape, group_size: as for `rms_norm`.
        sum: what is normalised, "rounded": h; "exact": the sum before it is rounded to h (vLLM).
        alpha: x * alpha, rounded to x's dtype, is added in x's place (Granite, MiniCPM).

    Returns:
        y in the dtype that x and `rounding` say, and h in the residual's, the next residual (docs/numerics.md).

    Raises:
        ValueError, TypeError: as `rms_norm`; and for a residual that does not match x.
    """
    if (
        type(residual) is Tensor
        and _is_common(x, weight, eps, weight_offset, rounding)
        and normalized_shape is None
        and group_size is None
        and sum == "rounded"
        and type(alpha) is float
        and alpha == 1.0
        and residual.dtype is x.dtype
    ):
        try:
            if _grad_enabled() and (
                x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
            ):
                if weight is not None and weight.is_inference():
                    (weight,) = dispatch.savable(weight)
                spec = _new(NormSpec, (eps, weight_offset, _ROUNDINGS[rounding], 0, 0, False, False, 1.0))
                return _train(x, residual, None, weight, spec)  # type: ignore[no-any-return]
            add_forward = (_on_gpu if _has_gpu and x.is_cuda else _direct).add_forward
            if weight_offset == 0.0 and rounding == "once":
                y, h, _ = add_forward(x, residual, weight, eps)
            else:
                y, h, _ = add_forward(x, residual, weight, eps, weight_offset, _ROUNDINGS[rounding])
            return y, h
        except RuntimeError as error:
            refusal = error
        checked.explain(refusal, (x, residual, None, weight, None), eps, weight_offset=weight_offset, rounding=rounding)
    options: Any = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
    options |= {"sum": sum, "alpha": alpha}
    if checked.is_proxy(x):
        options |= {"normalized_shape": normalized_shape}
        return handle_torch_function(add_rms_norm, (x,), x, residual, weight, eps, **options)
    spec = checked.spec_of(x, eps, **options)
    checks.check_residual(residual, x)  # also None, which is no residual below
    y, h = checked.normalize(x, residual, None, weight, spec, normalized_shape)
    assert h is not None  # noqa: S101 - for the type checker: a residual was given
    return y, h


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Root mean square normalisation of the last dimension, or of groups of it, multiplied by a gate.

        y = norm(x) * act(gate)    or, with norm_before_gate=False,    y = norm(x * act(gate))
        norm(u) = u / sqrt(mean(u^2) + eps) * (weight + weight_offset)

    >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 100.0]])
    >>> gated_rms_norm(x, gate, activation="sigmoid")
    tensor([[0.4243, 1.1314]])

    Args:
        x: (*, d), float32, bfloat16, float16 or float64. Computed in float32 (float64 for float64), the gate included.
        gate: of x's shape and device, in a dtype of its own. None means no gate: the norm of `rms_norm`.
        weight, eps, weight_offset, normalized_shape, group_size, out: as for `rms_norm`.
        activation: "silu" (Mamba 2, Qwen3-Next) or "sigmoid" (Kimi-Linear).
        norm_before_gate: False for Mamba 2 and its kin, whose gate is inside the norm.
        rounding: as for `rms_norm`. Where the gate comes last, a rounding other than "once" also rounds the norm's
            result before the gate, and y has x's dtype.

    Raises:
        ValueError, TypeError: as `rms_norm`; and for a gate that does not match x.

    Source: Dao and Gu, "Transformers are SSMs", 2024, and its `RMSNormGated`.
    """
    if (
        (gate is None or type(gate) is Tensor)
        and _is_common(x, weight, eps, weight_offset, rounding)
        and normalized_shape is None
        and out is None
        and (group_size is None or (type(group_size) is int and group_size > 0))
        and type(activation) is str
        and activation in _ACTIVATIONS
        and type(norm_before_gate) is bool
    ):
        fields = eps, weight_offset, _ROUNDINGS[rounding], group_size or 0, _ACTIVATIONS[activation]
        try:
            if _grad_enabled() and (
                x.requires_grad
                or (gate is not None and gate.requires_grad)
                or (weight is not None and weight.requires_grad)
            ):
                x, gate, weight = dispatch.savable(x, gate, weight)
                spec = _new(NormSpec, (*fields, not norm_before_gate, False, 1.0))
                return _train(x, None, gate, weight, spec)  # type: ignore[no-any-return]
            gated_forward = (_on_gpu if _has_gpu and x.is_cuda else _direct).gated_forward
            return gated_forward(x, gate, weight, *fields, not norm_before_gate)  # type: ignore[no-any-return]
        except RuntimeError as error:
            refusal = error
        options: Any = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
        checked.explain(refusal, (x, None, gate, weight, None), eps, **options)
    options = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
    options |= {"activation": activation, "norm_before_gate": norm_before_gate}
    if checked.is_proxy(x):
        options |= {"normalized_shape": normalized_shape, "out": out}
        return handle_torch_function(gated_rms_norm, (x,), x, gate, weight, eps, **options)
    spec = checked.spec_of(x, eps, **options)
    if out is not None:
        return checked.write_out(out, x, gate, weight, spec, normalized_shape)
    return checked.normalize(x, None, gate, weight, spec, normalized_shape)[0]


def _is_common(x: Any, weight: Any, eps: Any, weight_offset: Any, rounding: Any) -> bool:
    """Whether a call may go to an operator, or the `autograd.Function` around it, with no check but the operator's."""
    return (
        type(x) is Tensor
        and type(eps) is float
        and type(weight_offset) is float
        and type(rounding) is str
        and rounding in _ROUNDINGS
        and x.dtype is not _FLOAT64
        and (weight is None or (type(weight) in _TENSORS and weight.dim() == 1 and weight.dtype is not _FLOAT64))
        and not _functorch_active()
        and _forward_mode._current_level < 0
        and not _compiling()
    )


def _can_write(out: Any, x: Tensor, weight: Tensor | None) -> bool:
    """Whether the operator may write out, without a check but its own."""
    return (
        type(out) is Tensor
        and out.layout is torch.strided
        and out.is_contiguous()
        and x.is_contiguous()
        and (weight is None or weight.is_contiguous())
        and out.device == x.device
        and not (out.is_neg() or out.is_inference())
        and not (_grad_enabled() and any(t is not None and t.requires_grad for t in (out, x, weight)))
    )
