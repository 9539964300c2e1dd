"""`rms_norm` with a bias, with statistics of a part of the row, or over another dimension than the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rmsnorm import checked, checks, dispatch
from rmsnorm.functional.fast_path import FLOAT64, TENSORS, is_common, spec_of, train
from rmsnorm.functional.modulated import fused, normalize_and_modulate
from rmsnorm.ops import doors
from rmsnorm.spec import check_partial, is_integer


def rms_norm_with_options(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    normalized_shape: int | Sequence[int] | None,
    out: Tensor | None,
    bias: Tensor | None,
    partial: Any,
    axis: Any,
    **options: Any,
) -> Tensor:
    """The norm of arguments that are yet to be checked."""
    if (
        axis is None
        and out is None
        and normalized_shape is None
        and options["group_size"] is None
        and (bias is None) != (partial is None)
        and is_common(x, weight, eps, options["weight_offset"], options["rounding"])
        and x.dim() > 0
        and (bias is None or (type(bias) in TENSORS and bias.dim() == 1 and bias.dtype is not FLOAT64))
    ):
        fast = spec_of(eps, options["weight_offset"], options["rounding"])
        try:
            if bias is not None:
                return fused(x, None, bias, weight, fast)
            fast = fast._replace(partial=check_partial(partial, x.shape[-1]))
            if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
                x, weight = dispatch.savable(x, weight)
                return train(x, None, None, weight, fast)  # type: ignore[no-any-return]
            return doors.forward(x, None, weight, fast)
        except RuntimeError as error:
            refusal = error
        if bias is not None:
            checks.check_broadcast(bias, x, "bias")
        checked.explain(refusal, (x, None, None, weight, None), eps, **options)
    spec = checked.spec_of(x, eps, **options)
    if axis is not None:
        return _over_axis(x, weight, eps, normalized_shape, out, bias, partial, axis, **options)
    dims = checks.check_inputs(x, weight, normalized_shape)
    if partial is not None:
        if spec.group_size:
            raise ValueError("partial is not offered with group_size")
        spec = spec._replace(partial=check_partial(partial, torch.Size(x.shape[-dims:]).numel()))
    if bias is None:
        if out is not None:
            return checked.write_out(out, x, None, weight, spec, normalized_shape)
        return checked.normalize(x, None, None, weight, spec, normalized_shape)[0]
    if out is not None:
        raise ValueError("out is not offered with bias")
    checks.check_broadcast(bias, x, "bias", dims)
    if bias.dim() != dims:
        raise ValueError(f"bias must have shape {tuple(x.shape[-dims:])}, got {tuple(bias.shape)}")
    shape = x.shape
    if dims > 1:
        x, bias, weight = x.flatten(-dims), bias.flatten(), None if weight is None else weight.flatten()
    return normalize_and_modulate(x, None, bias, weight, spec).reshape(shape)


def _over_axis(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    normalized_shape: int | Sequence[int] | None,
    out: Tensor | None,
    bias: Tensor | None,
    partial: Any,
    axis: Any,
    **options: Any,
) -> Tensor:
    """With that dimension moved to the end, which the kernels read where it is, and back."""
    if x.is_nested:
        raise ValueError("axis is for dense tensors, got a jagged one")
    if not is_integer(axis) or not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis must be an integer from {-x.dim()} to {x.dim() - 1}, got {axis!r}")
    if normalized_shape is not None or (weight is not None and weight.dim() != 1):
        raise ValueError("axis is one dimension: the weight has one too, and there is no normalized_shape")
    moved = None if out is None else out.movedim(axis, -1)
    y = rms_norm_with_options(x.movedim(axis, -1), weight, eps, None, moved, bias, partial, None, **options)
    return y.movedim(-1, axis) if out is None else out
