"""dweight of rows that lie on several ranks: one process's sum, a binary tree over all rows (fixed_sum.sum_rows).

Ranks exchange what they have of it, rows for columns, and each adds up some columns as one process would. Where shares
are equal, what a rank has of its rows are nodes of the tree, and only those are exchanged; otherwise the terms are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from rmsnorm.numerics import reference
from rmsnorm.numerics.fixed_sum import add_in_pairs, leaves, sum_rows
from rmsnorm.ops import doors
from rmsnorm.ops.doors import Gradients, Needed
from rmsnorm.spec import NormSpec

# Its name before torch 2.13.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


class Cut(NamedTuple):
    """A leading dimension that is split over the ranks of a group."""

    group: Any
    dim: int
    sizes: list[int]  # of each rank's part

    def of_runs(self, length: int) -> Cut:
        """As many of which are one."""
        return self._replace(sizes=[size // length for size in self.sizes])


def cuts_of(shape: Sequence[int], mesh: Any, placements: Sequence[Placement]) -> list[Cut]:
    """Those of the rows of this rank, in the order of the mesh."""
    sizes, found = list(shape), []
    for index, placement in enumerate(placements):
        if not isinstance(placement, Shard) or placement.dim == len(shape) - 1:
            continue
        dim, ranks = placement.dim, mesh.size(index)
        length = -(-sizes[dim] // ranks)
        parts = [min(max(sizes[dim] - length * rank, 0), length) for rank in range(ranks)]
        found.append(Cut(mesh.get_group(index), dim, parts))
        sizes[dim] = parts[mesh.get_local_rank(index)]
    return found


def gradients(
    dy: Any,
    x: Any,
    gate: Any,
    rstd: Any,
    weight: Tensor | None,
    dh: Any,
    spec: NormSpec,
    needed: Needed,
    cuts: list[Cut],
) -> Gradients:
    """`doors.backward` on this rank's rows, with `dweight` summed over those of all ranks."""
    need_dx, need_dgate, need_dweight = needed
    if not (need_dweight and cuts):
        return doors.backward(dy, x, gate, rstd, weight, dh, spec, needed)
    weight_dtype = torch.float32 if weight is None else weight.dtype
    weight = None if weight is None else weight.float()  # so that dweight is rounded once, when it is whole
    inner = max([cut.dim for cut in cuts])
    outer = x.shape[:inner]
    add: Callable[[Tensor], Tensor]
    if _are_subtrees(x.shape, inner, cuts):
        # What the kernel makes of each run of rows that are neighbours in the whole is a node of one process's tree.
        runs: Any = zip(*(_runs(t, inner) for t in (dy, x, gate, rstd, dh)), strict=False)
        shape = x.shape
        found = [doors.backward(dy, x, gate, rstd, weight, dh, spec, needed) for dy, x, gate, rstd, dh in runs]
        dx, dgate = (_joined([f[i] for f in found], shape) for i in range(2))
        part, add = torch.stack([f[2] for f in found]).view(*outer, 1, -1), add_in_pairs  # type: ignore[misc]
        cuts = [cut.of_runs(shape[inner]) if cut.dim == inner else cut for cut in cuts]
    else:
        dx, dgate, _ = doors.backward(dy, x, gate, rstd, weight, dh, spec, (need_dx, need_dgate, False))
        part, add = reference.input_gradients(dy, x, gate, rstd, weight, None, spec)[2], sum_rows
    return dx, dgate, sum_over_ranks(part, cuts, add).to(weight_dtype)


def _joined(runs: list[Tensor | None], shape: Sequence[int]) -> Tensor | None:
    if runs[0] is None:
        return None
    return (runs[0] if len(runs) == 1 else torch.stack(runs)).view(*shape)  # type: ignore[arg-type]


def _are_subtrees(shape: Sequence[int], inner: int, cuts: list[Cut]) -> bool:
    """Whether each run of rows that this rank has of `inner` and the dimensions after it is a node of the whole sum."""
    if any(max(cut.sizes) > min(cut.sizes) for cut in cuts):
        return False
    run = math.prod(shape[inner:-1])
    runs = math.prod(shape[:inner]) * math.prod([len(cut.sizes) for cut in cuts])
    return leaves(runs * run) == runs * leaves(run)


def _runs(t: Tensor | None, inner: int) -> Iterable[Tensor | None]:
    if t is None:
        return itertools.repeat(None)
    return t.flatten(0, inner - 1).unbind() if inner else [t]


def sum_over_ranks(part: Tensor, cuts: list[Cut], add: Callable[[Tensor], Tensor]) -> Tensor:
    """add(rows) of all ranks' rows, in the order they have as a whole.

    Two exchanges, of as many bytes as an all-reduce: all rows of some columns for all columns of some rows, and the
    sums of columns.
    """
    cols, ranks = part.shape[-1], math.prod([len(cut.sizes) for cut in cuts])
    part = torch.nn.functional.pad(part, (0, -cols % ranks))
    for cut in reversed(cuts):
        part = _rows_for_columns(part, cut)
    total = add(part.flatten(0, -2))
    for cut in cuts:
        total = collectives.wait_tensor(_all_gather(total, 0, cut.group))
    return total[:cols]


def _rows_for_columns(part: Tensor, cut: Cut) -> Tensor:
    """Gives each rank of the group its columns of these rows; returns all rows of this rank's columns."""
    ranks = len(cut.sizes)
    columns = torch.stack(part.chunk(ranks, -1))  # one for each rank
    own, (*shape, width) = columns[0].numel(), columns.shape[1:]
    others = math.prod(shape[: cut.dim]) * math.prod(shape[cut.dim + 1 :]) * width
    lengths = [size * others for size in cut.sizes]
    received = collectives.wait_tensor(
        collectives.all_to_all_single(columns.flatten(), lengths, [own] * ranks, cut.group)
    )
    pieces = received.split(lengths)
    shapes = [(*shape[: cut.dim], size, *shape[cut.dim + 1 :], width) for size in cut.sizes]
    return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], cut.dim)
