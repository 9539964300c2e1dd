"""The launch of the forward with groups and a gate."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.kernels import gated_forward as kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel

_FORWARD = Kernel(kernels.gated_forward)
_FORWARD_IN_PIECES = Kernel(kernels.gated_forward_in_pieces)


class Gating(NamedTuple):
    """How x and its gate go together, if there is a gate."""

    silu: bool
    first: bool


NO_GATE = Gating(False, False)  # what kernels without one are given


class _Plan(NamedTuple):
    """How groups of one size are taken on one device."""

    kernel: Kernel
    rows: int  # per program; 0 where a group takes several pieces
    warps: int
    constants: tuple[Any, ...]


@cache
def plan(device: torch.device, cols: int, gating: Gating | None, x_hat: Any, normed: Any, nested: bool) -> _Plan:
    """Remembered, because a call takes no longer on the device than this takes here."""
    target = launching.target(device)
    sums = configurations.log_cols(cols), configurations.form(target, cols, gating is not None), INTERPRETED
    tile = configurations.gated_forward(cols, target)
    options = gating or NO_GATE
    if tile is None:
        tile = configurations.gated_pieces(target)
        return _Plan(_FORWARD_IN_PIECES, 0, tile.warps, (*options, x_hat, normed, nested, tile.block, *sums))
    constants = *options, x_hat, normed, nested, tile.rows, tile.block, tile.block == cols, *sums
    return _Plan(_FORWARD, tile.rows, tile.warps, constants)


def forward(
    place: layout.Rows,
    cols: int,
    gating: Gating | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    y: Tensor,
    rstd: Tensor | None,
    eps: float,
    offset: float | None,
    x_hat: Any,
    normed: Any,
) -> None:
    groups = x.shape[-1] // cols
    kernel, rows, warps, constants = plan(x.device, cols, gating, x_hat, normed, place.nested)
    tensors = x, gate, weight, y, rstd
    numbers = groups, cols, place.inner, *place.strides, 1.0 / cols, eps, offset
    # fmt: off
    key = (
        x.dtype, None if weight is None else weight.dtype, y.dtype, x_hat, normed, cols, gating, place.nested,
        rstd is None, offset is None,
    )
    # fmt: on
    aligned = layout.aligned(cols, place.strides, *tensors)
    if rows == 0:
        programs, arguments = place.number, (*tensors, *numbers, *constants)
    else:
        programs, arguments = -(-place.number // rows), (*tensors, place.number, *numbers, *constants)
    launching.launch(kernel, x.device, (programs * groups, 1, 1), arguments, key, aligned, warps)
