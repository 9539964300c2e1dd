"""The launches of the backward: which kernels take a shape, and in which order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm import _ops, reference
from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.configurations import Tile
from rmsnorm.gpu.kernels import backward as kernels
from rmsnorm.gpu.kernels import columns as column_kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel

_BACKWARD = Kernel(kernels.backward)
_SLOPES = Kernel(kernels.slopes)
_REBUILD = Kernel(kernels.rebuild)
_COLUMNS = Kernel(column_kernels.columns)
_FOLD = Kernel(column_kernels.fold)


def dweight_dtype(weight: Tensor | None) -> torch.dtype:
    return torch.float32 if weight is None else weight.dtype


def rebuild(y: Tensor, rstd: Tensor, weight: Tensor | None, offset: float | None, dtype: torch.dtype) -> Tensor:
    x = _ops.like(y, dtype)
    place = layout.rows(y, x)
    if place is None:
        y = y.contiguous()
        x = torch.empty_like(y, dtype=dtype)
        place = layout.rows(y, x)
        assert place is not None  # noqa: S101 - contiguous tensors
    if place.number == 0:
        return x
    cols = y.shape[-1]
    tile = configurations.columns(2, launching.target(y.device))
    arguments = (
        *(y, x, rstd, weight, cols, place.inner, *place.strides, offset),
        *(place.nested, tile.block, INTERPRETED),
    )
    key = y.dtype, x.dtype, None if weight is None else weight.dtype, offset is None, place.nested
    aligned = layout.aligned(cols, place.strides, y, x, rstd, weight)
    launching.launch(_REBUILD, y.device, (place.number, -(-cols // tile.block), 1), arguments, key, aligned, tile.warps)
    return x


def gradients(
    place: layout.Rows,
    dy: Tensor,
    x: Tensor,
    dh: Tensor | None,
    dx: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float | None,
    need_dweight: bool,
) -> Tensor | None:
    """Fills dx where there is one; returns dweight where wanted."""
    cols, device, number = x.shape[-1], x.device, place.number
    leaves = reference.leaves(number)
    dweight = torch.empty(cols, dtype=dweight_dtype(weight), device=device) if need_dweight else None
    partial = dweight
    if need_dweight and leaves > 1:
        partial = torch.empty((leaves, cols), dtype=torch.float32, device=device)
    if number == 0:
        return dweight if dweight is None else dweight.zero_()
    tile = configurations.backward(cols, launching.target(device))
    if dx is None:
        if partial is not None:
            _launch_columns(place, dy, x, None, None, rstd, weight, None, partial, leaves, offset)
    elif tile is None:
        k = torch.empty_like(rstd)
        _launch_slopes(place, dy, x, rstd, weight, k, offset)
        _launch_columns(place, dy, x, dh, dx, rstd, weight, k, partial, leaves, offset)
    elif partial is None or (tile.rows == 1 and configurations.fused(number, leaves)):
        _launch_backward(tile, place, dy, x, dh, dx, rstd, weight, partial, leaves, offset)
    else:
        _launch_backward(tile, place, dy, x, dh, dx, rstd, weight, None, leaves, offset)
        _launch_columns(place, dy, x, None, None, rstd, weight, None, partial, leaves, offset)
    if dweight is not None and leaves > 1:
        assert partial is not None  # noqa: S101 - for the type checker
        _launch_folds(partial, dweight)
    return dweight


def _launch_folds(partial: Tensor, dweight: Tensor) -> None:
    """Adds the sums of the leaves, as many at a time as one program takes."""
    (leaves, cols), device = partial.shape, partial.device
    tile = configurations.fold(launching.target(device))
    tiles = -(-cols // tile.block)
    while leaves > 1:
        groups = -(-leaves // tile.rows)
        total = dweight if groups == 1 else torch.empty((groups, cols), dtype=torch.float32, device=device)
        arguments = partial, total, leaves, cols, tiles, tile.rows, _log(tile.rows // 8), tile.block, INTERPRETED
        aligned = layout.aligned(cols, (), partial, total)
        launching.launch(_FOLD, device, (groups * tiles, 1, 1), arguments, (total.dtype,), aligned, tile.warps)
        partial, leaves = total, groups


def _launch_backward(
    tile: Tile,
    place: layout.Rows,
    dy: Tensor,
    x: Tensor,
    dh: Tensor | None,
    dx: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    partial: Tensor | None,
    leaves: int,
    offset: float | None,
) -> None:
    cols, device = x.shape[-1], x.device
    form = configurations.form(launching.target(device), cols)
    tensors = dy, x, dh, dx, rstd, weight, partial
    numbers = place.number, cols, place.inner, *place.strides, _log(leaves), 1.0 / cols, offset
    constants = (
        *(place.nested, tile.rows, tile.block, tile.block == cols),
        *(configurations.log_cols(cols), form, INTERPRETED),
    )
    key = (*_types(dy, x, weight, offset), cols, place.nested, dh is None, None if partial is None else partial.dtype)
    programs = -(-place.number // tile.rows) if partial is None else leaves
    aligned = layout.aligned(cols, place.strides, *tensors)
    launching.launch(_BACKWARD, device, (programs, 1, 1), (*tensors, *numbers, *constants), key, aligned, tile.warps)


def _launch_slopes(
    place: layout.Rows, dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, k: Tensor, offset: float | None
) -> None:
    cols, device = x.shape[-1], x.device
    tile = configurations.slopes(launching.target(device))
    tensors = dy, x, rstd, weight, k
    numbers = cols, place.inner, *place.strides[:4], 1.0 / cols, offset
    constants = (
        *(place.nested, tile.block, configurations.log_cols(cols)),
        *(configurations.form(launching.target(device), cols), INTERPRETED),
    )
    key = (*_types(dy, x, weight, offset), cols, place.nested)
    aligned = layout.aligned(cols, place.strides, *tensors)
    launching.launch(_SLOPES, device, (place.number, 1, 1), (*tensors, *numbers, *constants), key, aligned, tile.warps)


def _launch_columns(
    place: layout.Rows,
    dy: Tensor,
    x: Tensor,
    dh: Tensor | None,
    dx: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    k: Tensor | None,
    partial: Tensor | None,
    leaves: int,
    offset: float | None,
) -> None:
    cols, device = x.shape[-1], x.device
    tile = configurations.columns(min(dy.dtype.itemsize, x.dtype.itemsize), launching.target(device))
    tensors = dy, x, dh, dx, rstd, weight, k, partial
    numbers = place.number, cols, place.inner, *place.strides, _log(leaves), offset
    constants = place.nested, tile.block, configurations.columns_unroll(dx is not None), INTERPRETED
    key = (
        *_types(dy, x, weight, offset),
        place.nested,
        dh is None,
        dx is None,
        None if partial is None else partial.dtype,
    )
    grid = leaves, -(-cols // tile.block), 1
    aligned = layout.aligned(cols, place.strides, *tensors)
    launching.launch(_COLUMNS, device, grid, (*tensors, *numbers, *constants), key, aligned, tile.warps)


def _types(dy: Tensor, x: Tensor, weight: Tensor | None, offset: float | None) -> tuple[Any, ...]:
    return dy.dtype, x.dtype, None if weight is None else weight.dtype, offset is None


def _log(leaves: int) -> int:
    return leaves.bit_length() - 1
