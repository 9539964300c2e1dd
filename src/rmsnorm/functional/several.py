"""`rms_norms`: several tensors, each by itself, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rmsnorm import checked, checks, dispatch
from rmsnorm.functional.plain import rms_norm
from rmsnorm.ops.library import operators


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
    if _in_one_call(xs, weights):
        specs = {checked.spec_of(x, eps, **options) for x in xs}
        dims = [checks.check_inputs(x, w, None) for x, w in zip(xs, weights, strict=True)]
        if max(dims) == 1 and len(specs) == 1:
            return tuple(operators(xs[0]).several_forward(xs, weights, *specs.pop()[:3]))
    return tuple(rms_norm(x, w, eps, **options) for x, w in zip(xs, weights, strict=True))


def _in_one_call(xs: list[Tensor], weights: list[Tensor | None]) -> bool:
    """Whether the operator takes these: tensors on one device that need no gradient."""
    tensors: list[Any] = [*xs, *(w for w in weights if w is not None)]
    return (
        len(xs) > 1
        and all(isinstance(t, Tensor) for t in tensors)
        and len({t.device for t in tensors}) == 1
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and dispatch.can_fuse(*tensors)
    )
