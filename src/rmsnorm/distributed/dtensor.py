"""DTensor: where the operators may run on each rank's part, and rows whose elements lie on several ranks.

Rows are independent of one another, so no sharding of the leading dimensions needs communication but for `dweight`, a
sum over all rows in one order (sharded_rows.py). Where the last dimension is sharded, a row needs its largest magnitude
and one sum from all ranks. The sum is of integers (docs/numerics.md), so that it is the same however the row is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from rmsnorm.distributed import weight_gradient
from rmsnorm.distributed.weight_gradient import Cut
from rmsnorm.numerics import reference
from rmsnorm.ops import autograd

Rule = list[tuple[list[Any], list[Any]]]


def normalize(
    x: DTensor, residual: DTensor | None, weight: DTensor | None, eps: float, weight_offset: float, code: int
) -> tuple[Tensor, Tensor | None]:
    """y, and h when there is a residual, as DTensors sharded as x."""
    for name, t in (("x", x), ("residual", residual), ("weight", weight)):
        if t is not None and not isinstance(t, DTensor):
            raise TypeError(f"{name} must be a DTensor where the others are, got {type(t).__name__}")
    options = (eps, weight_offset, code)
    if any(p.is_shard(x.dim() - 1) for p in x.placements):
        return _normalize_pieces(x, residual, weight, *options)
    # Always through autograd: what needs no gradient saves nothing.
    if residual is not None:
        return autograd.AddRMSNorm.apply(x, residual, weight, *options)  # type: ignore[no-any-return]
    return autograd.RMSNorm.apply(x, weight, *options, False), None


# ---------------------------------------------------------------- whole rows on each rank


def _rule(x: Any, weight: Any, inputs: int, outputs: int) -> Rule:
    """Of `inputs` tensors like x, the weight and three options: replicated, or cut along any dimension but the last."""
    cuts: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(x.ndim - 1))]
    replicated = None if weight is None else Replicate()
    return [([cut] * outputs, [*[cut] * inputs, replicated, None, None, None]) for cut in cuts]


@register_sharding(torch.ops.rmsnorm.forward.default)
def _forward(x: Any, weight: Any, *_: Any) -> Rule:
    return _rule(x, weight, 1, 1)


@register_sharding(torch.ops.rmsnorm.forward_train.default)
def _forward_train(x: Any, weight: Any, *_: Any) -> Rule:
    return _rule(x, weight, 1, 2)


@register_sharding(torch.ops.rmsnorm.add_forward.default)
def _add_forward(x: Any, residual: Any, weight: Any, *_: Any) -> Rule:
    return _rule(x, weight, 2, 3)


def backward(
    dy: DTensor,
    x: DTensor,
    rstd: DTensor,
    weight: DTensor | None,
    weight_offset: float,
    dh: DTensor | None,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """The operator of that name. `dweight` has the weight's placements and the bits of one process."""
    mesh, placements = rstd.device_mesh, rstd.placements  # those of the forward: x may have been partial sums

    def local(t: DTensor | None, placements: Sequence[Placement] = placements) -> Tensor | None:
        return None if t is None else t.redistribute(placements=placements).to_local()

    whole = [Replicate()] * mesh.ndim
    dx, dweight = weight_gradient.gradients(
        *(local(dy), local(x), local(rstd), local(weight, whole), weight_offset, local(dh)),
        *(weight_gradient.cuts_of(x.shape, mesh, placements), need_dx, need_dweight),
    )
    if need_dx:
        dx = _distributed(dx, mesh, placements, x.shape)
    if need_dweight and weight is not None:
        dweight = _distributed(dweight, mesh, whole, weight.shape).redistribute(placements=weight.placements)
    return dx, dweight


# ---------------------------------------------------------------- rows in pieces on several ranks


class Pieces(reference.Row):
    """Rows of `length` elements, of which each rank of the groups has some."""

    def __init__(self, length: int, groups: list[Any]) -> None:
        self._length = length
        self._groups = groups

    def length(self, piece: Tensor) -> int:
        return self._length

    def largest(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        # A rank may have nothing of a row. As integers the bits of magnitudes keep their order; NaN is above infinity.
        columns = [super(Pieces, self).largest(p)[0] if p.shape[-1] else p.new_zeros(*p.shape[:-1], 1) for p in pieces]
        bits = torch.cat(columns, -1).double().view(torch.int64)
        return self._reduce(bits, "max").view(torch.float64).to(pieces[0].dtype).split(1, -1)  # type: ignore[no-any-return]

    def total(self, *pieces: Tensor) -> tuple[Tensor, ...]:
        return self._reduce(torch.cat(super().total(*pieces), -1), "sum").split(1, -1)  # type: ignore[no-any-return]

    def _reduce(self, local: Tensor, operation: str) -> Tensor:
        for group in self._groups:
            local = collectives.wait_tensor(collectives.all_reduce(local, operation, group))
        return local


class NormalizePieces(torch.autograd.Function):
    """y, h of this rank's piece of each row. One MAX and one SUM of a number per row, and the same again backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        code: int,
        row: Pieces,
        cuts: list[Cut],
    ) -> tuple[Tensor, Tensor]:
        h = x if residual is None else x + residual
        y, rstd = reference.forward(h, weight, eps, weight_offset, reference.ROUNDINGS[code], row)
        ctx.save_for_backward(h, weight, rstd)
        ctx.options = weight_offset, row, cuts
        return y, x.view_as(x) if residual is None else h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, rstd = ctx.saved_tensors
        weight_offset, row, cuts = ctx.options
        has_residual, need_dweight = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        dx = None
        if ctx.needs_input_grad[0] or has_residual:
            dx = reference.input_gradient(dy, h, rstd, weight, weight_offset, dh, row)
        dweight = None
        if need_dweight and h.shape[-1] == 0:
            dweight = torch.zeros_like(weight)
        elif need_dweight:
            _, dweight = weight_gradient.gradients(dy, h, rstd, weight, weight_offset, None, cuts, False, True)
        return dx, dx if has_residual else None, dweight, None, None, None, None, None


def _normalize_pieces(
    x: DTensor, residual: DTensor | None, weight: DTensor | None, eps: float, weight_offset: float, code: int
) -> tuple[Tensor, Tensor | None]:
    mesh, last = x.device_mesh, x.dim() - 1
    placements = [p if type(p) is Shard else Replicate() for p in x.placements]
    cut = [p.is_shard(last) for p in placements]
    row = Pieces(x.shape[-1], [mesh.get_group(dim) for dim, is_cut in enumerate(cut) if is_cut])

    def local(t: DTensor | None, placements: list[Any], gradient: list[Any]) -> Tensor | None:
        return None if t is None else t.redistribute(placements=placements).to_local(grad_placements=gradient)

    weight_placements = [Shard(0) if is_cut else Replicate() for is_cut in cut]
    y, h = NormalizePieces.apply(
        local(x, placements, placements),
        local(residual, placements, placements),
        local(weight, weight_placements, weight_placements),
        eps,
        weight_offset,
        code,
        row,
        weight_gradient.cuts_of(x.shape, mesh, placements),
    )

    y, h = (_distributed(t, mesh, placements, x.shape) for t in (y, h))
    return y, None if residual is None else h


def _distributed(local: Tensor, mesh: Any, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
