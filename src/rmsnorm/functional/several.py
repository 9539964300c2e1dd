"""`rms_norms`: several tensors, each by itself, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm import checked, checks
from rmsnorm.functional.fast_path import (
    FLOAT64,
    ONCE,
    TENSORS,
    compiling,
    direct,
    functorch_active,
    grad_enabled,
    has_gpu,
)
from rmsnorm.functional.plain import rms_norm


def rms_norms(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None] | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Tensor, ...]:
    """`rms_norm` of several tensors, each of a width of its own, in one call: the q and k of an attention.

    >>> q, k = rms_norms([torch.ones(2, 8, 4), torch.ones(2, 2, 6)])
    >>> q.shape, k.shape
    (torch.Size([2, 8, 4]), torch.Size([2, 2, 6]))

    Args:
        xs: tensors as `rms_norm` takes them.
        weights: as many vectors, or None in the place of some; None means none at all.
        eps, weight_offset, rounding: of all of them, as for `rms_norm`.

    Returns:
        The results in the order of xs, with the bits of `rms_norm` of each alone.

    Raises:
        ValueError, TypeError: as `rms_norm`; and for another number of weights.
    """
    for name, given in (("xs", xs), ("weights", weights)):
        if given is not None and not isinstance(given, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of tensors, got {type(given).__name__}")
    xs, weights = list(xs), [None] * len(xs) if weights is None else list(weights)
    if len(weights) != len(xs):
        raise ValueError(f"weights must be as many as xs, {len(xs)}, got {len(weights)}")
    options: Any = {"weight_offset": weight_offset, "rounding": rounding}
    if weight_offset == 0.0 and rounding is ONCE and not has_gpu and _are_common(xs, weights, eps):
        try:
            return tuple([direct.forward(x, weight, eps) for x, weight in zip(xs, weights, strict=True)])
        except RuntimeError as error:
            refusal = error
        for x, weight in zip(xs, weights, strict=True):  # those of the operators guard memory; these say why
            checked.spec_of(x, eps, **options)
            checks.check_inputs(x, weight, None)
        raise refusal
    return tuple(rms_norm(x, w, eps, **options) for x, w in zip(xs, weights, strict=True))


def _are_common(xs: list[Any], weights: list[Any], eps: Any) -> bool:
    """Whether these may go to the operator with no check but its own; what holds for all is asked once."""
    if type(eps) is not float or functorch_active() or forward_ad._current_level >= 0 or compiling():
        return False
    wanted = grad_enabled()
    for x, weight in zip(xs, weights, strict=True):
        if type(x) is not Tensor or x.dtype is FLOAT64 or (wanted and x.requires_grad):
            return False
        if weight is not None and (
            type(weight) not in TENSORS
            or weight.dim() != 1
            or weight.dtype is FLOAT64
            or (wanted and weight.requires_grad)
        ):
            return False
    return True
