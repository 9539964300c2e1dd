"""The launches of the backward with groups and a gate; backward.py's, with more tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm.gpu import backward as plain
from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.configurations import Tile
from rmsnorm.gpu.gated_forward import NO_GATE, Gating
from rmsnorm.gpu.kernels import gated_backward as kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel
from rmsnorm.numerics import fixed_sum

_BACKWARD = Kernel(kernels.gated_backward)
_SLOPES = Kernel(kernels.gated_slopes)


def gradients(
    place: layout.Rows,
    cols: int,
    gating: Gating | None,
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    dx: Tensor | None,
    dgate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float | None,
    need_dweight: bool,
) -> Tensor | None:
    """Fills dx and dgate where they are; returns dweight where wanted."""
    width, number, target = x.shape[-1], place.number, launching.target(x.device)
    leaves = fixed_sum.leaves(number)
    dweight = torch.empty(width, dtype=plain.dweight_dtype(weight), device=x.device) if need_dweight else None
    partial = dweight
    if need_dweight and leaves > 1:
        partial = torch.empty((leaves, width), dtype=torch.float32, device=x.device)
    if number == 0:
        return None if dweight is None else dweight.zero_()
    tile = configurations.gated_backward(cols, target)
    columns = configurations.columns(min(dy.dtype.itemsize, x.dtype.itemsize), target)
    rest, weights = (place, cols, gating, dy, x, gate), (rstd, weight, offset)
    if dx is None and dgate is None:
        if partial is not None:
            _launch_backward(columns, *rest, None, None, *weights, None, partial, leaves)
    elif tile is None:
        k = torch.empty_like(rstd)
        _launch_slopes(*rest, *weights, k)
        _launch_backward(columns, *rest, dx, dgate, *weights, k, partial, leaves)
    elif partial is None or (tile.rows == 1 and configurations.fused(number, leaves * (width // cols))):
        _launch_backward(tile, *rest, dx, dgate, *weights, None, partial, leaves)
    else:
        _launch_backward(tile, *rest, dx, dgate, *weights, None, None, leaves)
        _launch_backward(columns, *rest, None, None, *weights, None, partial, leaves)
    if dweight is not None and leaves > 1:
        assert partial is not None  # noqa: S101 - for the type checker
        _launch_folds(partial, dweight)
    return dweight


def _launch_backward(
    tile: Tile,
    place: layout.Rows,
    cols: int,
    gating: Gating | None,
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    dx: Tensor | None,
    dgate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float | None,
    k: Tensor | None,
    partial: Tensor | None,
    leaves: int,
) -> None:
    target, groups, pieces = launching.target(x.device), x.shape[-1] // cols, -(-cols // tile.block)
    tensors = dy, x, gate, dx, dgate, rstd, weight, k, partial
    numbers = place.number, groups, cols, pieces, place.inner, *place.strides, plain._log(leaves), 1.0 / cols, offset
    # Whole groups have the sum of k taken; otherwise k is given, or not needed, and the group's size is no constant.
    whole = k is None and (dx is not None or dgate is not None)
    unroll = 1 if dx is not None or dgate is not None else configurations.columns_unroll(gating is not None)
    log_cols = configurations.log_cols(cols) if whole else None
    sums = configurations.form(target, cols, gating is not None) if whole else None
    constants = (
        *(*(gating or NO_GATE), place.nested, tile.rows, tile.block, whole and tile.block == cols),
        *(unroll, log_cols, sums, INTERPRETED),
    )
    key = (
        *(*_types(dy, x, weight, offset), place.nested, gating, tile, cols if whole else None),
        *(None if t is None else t.dtype for t in (dx, dgate, k, partial)),
    )
    programs = -(-place.number // tile.rows) if partial is None else leaves
    _launch(_BACKWARD, programs * groups * pieces, place, cols, tensors, numbers, constants, key, tile.warps)


def _launch_slopes(
    place: layout.Rows,
    cols: int,
    gating: Gating | None,
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float | None,
    k: Tensor,
) -> None:
    target, groups = launching.target(x.device), x.shape[-1] // cols
    tile = configurations.gated_pieces(target)
    tensors = dy, x, gate, rstd, weight, k
    numbers = groups, cols, place.inner, *place.strides[:6], 1.0 / cols, offset
    constants = (
        *(*(gating or NO_GATE), place.nested, tile.block),
        *(configurations.log_cols(cols), configurations.form(target, cols, gating is not None), INTERPRETED),
    )
    key = *_types(dy, x, weight, offset), place.nested, gating, cols
    _launch(_SLOPES, place.number * groups, place, cols, tensors, numbers, constants, key, tile.warps)


def _launch_folds(partial: Tensor, dweight: Tensor) -> None:
    (leaves, cols), device = partial.shape, partial.device
    while leaves > 1:
        fold = plain.fold_of(leaves, cols, launching.target(device))
        total = dweight if fold.left == 1 else torch.empty((fold.left, cols), dtype=torch.float32, device=device)
        key, aligned = (False, False, total.dtype), layout.aligned(cols, (), partial, total)
        launching.launch(plain._FOLD, device, fold.grid, (partial, total, *fold.rest), key, aligned, fold.tile.warps)
        partial, leaves = total, fold.left


def _types(dy: Tensor, x: Tensor, weight: Tensor | None, offset: float | None) -> tuple[Any, ...]:
    return dy.dtype, x.dtype, None if weight is None else weight.dtype, offset is None


def _launch(
    kernel: Kernel,
    programs: int,
    place: layout.Rows,
    cols: int,
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    constants: tuple[Any, ...],
    key: tuple[Any, ...],
    warps: int,
) -> None:
    aligned = layout.aligned(cols, place.strides, *tensors)
    launching.launch(kernel, tensors[1].device, (programs, 1, 1), (*tensors, *numbers, *constants), key, aligned, warps)
