"""`rms_norm_add` and `rms_norm_add_rms_norm`: the norm that closes a branch, and the next block's norm after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from rmsnorm import checked, checks, dispatch
from rmsnorm.functional.fast_path import ROUNDING_INDEX, direct, grad_enabled, has_gpu, is_common, on_gpu
from rmsnorm.functional.plain import rms_norm
from rmsnorm.functional.residual import add_rms_norm
from rmsnorm.numerics.stages import add_residual
from rmsnorm.ops import closing
from rmsnorm.ops.library import operators
from rmsnorm.spec import ROUNDINGS, NormSpec, check_eps


def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
) -> Tensor:
    """Normalises a branch and adds it to the residual stream, in one pass over memory.

        h = rms_norm(x, weight, eps) + residual

    >>> rms_norm_add(torch.tensor([3.0, -3.0]), torch.tensor([1.0, 2.0]))
    tensor([2., 1.])

    Args:
        x: (*, d), the branch, as for `rms_norm`.
        residual: of x's shape and device, in a dtype of its own.
        weight, eps, weight_offset, rounding, normalized_shape: as for `rms_norm`.

    Returns:
        h in the residual's dtype. The norm's result is rounded to its own dtype before it is added in float32: h has
        the bits of the two steps, and so have the gradients.

    Raises:
        ValueError, TypeError: as `rms_norm`; and for a residual that does not match x.

    Source: the norms after attention and feed-forward of Gemma 2 and 3, OLMo 2 and GLM-4.
    """
    if (
        type(residual) is Tensor
        and is_common(x, weight, eps, weight_offset, rounding)
        and normalized_shape is None
        and residual.dtype is x.dtype
        and not (
            grad_enabled()
            and (x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad))
        )
    ):
        try:
            add_forward = (on_gpu if has_gpu and x.is_cuda else direct).norm_add_forward
            return add_forward(x, residual, weight, eps, weight_offset, ROUNDING_INDEX[rounding])[0]  # type: ignore[no-any-return]
        except RuntimeError as error:
            refusal = error
        checked.explain(refusal, (x, residual, None, weight, None), eps, weight_offset=weight_offset, rounding=rounding)
    options: Any = {"weight_offset": weight_offset, "rounding": rounding}
    if checked.is_proxy(x):
        options |= {"normalized_shape": normalized_shape}
        return handle_torch_function(rms_norm_add, (x,), x, residual, weight, eps, **options)
    spec = checked.spec_of(x, eps, **options)
    dims = checks.check_inputs(x, weight, normalized_shape)
    checks.check_residual(residual, x)
    shape = x.shape
    if dims > 1:
        x, residual, weight = _flat(dims, x, residual, weight)
    return _add(x, residual, weight, spec).reshape(shape) if dims > 1 else _add(x, residual, weight, spec)


def _add(x: Tensor, residual: Tensor, weight: Tensor | None, spec: NormSpec) -> Tensor:
    if x.is_nested:
        return dispatch.on_values(lambda x, residual: (_add(x, residual, weight, spec),), x, residual)[0]
    if not dispatch.can_fuse(x, residual, weight):
        n = rms_norm(x, weight, spec.eps, **_options(spec))
        return add_residual(n, residual, spec)[0]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight)):
        x, residual, weight = _for_autograd(x, residual, weight)
        return closing.NormAdd.apply(x, residual, weight, spec)  # type: ignore[no-any-return]
    return operators(x).norm_add_forward(x, residual, weight, *spec[:3])[0]  # type: ignore[no-any-return]


def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    next_eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises a branch, adds it to the residual stream and normalises the sum for the next block, in one pass.

        h = rms_norm(x, weight, eps) + residual;  y = rms_norm(h, next_weight, next_eps)

    >>> y, h = rms_norm_add_rms_norm(torch.tensor([3.0, -3.0]), torch.tensor([1.0, 2.0]))
    >>> h
    tensor([2., 1.])
    >>> torch.equal(y, rms_norm(h))
    True

    Args:
        x, residual, weight, eps: as for `rms_norm_add`.
        next_weight: the next norm's, of the weight's shape.
        next_eps: the next norm's; None means eps.
        weight_offset, rounding, normalized_shape: of both norms, as for `rms_norm`.

    Returns:
        y and h, as `add_rms_norm` gives them of `rms_norm(x, weight)` and the residual, and with their gradients.

    Raises:
        ValueError, TypeError: as `rms_norm_add`.

    Source: a block's last norm and the next one's first in Gemma 2 and 3, and GLM-4.
    """
    options: Any = {"weight_offset": weight_offset, "rounding": rounding}
    if (
        type(residual) is Tensor
        and is_common(x, weight, eps, weight_offset, rounding)
        and is_common(x, next_weight, eps if next_eps is None else next_eps, weight_offset, rounding)
        and normalized_shape is None
        and residual.dtype is x.dtype
        and not (grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight, next_weight)))
    ):
        try:
            forward = (on_gpu if has_gpu and x.is_cuda else direct).norm_add_norm_forward
            y, h, _, _ = forward(
                x, residual, weight, next_weight, eps, eps if next_eps is None else next_eps, weight_offset,
                ROUNDING_INDEX[rounding],
            )  # fmt: skip
            return y, h
        except RuntimeError as error:
            refusal = error
        _check_next(next_weight, next_eps, x, 1)
        checked.explain(refusal, (x, residual, None, weight, None), eps, **options)
    if checked.is_proxy(x):
        options |= {"normalized_shape": normalized_shape, "next_eps": next_eps}
        return handle_torch_function(rms_norm_add_rms_norm, (x,), x, residual, weight, next_weight, eps, **options)
    spec = checked.spec_of(x, eps, **options)
    dims = checks.check_inputs(x, next_weight if weight is None else weight, normalized_shape)
    second = _check_next(next_weight, spec.eps if next_eps is None else next_eps, x, dims)
    checks.check_residual(residual, x)
    shape = x.shape
    if dims == 1:
        return _add_norm(x, residual, weight, next_weight, spec, second)
    x, residual, weight, next_weight = _flat(dims, x, residual, weight, next_weight)
    y, h = _add_norm(x, residual, weight, next_weight, spec, second)
    return y.reshape(shape), h.reshape(shape)


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, next_weight: Tensor | None, spec: NormSpec, next_eps: float
) -> tuple[Tensor, Tensor]:
    if x.is_nested:
        y, h = dispatch.on_values(
            lambda x, residual: _add_norm(x, residual, weight, next_weight, spec, next_eps), x, residual
        )
        return y, h
    if not dispatch.can_fuse(x, residual, weight, next_weight):
        n = rms_norm(x, weight, spec.eps, **_options(spec))
        return add_rms_norm(n, residual, next_weight, next_eps, **_options(spec))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight, next_weight)):
        tensors = _for_autograd(x, residual, weight, next_weight)
        return closing.NormAddNorm.apply(*tensors, spec, next_eps)  # type: ignore[no-any-return]
    operator = operators(x).norm_add_norm_forward
    y, h, _, _ = operator(x, residual, weight, next_weight, spec.eps, next_eps, *spec[1:3])
    return y, h


def _check_next(next_weight: Any, next_eps: Any, x: Tensor, dims: int) -> float:
    """The second norm's weight and eps; returns eps."""
    if next_weight is not None:
        checks.check_next_weight(next_weight, x, dims)
    return check_eps(next_eps, x.dtype, "next_eps")


def _options(spec: NormSpec) -> dict[str, Any]:
    return {"weight_offset": spec.weight_offset, "rounding": ROUNDINGS[spec.rounding]}


def _flat(dims: int, x: Tensor, residual: Tensor, *weights: Tensor | None) -> list[Any]:
    """With one normalised dimension in place of several."""
    return [x.flatten(-dims), residual.flatten(-dims), *(None if w is None else w.flatten() for w in weights)]


def _for_autograd(x: Tensor, residual: Tensor, *weights: Tensor | None) -> list[Any]:
    """As an `autograd.Function` takes them: the compiler takes no tensor twice, and no inference tensor is saved."""
    if torch.compiler.is_compiling():
        return [x, x.view_as(x) if residual is x else residual, *weights]
    return [*dispatch.savable(x), residual, *dispatch.savable(*weights)]
