"""The launch of the forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.kernels import forward as kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel, Launch
from rmsnorm.gpu.layout import Maker

_FORWARD = Kernel(kernels.forward)
_FORWARD_IN_PIECES = Kernel(kernels.forward_in_pieces)


class Normalization(NamedTuple):
    """A launch, and how what it writes is made from x."""

    launch: Launch
    y: Maker
    h: Maker | None
    rstd: Maker | None

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        y, h, rstd = self.y(x), None if self.h is None else self.h(x), None if self.rstd is None else self.rstd(x)
        self.launch(x, residual, weight, y, h, rstd)
        return y, h, rstd


def prepare(
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
) -> Launch:
    """Takes x, residual, weight, y, h and rstd."""
    cols, device = x.shape[-1], x.device
    target = launching.target(device)
    tile = configurations.forward(cols, target)
    tensors = x, residual, weight, y, h, rstd
    numbers = cols, place.inner, *place.strides, 1.0 / cols, eps, offset
    sums = configurations.log_cols(cols), configurations.form(target, cols), INTERPRETED
    # fmt: off
    key = (
        x.dtype, None if weight is None else weight.dtype, rounding, cols, place.nested, residual is None,
        rstd is None, offset is None,
    )
    # fmt: on
    aligned = layout.aligned(cols, place.strides, *tensors)
    if tile is None:
        tile = configurations.forward_pieces(target)
        arguments = *tensors, *numbers, x_hat, place.nested, tile.block, *sums
        return launching.prepare(_FORWARD_IN_PIECES, device, (place.number, 1, 1), arguments, key, aligned, tile.warps)
    constants = x_hat, place.nested, tile.rows, tile.block, tile.block == cols, *sums
    grid = -(-place.number // tile.rows), 1, 1
    return launching.prepare(
        _FORWARD, device, grid, (*tensors, place.number, *numbers, *constants), key, aligned, tile.warps
    )
