"""How results of the operators lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def like(x: Tensor, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Laid out as x if x is dense with adjacent columns, else contiguous; csrc/ops/tensors.h does the same."""
    # Keeps the strides of a dense tensor, and of no other.
    made = torch.empty_like(x, dtype=dtype, device=device)
    if made.stride() == x.stride() and (x.stride(-1) == 1 or x.shape[-1] == 1):
        return made
    return torch.empty_like(x, dtype=dtype, device=device, memory_format=torch.contiguous_format)


def laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    wanted = like(x, result.dtype)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)
