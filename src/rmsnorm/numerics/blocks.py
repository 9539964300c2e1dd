"""The reference on a CPU that has no compiled kernels: the same bits, sooner.

Rows are independent, so they are taken in blocks whose float64 temporaries fit a cache. And most rows need no
fixed-point sum: an ordinary float64 sum says in which interval it lies, and where both ends give one float32, that is
rstd. It is what csrc/kernels/estimate.h does; docs/numerics.md has the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rmsnorm.numerics import reference
from rmsnorm.numerics.fixed_sum import RowReductions, ieee_rsqrt, inverse_rms, sum_rows
from rmsnorm.spec import NormSpec

_BLOCK = 2**16  # elements
# Where mean(x^2) + eps is as float64 has it, whatever power of two it is scaled by.
_PLAIN = 1e-200, 1e200


class EstimatedRows(RowReductions):
    """Whole rows, whose inverse_rms comes from an interval where it can."""

    def inverse_rms(self, x: Tensor, eps: float) -> Tensor:
        n = x.shape[-1]
        if x.dtype == torch.float64 or n == 0:
            return inverse_rms(x, eps)
        total = x.double().square().sum(-1, keepdim=True)
        largest = x.abs().amax(-1, keepdim=True).double()
        error = total * (n * 2.0**-52)
        floors = largest * largest * (n * 2.0 ** ((n - 1).bit_length() - 49))
        low, high = ((edge * (1.0 / n) + eps) for edge in (total - error - floors, total + error))
        rstd = ieee_rsqrt(high).float()
        sure = (ieee_rsqrt(low).float() == rstd) & (low > _PLAIN[0]) & (high < _PLAIN[1])
        if not sure.all():
            rest = ~sure.squeeze(-1)
            rstd[rest] = inverse_rms(x[rest], eps)
        return rstd


_ROWS = EstimatedRows()


def forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """`reference.forward`."""

    def part(x: Tensor, gate: Tensor | None) -> tuple[Tensor, ...]:
        return reference.forward(x, gate, weight, spec, _ROWS)

    y, rstd = _by_blocks(part, x, gate)
    return y, rstd


def add_forward(x: Tensor, residual: Tensor, weight: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.add_forward`."""

    def part(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return reference.add_forward(x, residual, weight, spec, _ROWS)

    y, h, rstd = _by_blocks(part, x, residual)
    return y, h, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    spec: NormSpec,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`reference.backward`."""

    def part(dy: Tensor, x: Tensor, gate: Tensor | None, rstd: Tensor, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        return reference.input_gradients(dy, x, gate, rstd, weight, dh, spec)

    dx, dgate, terms = _by_blocks(part, dy, x, gate, rstd, dh)
    dweight = sum_rows(terms)
    return dx, dgate, dweight if weight is None else dweight.to(weight.dtype)


def _by_blocks(part: Callable[..., tuple[Any, ...]], *tensors: Tensor | None) -> tuple[Any, ...]:
    """What `part` gives for some tensors, whose leading dimensions are rows, computed for some rows after others."""
    first = next(t for t in tensors if t is not None)
    leading, cols = first.shape[:-1], first.shape[-1]
    step = max(1, _BLOCK // max(cols, 1))
    if leading.numel() <= step:
        return part(*tensors)
    rows = [None if t is None else t.reshape(-1, t.shape[-1]) for t in tensors]
    results: tuple[Any, ...] = ()
    for start in range(0, leading.numel(), step):
        parts = part(*(None if t is None else t[start : start + step] for t in rows))
        if not results:
            results = tuple(None if p is None else p.new_empty(leading.numel(), p.shape[-1]) for p in parts)
        for result, p in zip(results, parts, strict=True):
            if result is not None:
                result[start : start + step] = p
    return tuple(None if r is None else r.view(*leading, r.shape[-1]) for r in results)
