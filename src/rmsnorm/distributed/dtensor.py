"""DTensor: where the operators may run on each rank's part.

Rows are independent of one another, so no sharding of the leading dimensions needs communication but for `dweight`, a
sum over all rows in one order (weight_gradient.py). Rows whose elements lie on several ranks are split_rows.py's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from rmsnorm.distributed import weight_gradient
from rmsnorm.distributed.split_rows import AllReduced, SplitNorm
from rmsnorm.numerics.fixed_sum import WHOLE_ROWS
from rmsnorm.ops import autograd
from rmsnorm.ops.doors import Gradients
from rmsnorm.ops.library import operators
from rmsnorm.spec import NormSpec

Rule = list[tuple[list[Any], list[Any]]]


def normalize(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor | None]:
    """y, and h when there is a residual, as DTensors sharded as x."""
    tensors: Any = _all_distributed({"x": x, "residual": residual, "gate": gate, "weight": weight})
    if any(p.is_shard(x.dim() - 1) for p in tensors[0].placements):
        return _normalize_split(tensors, spec)
    x, residual, gate, weight = tensors
    # Always through autograd: what needs no gradient saves nothing.
    results = autograd.Norm.apply(x, residual, gate, weight, spec)
    return (results, None) if residual is None else results


def _all_distributed(tensors: dict[str, Tensor | None]) -> list[DTensor | None]:
    mesh = next(t.device_mesh for t in tensors.values() if isinstance(t, DTensor))
    return [None if t is None else distributed(t, mesh, name) for name, t in tensors.items()]


def distributed(t: Tensor, mesh: Any, name: str) -> DTensor:
    """A DTensor as it is; a plain tensor where those count as the same on all ranks."""
    if isinstance(t, DTensor):
        return t
    if not DTensor._op_dispatcher._allow_implicit_replication:
        raise TypeError(f"{name} must be a DTensor where the others are, got {type(t).__name__}")
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


# ---------------------------------------------------------------- whole rows on each rank


def _rule(like_x: Sequence[Any], weight: Any, outputs: int, options: int) -> Rule:
    """Tensors like x, the weight and options: replicated, or cut along any dimension but the last."""
    x = like_x[0]
    cuts: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(x.ndim - 1))]
    replicated = None if weight is None else Replicate()
    return [
        ([cut] * outputs, [*(None if t is None else cut for t in like_x), replicated, *[None] * options])
        for cut in cuts
    ]


def _register(name: str, beside_x: int, outputs: int) -> None:
    """Of operators whose arguments are x, what lies beside it, the weight, and options."""
    op = getattr(torch.ops.rmsnorm, name).default
    options = len(op._schema.arguments) - beside_x - 2

    @register_sharding(op)
    def rule(*arguments: Any) -> Rule:
        return _rule(arguments[: beside_x + 1], arguments[beside_x + 1], outputs, options)


for _name, _beside_x, _outputs in (
    ("forward", 0, 1),
    ("partial_forward", 0, 1),
    ("partial_forward_train", 0, 2),
    ("forward_train", 0, 2),
    ("add_forward", 1, 3),
    ("gated_forward", 1, 1),
    ("gated_forward_train", 1, 2),
    ("residual_forward", 1, 3),
):
    _register(_name, _beside_x, _outputs)


def _backward(
    dy: DTensor,
    x: DTensor,
    rstd: DTensor,
    weight: DTensor | None,
    weight_offset: float,
    dh: DTensor | None,
    _: None,
    *needed: bool,
) -> tuple[Tensor | None, Tensor | None]:
    need_dx, need_dweight = needed
    spec = NormSpec(0.0, weight_offset)
    dx, _dgate, dweight = _gradients(dy, x, None, rstd, weight, dh, spec, (need_dx, False, need_dweight))
    return dx, dweight


def _partial_backward(
    dy: DTensor, x: DTensor, rstd: DTensor, weight: DTensor | None, *options: Any
) -> tuple[Tensor | None, Tensor | None]:
    weight_offset, partial, need_dx, need_dweight = options
    spec = NormSpec(0.0, weight_offset, partial=partial)
    dx, _dgate, dweight = _gradients(dy, x, None, rstd, weight, None, spec, (need_dx, False, need_dweight))
    return dx, dweight


def _gated_backward(
    dy: DTensor,
    x: DTensor,
    gate: DTensor | None,
    rstd: DTensor,
    weight: DTensor | None,
    dh: DTensor | None,
    *options: Any,
) -> Gradients:
    weight_offset, group_size, activation, gate_first, *needed = options
    spec = NormSpec(0.0, weight_offset, 0, group_size, activation, gate_first)
    return _gradients(dy, x, gate, rstd, weight, dh, spec, tuple(needed))


def _gradients(
    dy: DTensor,
    x: DTensor,
    gate: DTensor | None,
    rstd: DTensor,
    weight: DTensor | None,
    dh: DTensor | None,
    spec: NormSpec,
    needed: Any,
) -> Gradients:
    """`doors.backward`, where `dweight` has the weight's placements and the bits of one process."""
    mesh, placements = rstd.device_mesh, rstd.placements  # those of the forward: x may have been partial sums

    def local(t: DTensor | None, placements: Sequence[Placement] = placements) -> Tensor | None:
        return None if t is None else t.redistribute(placements=placements).to_local()

    whole = [Replicate()] * mesh.ndim
    dx, dgate, dweight = weight_gradient.gradients(
        *(local(dy), local(x), local(gate), local(rstd), local(weight, whole), local(dh), spec, needed),
        weight_gradient.cuts_of(x.shape, mesh, placements),
    )
    dx, dgate = (None if t is None else _distributed(t, mesh, placements, x.shape) for t in (dx, dgate))
    if dweight is not None and weight is not None:
        dweight = _distributed(dweight, mesh, whole, weight.shape).redistribute(placements=weight.placements)
    return dx, dgate, dweight


operators.distributed = SimpleNamespace(
    **vars(operators.traced)
    | {"backward": _backward, "partial_backward": _partial_backward, "gated_backward": _gated_backward}
)


# ---------------------------------------------------------------- rows in pieces on several ranks


def _normalize_split(tensors: Any, spec: NormSpec) -> tuple[Any, Any]:
    x, residual, gate, weight = tensors
    mesh, last = x.device_mesh, x.dim() - 1
    placements = [p if type(p) is Shard else Replicate() for p in x.placements]
    cut = [p.is_shard(last) for p in placements]
    if spec.partial or (spec.group_size and not _whole_groups(x.shape[-1], spec.group_size, mesh, cut)):
        # Groups that lie on two ranks, and what only some ranks have: each rank gets the whole row.
        whole = [Replicate() if is_cut else p for is_cut, p in zip(cut, placements, strict=True)]
        x, residual, gate = (None if t is None else t.redistribute(placements=whole) for t in (x, residual, gate))
        results = normalize(x, residual, gate, weight, spec)  # type: ignore[arg-type]
        y, h = (None if t is None else t.redistribute(placements=placements) for t in results)  # type: ignore[attr-defined]
        return y, h
    process_groups = [mesh.get_group(dim) for dim, is_cut in enumerate(cut) if is_cut]
    rows = WHOLE_ROWS if spec.group_size else AllReduced(x.shape[-1], process_groups)

    def local(t: DTensor | None, placements: list[Any]) -> Tensor | None:
        return None if t is None else t.redistribute(placements=placements).to_local(grad_placements=placements)

    y, h = SplitNorm.apply(
        *(local(t, placements) for t in (x, residual, gate)),
        local(weight, [Shard(0) if is_cut else Replicate() for is_cut in cut]),
        *(spec, rows, weight_gradient.cuts_of(x.shape, mesh, placements)),
    )
    y, h = (None if t is None else _distributed(t, mesh, placements, x.shape) for t in (y, h))
    return y, h


def _whole_groups(cols: int, group_size: int, mesh: Any, cut: list[bool]) -> bool:
    """Whether no group of the row lies on two ranks."""
    ranks = math.prod([mesh.size(dim) for dim, is_cut in enumerate(cut) if is_cut])
    return bool(cols % (ranks * group_size) == 0)


def _distributed(local: Tensor, mesh: Any, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
