"""`add_rms_norm`: the norm of the residual sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function

from rmsnorm import checked, checks, dispatch
from rmsnorm.functional.fast_path import (
    ROUNDING_INDEX,
    direct,
    grad_enabled,
    has_gpu,
    is_common,
    on_gpu,
    spec_of,
    train,
)


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
        and is_common(x, weight, eps, weight_offset, rounding)
        and normalized_shape is None
        and group_size is None
        and sum == "rounded"
        and type(alpha) is float
        and alpha == 1.0
        and residual.dtype is x.dtype
    ):
        try:
            if grad_enabled() and (
                x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
            ):
                if weight is not None and weight.is_inference():
                    (weight,) = dispatch.savable(weight)
                return train(x, residual, None, weight, spec_of(eps, weight_offset, rounding))  # type: ignore[no-any-return]
            add_forward = (on_gpu if has_gpu and x.is_cuda else direct).add_forward
            if weight_offset == 0.0 and rounding == "once":
                y, h, _ = add_forward(x, residual, weight, eps)
            else:
                y, h, _ = add_forward(x, residual, weight, eps, weight_offset, ROUNDING_INDEX[rounding])
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
