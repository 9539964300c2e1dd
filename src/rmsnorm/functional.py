"""The public functions: checks and shapes.

A plain call goes straight to the operator, or to the `autograd.Function` around it where a gradient is needed; the
operator refuses what it must not touch, and why is found out afterwards. Every other call is checked first, and takes
the way that routing.py finds for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rmsnorm import checks, dispatch, gating
from rmsnorm.numerics import reference
from rmsnorm.ops import autograd, functorch
from rmsnorm.ops.library import operators

_CODES = {name: index for index, name in enumerate(reference.ROUNDINGS)}
_direct, _on_gpu = operators.direct, operators.gpu
# Function.apply, less what it does for functorch, which does not come this way.
_train = super(torch.autograd.Function, autograd.RMSNorm).apply
_add_train = super(torch.autograd.Function, autograd.AddRMSNorm).apply
_functorch_active = torch._C._are_functorch_transforms_active
_forward_mode = torch.autograd.forward_ad
_straight = dispatch.straight
_grad_enabled = torch.is_grad_enabled
_count_change = torch.autograd.graph.increment_version  # the operator does not: see autograd's check of what it saved


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
        group_size: how many consecutive elements of the last dimension share their statistics; it divides d. None means
            all of them.
        out: receives the result; may be x itself. For inference: not together with a gradient.

    Returns:
        y of x's shape, in the dtype that `rounding` says. One row has one answer, whatever computes it
        (docs/numerics.md).

    Raises:
        ValueError: shapes, devices or options that do not fit together.
        TypeError: arguments that are no dense floating-point tensors.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    # What is common goes first and straight: at small sizes these tests are a third of the call. What the operator will
    # not take (its own checks guard memory), and what reads oddly here, is handled or refused with its reason below.
    try:
        if normalized_shape is None and group_size is None and _straight(x, weight, eps, weight_offset):
            wanted = _grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
            if out is not None:
                if out.device == x.device and not (wanted or (_grad_enabled() and out.requires_grad) or out.is_neg()):
                    if weight_offset == 0.0 and rounding == "once":
                        _direct.forward_out(x, weight, eps, out)
                    else:
                        _direct.forward_out(x, weight, eps, out, weight_offset, _CODES[rounding])
                    _count_change((out,))
                    return out
            elif wanted:
                return _train(x, weight, eps, weight_offset, _CODES[rounding], False)  # type: ignore[no-any-return]
            elif weight_offset == 0.0 and rounding == "once":
                return (_on_gpu if x.is_cuda else _direct).forward(x, weight, eps)  # type: ignore[no-any-return]
            else:
                forward = (_on_gpu if x.is_cuda else _direct).forward
                return forward(x, weight, eps, weight_offset, _CODES[rounding])  # type: ignore[no-any-return]
    except (AttributeError, KeyError, RuntimeError, TypeError):
        pass
    if out is not None:
        return _write_out(out, x, weight, eps, weight_offset, rounding, normalized_shape, group_size)
    if group_size is not None:
        return _normalize_groups(x, weight, eps, weight_offset, rounding, normalized_shape, group_size)
    return normalize(x, None, weight, eps, weight_offset, rounding, normalized_shape)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Tensor, Tensor]:
    """Adds the residual stream and normalises the sum, in one pass over memory.

        h = x + residual;  y = rms_norm(h, weight, eps)

    >>> y, h = add_rms_norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]))
    >>> h
    tensor([3., 4.])
    >>> torch.equal(y, rms_norm(h))
    True

    Args:
        x: (*, d), as for `rms_norm`.
        residual: the same shape, dtype and device as x.
        weight, eps, weight_offset, rounding: as for `rms_norm`.

    Returns:
        y and h, both of x's shape; the bits are those of the two separate steps. h, in x's dtype, is the next residual.

    Raises:
        ValueError, TypeError: as `rms_norm`; and for a residual that does not match x.
    """
    try:  # as in rms_norm
        if type(residual) is Tensor and _straight(x, weight, eps, weight_offset):
            if _grad_enabled() and (
                x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
            ):
                return _add_train(x, residual, weight, eps, weight_offset, _CODES[rounding])  # type: ignore[no-any-return]
            add_forward = (_on_gpu if x.is_cuda else _direct).add_forward
            if weight_offset == 0.0 and rounding == "once":
                y, h, _ = add_forward(x, residual, weight, eps)
            else:
                y, h, _ = add_forward(x, residual, weight, eps, weight_offset, _CODES[rounding])
            return y, h
    except (AttributeError, KeyError, RuntimeError, TypeError):
        pass
    if residual is None:  # to `normalize` that is no residual
        checks.check_residual(x, residual)  # type: ignore[unreachable]
    y, h = normalize(x, residual, weight, eps, weight_offset, rounding, None)
    assert h is not None  # noqa: S101 - for the type checker: a residual was given
    return y, h


def normalize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float | str | None,
    weight_offset: float,
    rounding: str,
    normalized_shape: int | Sequence[int] | None,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y, and h when there is a residual: everything checked, every kind of tensor, gradients included."""
    dims = checks.check_inputs(x, weight, normalized_shape)
    if residual is not None:
        checks.check_residual(x, residual)
    eps = checks.check_eps(eps, x.dtype)
    weight_offset = checks.check_weight_offset(weight_offset)
    code = checks.check_rounding(rounding)

    shape = x.shape
    if dims > 1:
        x = x.flatten(-dims)
        residual = None if residual is None else residual.flatten(-dims)
        weight = None if weight is None else weight.flatten()
    y, h = dispatch.normalize_rows(x, residual, weight, eps, weight_offset, code, memory_efficient)
    if dims > 1:
        y, h = y.reshape(shape), None if h is None else h.reshape(shape)
    return y, h


def _write_out(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    rounding: str,
    normalized_shape: int | Sequence[int] | None,
    group_size: int | None,
) -> Tensor:
    """What the operator does not take: several dimensions, strided columns, float64, groups; and what it must not."""
    if _functorch_active() or _forward_mode._current_level >= 0:
        raise ValueError("out is for inference: leave it out inside torch.func transforms and forward-mode derivatives")
    if isinstance(out, Tensor) and functorch.dispatches_itself(out):
        raise TypeError(f"out must be a plain torch.Tensor, got {type(out).__name__}")
    checks.check_inputs(x, weight, normalized_shape)
    checks.check_rounding(rounding)
    checks.check_out(out, x, weight, reference.result_dtype(x, weight, rounding))
    if _grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, out)):
        raise ValueError("out is for inference: call under torch.no_grad(), or leave it out where a gradient is needed")
    if group_size is not None:
        return out.copy_(_normalize_groups(x, weight, eps, weight_offset, rounding, normalized_shape, group_size))
    return out.copy_(normalize(x, None, weight, eps, weight_offset, rounding, normalized_shape)[0])


def _normalize_groups(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    rounding: str,
    normalized_shape: int | Sequence[int] | None,
    group_size: int,
) -> Tensor:
    if normalized_shape is None:
        y = gating.direct(x, None, weight, eps, weight_offset, rounding, group_size)
        if y is not None:
            return y
    if checks.check_inputs(x, weight, normalized_shape) != 1:
        raise ValueError("group_size divides the last dimension: weight and normalized_shape must have one dimension")
    return gating.normalize_groups(x, None, weight, eps, weight_offset, rounding, group_size)
