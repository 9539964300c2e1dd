"""Broadcasting over the rows of a DTensor, whose gradient is one process's sum (ops/sharing.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rmsnorm.distributed import weight_gradient
from rmsnorm.distributed.dtensor import distributed
from rmsnorm.distributed.weight_gradient import Cut
from rmsnorm.numerics.fixed_sum import sum_rows
from rmsnorm.numerics.modulation import shared_dims, sum_shared


def expand(given: Tensor, like: DTensor, name: str) -> DTensor:
    """A tensor in the shape of a DTensor and cut as it is."""
    mesh = like.device_mesh
    t = distributed(given, mesh, name)
    missing, shape = like.dim() - t.dim(), like.shape
    placements: list[Placement] = []
    for placement in like.placements:
        whole = not isinstance(placement, Shard) or placement.dim < missing
        narrow = not whole and t.shape[placement.dim - missing] != shape[placement.dim]  # type: ignore[attr-defined]
        placements.append(Replicate() if whole or narrow else Shard(placement.dim - missing))  # type: ignore[attr-defined]
    shared = shared_dims(shape, t.shape)
    cuts = [cut for cut in weight_gradient.cuts_of(shape, mesh, like.placements) if cut.dim in shared]
    local = t.redistribute(placements=placements).to_local(grad_placements=placements)
    wide = _Expand.apply(local, like.to_local().shape, shared, cuts)
    return DTensor.from_local(wide, mesh, like.placements, run_check=False, shape=shape, stride=_strides(shape))


class _Expand(torch.autograd.Function):
    """`local.expand(shape)`, of which ranks have cuts."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shape: torch.Size, shared: list[int], cuts: list[Cut]) -> Tensor:
        ctx.narrow, ctx.cut = local.shape, (shared, cuts)
        return local.expand(shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Sum.apply(grad, ctx.narrow, *ctx.cut), None, None, None


class _Sum(torch.autograd.Function):
    """`_sum`."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor, shape: torch.Size, shared: list[int], cuts: list[Cut]) -> Tensor:
        ctx.wide, ctx.cut = terms.shape, (shared, cuts)
        return _sum(terms, shape, shared, cuts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Expand.apply(grad, ctx.wide, *ctx.cut), None, None, None


def _sum(terms: Tensor, shape: torch.Size, shared: list[int], cuts: list[Cut]) -> Tensor:
    """`sum_shared` over the rows of all ranks: what they do not share counts as columns."""
    if not cuts:
        return sum_shared(terms, shape)
    kept = [dim for dim in range(terms.dim() - 1) if dim not in shared]
    columns = terms.permute(*shared, *kept, -1).reshape(*(terms.shape[dim] for dim in shared), -1)
    cuts = [cut._replace(dim=shared.index(cut.dim)) for cut in cuts]
    return weight_gradient.sum_over_ranks(columns, cuts, sum_rows).reshape(shape)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
