"""Rows whose elements lie on several ranks.

A row needs its largest magnitude and one sum from all ranks. The sum is of integers (docs/numerics.md), so that it is
the same however the row is cut. Where each rank has whole groups of a row, nothing is exchanged but for dweight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd.function import once_differentiable

from rmsnorm.distributed import weight_gradient
from rmsnorm.distributed.weight_gradient import Cut
from rmsnorm.numerics import reference
from rmsnorm.numerics.fixed_sum import WHOLE_ROWS, RowReductions
from rmsnorm.numerics.stages import scale_branch
from rmsnorm.ops import doors
from rmsnorm.spec import NormSpec


class AllReduced(RowReductions):
    """Rows of `length` elements, of which each rank of the process groups has some."""

    def __init__(self, length: int, groups: list[Any]) -> None:
        self._length = length
        self._groups = groups

    def length(self, piece: Tensor) -> int:
        return self._length

    def largest(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        # A rank may have nothing of a row. As integers the bits of magnitudes keep their order; NaN is above infinity.
        columns = [
            super(AllReduced, self).largest(p)[0] if p.shape[-1] else p.new_zeros(*p.shape[:-1], 1) for p in pieces
        ]
        bits = torch.cat(columns, -1).double().view(torch.int64)
        return self._reduce(bits, "max").view(torch.float64).to(pieces[0].dtype).split(1, -1)  # type: ignore[no-any-return]

    def total(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        return self._reduce(torch.cat(super().total(*pieces), -1), "sum").split(1, -1)  # type: ignore[no-any-return]

    def _reduce(self, local: Tensor, operation: str) -> Tensor:
        for group in self._groups:
            local = collectives.wait_tensor(collectives.all_reduce(local, operation, group))
        return local


class SplitNorm(torch.autograd.Function):
    """y and h of this rank's piece of each row: one MAX and one SUM of a number per row, and the same backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        weight: Tensor | None,
        spec: NormSpec,
        rows: RowReductions,
        cuts: list[Cut],
    ) -> tuple[Tensor, Tensor | None]:
        h: Tensor | None = None
        if rows is WHOLE_ROWS and residual is not None:
            y, h, rstd = doors.add_forward(x, residual, weight, spec)
        elif rows is WHOLE_ROWS:
            y, rstd = doors.forward_train(x, gate, weight, spec)
        elif residual is not None:
            y, h, rstd = reference.add_forward(x, residual, weight, spec, rows)
        else:
            y, rstd = reference.forward(x, gate, weight, spec, rows)
        ctx.save_for_backward(x if h is None else h, gate, weight, rstd)
        ctx.options = spec, rows, cuts, x.dtype
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        spec, rows, cuts, branch_dtype = ctx.options
        need_x, need_residual, need_gate, need_weight = ctx.needs_input_grad[:4]
        dx, dgate, dweight = dh, None, None
        if dy is not None:
            needed = need_x or need_residual, need_gate, need_weight
            if rows is not WHOLE_ROWS:
                dx, dgate, _ = reference.input_gradients(dy, x, gate, rstd, weight, dh, spec, rows)
                needed = False, False, need_weight
            if any(needed) and x.shape[-1] == 0:
                dweight = torch.zeros_like(weight) if need_weight else None
            elif any(needed):
                parts = weight_gradient.gradients(dy, x, gate, rstd, weight, dh, spec, needed, cuts)
                dx, dgate = (parts[0], parts[1]) if rows is WHOLE_ROWS else (dx, dgate)
                dweight = parts[2]
        dresidual = dx if need_residual else None
        if dx is not None and dx.dtype != branch_dtype:
            dx = dx.to(branch_dtype)
        return scale_branch(dx, spec) if dx is not None else None, dresidual, dgate, dweight, None, None, None
