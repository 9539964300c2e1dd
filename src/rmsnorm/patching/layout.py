"""The memory layout of results: code after a norm may take a view that only one layout allows.

A result of rows that lie in their natural order is contiguous, whoever computes it. Where dimensions were exchanged
before the norm (heads moved, channels last), some norms keep the order of the input and some make the result
contiguous; a replacement does what the module did.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.specimen import NotRMSNorm, Specimen

# The widest row that is tried in every layout.
_LARGEST = 2**16


def natural(t: Tensor) -> bool:
    """Whether its dimensions lie in memory as they are counted; rows may have gaps between them."""
    strides = [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]
    return all(a >= b for a, b in pairwise(strides)) and 0 not in strides


def in_order_of(y: Tensor, x: Tensor) -> Tensor:
    """y laid out densely with its dimensions in the order of x's."""
    outward = sorted((i for i in range(x.dim()) if x.shape[i] > 1), key=lambda i: -int(x.stride()[i]))
    outward = [i for i in range(x.dim()) if x.shape[i] <= 1] + outward
    inverse = [outward.index(i) for i in range(x.dim())]
    return y.permute(outward).contiguous().permute(inverse)


def observed(specimen: Specimen, convention: Convention) -> str | None:
    """How a module lays out the results of inputs whose dimensions were exchanged.

    Returns:
        "input" in the order of the input, "contiguous", or None if neither describes it: its own forward has to run.
    """
    row = convention.shape or (convention.group_size or 64,)
    if torch.Size(row).numel() > _LARGEST:
        return None
    last = len(row)
    samples = [
        torch.ones(3, 2, 5, *row).transpose(0, 1),
        torch.ones(3, 2, 5, *row).transpose(1, 2),
        torch.ones(3, 2, *row).transpose(0, 1),
        torch.ones(2, *row, 3, 5).permute(0, 1 + last, 2 + last, *range(1, 1 + last)),
        torch.ones(*row, 5).permute(last, *range(last)),
        torch.ones(3, 2, 5, *row[:-1], 2 * row[-1])[..., : row[-1]].transpose(1, 2),
    ]
    kept, made = True, True
    for sample in samples:
        x = sample.to(specimen.device)
        x = (
            x
            if x.stride() == sample.stride()
            else torch.empty_strided(x.shape, sample.stride(), device=x.device).fill_(1)
        )
        try:
            y = specimen.run(x, x) if convention.activation is not None else specimen.run(x)
        except NotRMSNorm:
            return None
        kept = kept and y.stride() == in_order_of(y, x).stride()
        made = made and y.is_contiguous()
    return "input" if kept else "contiguous" if made else None
