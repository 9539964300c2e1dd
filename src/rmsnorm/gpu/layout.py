"""How tensors of one shape lie as rows: csrc/kernels/rows.h for kernels that take two strides."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rmsnorm.gpu.call_cache import Maker
from rmsnorm.gpu.launching import ALIGNMENT
from rmsnorm.ops import layouts


class Rows(NamedTuple):
    """`number` rows in groups of `inner`: of each tensor, the strides (in elements) of the groups and of rows in one.

    Not `nested`: all rows are one group.
    """

    number: int
    inner: int
    nested: bool
    strides: tuple[int, ...]  # outer, inner for each tensor in turn


def rows(*tensors: Tensor | None) -> Rows | None:
    """The rows of tensors of one shape, the first of which is there; None where two strides are not enough."""
    first = tensors[0]
    assert first is not None  # noqa: S101 - for the type checker
    cols = first.shape[-1]
    for t in tensors:
        if t is not None and not t.is_contiguous():
            break
    else:
        return Rows(first.numel() // cols, 1, False, (0, cols) * len(tensors))
    dims: list[tuple[int, list[int]]] = []  # merged, the innermost last
    for dim, size in enumerate(first.shape[:-1]):
        if size == 1:
            continue
        strides = [0 if t is None else t.stride(dim) for t in tensors]
        if dims and all(outer == inner * size for outer, inner in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = dims[-1][0] * size, strides
        else:
            dims.append((size, strides))
    if len(dims) > 2:
        return None
    nothing = 1, [0] * len(tensors)
    (groups, outer), (inner, strides) = (nothing, nothing, *dims)[-2:]
    return Rows(groups * inner, inner, groups > 1, tuple(s for pair in zip(outer, strides, strict=True) for s in pair))


def aligned(cols: int, strides: tuple[int, ...], *tensors: Tensor | None) -> bool:
    """Whether every row of every tensor begins at 16 bytes, as far as Triton can prove it from multiples of 16."""
    bits = cols
    for stride in strides:
        bits |= stride
    for t in tensors:
        if t is not None:
            bits |= t.data_ptr()
    return bits % ALIGNMENT == 0


def planned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that is yet to be made: what is known of it before there is memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What `layouts.like` would make of x, yet to be made."""
    return layouts.like(x, dtype, device="meta")


def maker(t: Tensor, x: Tensor) -> Maker:
    """What makes tensors like the planned t from tensors like x, in the fastest way."""
    if t.dtype == x.dtype and t.shape == x.shape and t.stride() == torch.empty_like(x, device="meta").stride():
        return torch.empty_like
    shape, strides, dtype, device = t.shape, t.stride(), t.dtype, x.device
    return lambda _: torch.empty_strided(shape, strides, dtype=dtype, device=device)
