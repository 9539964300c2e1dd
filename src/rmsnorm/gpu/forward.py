"""The launch of the forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.kernels import forward as kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel

_FORWARD = Kernel(kernels.forward)
_FORWARD_IN_PIECES = Kernel(kernels.forward_in_pieces)


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
    gpu = launching.target(device)
    form = configurations.form(gpu, cols)
    tile = configurations.forward(cols, gpu)
    tensors = x, residual, weight, y, h, rstd
    numbers = cols, place.inner, *place.strides, 1.0 / cols, eps, offset
    aligned = layout.aligned(cols, place.strides, *tensors)
    key = (
        *(x.dtype, None if weight is None else weight.dtype, rounding, cols, place.nested),
        *(residual is None, rstd is None, offset is None),
    )
    log_cols = configurations.log_cols(cols)
    if tile is None:
        tile = configurations.forward_pieces(gpu)
        constants: tuple[Any, ...] = (x_hat, place.nested, tile.block, log_cols, form, INTERPRETED)
        arguments: tuple[Any, ...] = (*tensors, *numbers, *constants)
        launching.launch(_FORWARD_IN_PIECES, device, (place.number, 1, 1), arguments, key, aligned, tile.warps)
    else:
        constants = (x_hat, place.nested, tile.rows, tile.block, tile.block == cols, log_cols, form, INTERPRETED)
        arguments = (*tensors, place.number, *numbers, *constants)
        launching.launch(_FORWARD, device, (-(-place.number // tile.rows), 1, 1), arguments, key, aligned, tile.warps)
