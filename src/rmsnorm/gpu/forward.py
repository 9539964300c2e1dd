"""The launch of the forward."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.kernels import forward as kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel

_FORWARD = Kernel(kernels.forward)
_FORWARD_IN_PIECES = Kernel(kernels.forward_in_pieces)


class _Plan(NamedTuple):
    """How rows of one width are taken on one device."""

    kernel: Kernel
    rows: int  # per program; 0 where a row takes several pieces
    warps: int
    constants: tuple[Any, ...]


@cache
def plan(device: torch.device, cols: int, x_hat: Any, nested: bool) -> _Plan:
    """Remembered, because a call takes no longer on the device than this takes here."""
    target = launching.target(device)
    log_cols, form = configurations.log_cols(cols), configurations.form(target, cols)
    tile = configurations.forward(cols, target)
    if tile is None:
        tile = configurations.forward_pieces(target)
        return _Plan(_FORWARD_IN_PIECES, 0, tile.warps, (x_hat, nested, tile.block, log_cols, form, INTERPRETED))
    constants = x_hat, nested, tile.rows, tile.block, tile.block == cols, log_cols, form, INTERPRETED
    return _Plan(_FORWARD, tile.rows, tile.warps, constants)


def forward(
    place: layout.Rows,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    y: Tensor,
    h: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    offset: float | None,
    x_hat: Any,
    rounding: int,
) -> None:
    cols, device = x.shape[-1], x.device
    kernel, rows, warps, constants = plan(device, cols, x_hat, place.nested)
    tensors = x, residual, weight, y, h, rstd
    numbers = cols, place.inner, *place.strides, 1.0 / cols, eps, offset
    # fmt: off
    key = (
        x.dtype, None if weight is None else weight.dtype, rounding, cols, place.nested, residual is None,
        rstd is None, offset is None,
    )
    # fmt: on
    aligned = layout.aligned(cols, place.strides, *tensors)
    if rows == 0:
        grid, arguments = (place.number, 1, 1), (*tensors, *numbers, *constants)
    else:
        grid, arguments = (-(-place.number // rows), 1, 1), (*tensors, place.number, *numbers, *constants)
    launching.launch(kernel, device, grid, arguments, key, aligned, warps)
