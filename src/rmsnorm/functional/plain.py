"""`rms_norm`: the norm alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function

from rmsnorm import checked, dispatch
from rmsnorm.functional.fast_path import (
    FLOAT64,
    ONCE,
    ROUNDING_INDEX,
    TENSORS,
    can_write,
    compiling,
    direct,
    functorch_active,
    grad_enabled,
    has_gpu,
    on_gpu,
    spec_of,
    train,
)
from rmsnorm.functional.options import rms_norm_with_options
from rmsnorm.ops import doors

_forward = direct.forward
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
    bias: Tensor | None = None,
    partial: float | None = None,
    axis: int | None = None,
) -> Tensor:
    """Root mean square normalisation over the trailing dimensions that `weight` spans.

        y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) + bias

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
        bias: of the weight's shape, added before the last rounding. A rounding other than "once" rounds the product
            before that too.
        partial: how many of the first elements the mean is of, or which share of them (up to the next
            integer): pRMSNorm. All elements are scaled.
        axis: the dimension to normalise over, if it is not the last: 1 for the channels of images. y lies as x does.

    Returns:
        y of x's shape, in the dtype that `rounding` says. One row has one answer (docs/numerics.md).

    Raises:
        ValueError: shapes, devices or options that do not fit together.
        TypeError: arguments that are no dense floating-point tensors.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if (  # as is_common, spelled out: at small sizes these tests are a quarter of the call
        type(x) is Tensor
        and type(eps) is float
        and (weight is None or (type(weight) in TENSORS and weight.dim() == 1 and weight.dtype is not FLOAT64))
        and x.dtype is not FLOAT64
        and normalized_shape is None
        and type(weight_offset) is float
        and (rounding is ONCE or (type(rounding) is str and rounding in ROUNDING_INDEX))
        and (group_size is None or (type(group_size) is int and group_size > 0))
        and not functorch_active()
        and forward_ad._current_level < 0
        and not compiling()
        and bias is None
        and partial is None
        and axis is None
        and (out is None or can_write(out, x, weight))
    ):
        try:
            if out is None and grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
                if x.is_inference() or (weight is not None and weight.is_inference()):
                    x, weight = dispatch.savable(x, weight)
                return train(x, None, None, weight, spec_of(eps, weight_offset, rounding, group_size))  # type: ignore[no-any-return]
            if group_size is None and out is None:
                forward = on_gpu.forward if has_gpu and x.is_cuda else _forward
                if rounding is ONCE and weight_offset == 0.0:
                    return forward(x, weight, eps)  # type: ignore[no-any-return]
                return forward(x, weight, eps, weight_offset, ROUNDING_INDEX[rounding])  # type: ignore[no-any-return]
            spec = spec_of(eps, weight_offset, rounding, group_size)
            if out is None:
                return doors.forward(x, None, weight, spec)
            doors.forward_out(x, None, weight, out, spec)
            if not out.is_inference():
                _count_change((out,))
            return out
        except RuntimeError as error:
            refusal = error
        options: Any = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
        checked.explain(refusal, (x, None, None, weight, out), eps, **options)
    options = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
    if checked.is_proxy(x):
        options |= {"normalized_shape": normalized_shape, "out": out, "bias": bias, "partial": partial, "axis": axis}
        return handle_torch_function(rms_norm, (x,), x, weight, eps, **options)
    if not (bias is None and partial is None and axis is None):
        return rms_norm_with_options(x, weight, eps, normalized_shape, out, bias, partial, axis, **options)
    spec = checked.spec_of(x, eps, **options)
    if out is not None:
        return checked.write_out(out, x, None, weight, spec, normalized_shape)
    return checked.normalize(x, None, None, weight, spec, normalized_shape)[0]


def with_options(eps: float, weight_offset: float, rounding: str) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`rms_norm` of these options, for a caller that knows x and weight to fit together: nothing is asked twice."""
    given: Any = {"eps": eps, "weight_offset": weight_offset, "rounding": rounding}
    options: tuple[float, ...] = (eps, weight_offset, ROUNDING_INDEX[rounding])
    if rounding == ONCE and weight_offset == 0.0:
        options = options[:1]  # the rest is as by default, which costs less

    def call(x: Tensor, weight: Tensor | None) -> Tensor:
        if (
            type(x) is Tensor
            and (weight is None or (type(weight) in TENSORS and weight.dtype is not FLOAT64))
            and x.dtype is not FLOAT64
            and not (has_gpu and x.is_cuda)
            and not functorch_active()
            and forward_ad._current_level < 0
            and not compiling()
            and not (grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)))
        ):
            return _forward(x, weight, *options)  # type: ignore[no-any-return]
        return rms_norm(x, weight, **given)

    return call
