"""How results lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm.numerics.fixed_sum import compute_dtype
from rmsnorm.spec import NormSpec


def like(x: Tensor, dtype: torch.dtype, device: str | None = None) -> Tensor:
    """Laid out as x if x is dense, else contiguous; csrc/ops/tensors.h does the same."""
    # Keeps the strides of a dense tensor, and of no other.
    made = torch.empty_like(x, dtype=dtype, device=device)
    if made.stride() == x.stride():
        return made
    return torch.empty_like(x, dtype=dtype, device=device, memory_format=torch.contiguous_format)


def laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """The result, copied where its strides are not those of `like`."""
    expected = like(x, result.dtype)
    return result if result.stride() == expected.stride() else expected.copy_(result)


def rstd_like(x: Tensor, spec: NormSpec) -> Tensor:
    """One number for each group of each row, contiguous."""
    groups = x.shape[-1] // spec.group_size if spec.group_size else 1
    return x.new_empty((*x.shape[:-1], groups), dtype=compute_dtype(x))


def shared_shape(x: Tensor, shared: int) -> tuple[int, ...]:
    """x's shape with 1 for the last `shared` of its leading dimensions."""
    kept = x.dim() - 1 - shared
    return (*x.shape[:kept], *(1,) * shared, x.shape[-1])
