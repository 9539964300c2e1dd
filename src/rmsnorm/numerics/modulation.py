"""Modulation after the norm, in plain PyTorch, and its gradients.

    y = n * (1 + scale) + shift,    n = norm(x), in the computation dtype where `rounding` is "once", else rounded

scale and shift are broadcast over the leading dimensions. What is shared by several rows gets the sum of their terms as
a gradient, which `sum_rows` adds: in the order of the rows, so that it depends on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rmsnorm.numerics import reference
from rmsnorm.numerics.fixed_sum import compute_dtype, sum_rows
from rmsnorm.spec import ROUNDINGS, NormSpec


def modulate(n: Tensor, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """n * (1 + scale) + shift, one operation after another, rounded to `dtype` at the end."""
    y = n.to(compute_dtype(n))
    if scale is not None:
        y = y * (1.0 + scale.to(y.dtype))
    if shift is not None:
        y = y + shift.to(y.dtype)
    return y.to(dtype)


def unrounded(x: Tensor, spec: NormSpec) -> Tensor:
    """x in the dtype that leaves its norm as modulation takes it."""
    return x.to(compute_dtype(x)) if ROUNDINGS[spec.rounding] == "once" else x


def forward(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, shift: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor]:
    """y in the dtype of the norm's result, and rstd."""
    n, rstd = reference.forward(unrounded(x, spec), None, weight, spec)
    return modulate(n, scale, shift, reference.result_dtype(x.dtype, weight, spec)), rstd


def input_gradients(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, scale: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the norm's result, and the terms of dscale and of dshift."""
    compute = rstd.dtype
    n_dtype = compute if ROUNDINGS[spec.rounding] == "once" else reference.result_dtype(x.dtype, weight, spec)
    n = reference.round_x_hat(x.to(compute) * rstd, x.dtype, weight, spec)
    if weight is not None:
        n = n * reference.gain(weight, spec.weight_offset, compute)
    g = dy.to(compute)
    dn = g if scale is None else g * (1.0 + scale.to(compute))
    return dn.to(n_dtype), g * n.to(n_dtype).to(compute), g


def sum_shared(terms: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums of (..., d) over the rows that share one of `shape`, which broadcasts to theirs, each as `sum_rows` adds."""
    shared = shared_dims(terms.shape, shape)
    kept = [dim for dim in range(terms.dim() - 1) if dim not in shared]
    rows = math.prod([terms.shape[dim] for dim in shared])
    columns = terms.permute(*shared, *kept, -1).reshape(rows, math.prod(shape))
    return (sum_rows(columns) if columns.numel() else columns.sum(0)).reshape(shape)


def shared_dims(x_shape: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The leading dimensions of x over which a tensor of a shape is broadcast."""
    missing = len(x_shape) - len(shape)
    return [
        dim for dim in range(len(x_shape) - 1) if x_shape[dim] != 1 and (dim < missing or shape[dim - missing] == 1)
    ]
