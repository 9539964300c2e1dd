"""The operators `torch.ops.rmsnorm.gated_*` for CUDA and ROCm; see operators.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rmsnorm.gpu import configurations, layout, operators
from rmsnorm.gpu import gated_backward as backward_launches
from rmsnorm.gpu.gated_forward import Gating
from rmsnorm.gpu.gated_forward import forward as launch_forward
from rmsnorm.ops import fallback, layouts
from rmsnorm.spec import ACTIVATIONS


def gated_forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    activation: int,
    gate_first: bool,
) -> Tensor:
    options = rounding, group_size, activation, gate_first
    return _normalize(x, gate, weight, eps, weight_offset, *options, train=False)[0]


def gated_forward_train(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    activation: int,
    gate_first: bool,
) -> tuple[Tensor, Tensor]:
    options = rounding, group_size, activation, gate_first
    return _normalize(x, gate, weight, eps, weight_offset, *options, train=True)  # type: ignore[return-value]


def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    weight_offset: float,
    group_size: int,
    activation: int,
    gate_first: bool,
    need_dx: bool,
    need_dgate: bool,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    operators._checked(x, weight, 0)
    group_size = group_size or x.shape[-1]
    gating = _gating(x, gate, group_size, activation, gate_first)
    device = x.device
    operators._require(
        dy.shape == x.shape and dy.dtype in operators._TRITON and dy.device == device,
        "dy must have x's shape and device",
    )
    operators._require(gate is None or gate_first or dy.dtype == x.dtype, "dy must have x's dtype")
    operators._require(gate is not None or not need_dgate, "there is no gate to have a gradient")
    operators._require(
        rstd.dtype == torch.float32 and rstd.numel() * group_size == x.numel() and rstd.device == device,
        "rstd must have one float32 per group",
    )
    if dh is not None or not _in_reach(x, group_size):
        options = weight_offset, group_size, activation, gate_first
        return fallback.gated_backward(dy, x, gate, rstd, weight, dh, *options, need_dx, need_dgate, need_dweight)
    given, rstd, weight = x, rstd.contiguous(), None if weight is None else weight.contiguous()
    dy, x = operators._with_adjacent_columns(dy), operators._with_adjacent_columns(x)
    gate = None if gate is None else operators._with_adjacent_columns(gate)
    dx = layouts.like(given, x.dtype) if need_dx else None
    dgate = layouts.like(given, x.dtype) if need_dgate else None
    place = layout.rows(dy, x, gate, dx, dgate)
    copied = place is None
    if place is None:
        dy, x, gate = dy.contiguous(), x.contiguous(), None if gate is None else gate.contiguous()
        dx, dgate = (torch.empty_like(x) if need else None for need in (need_dx, need_dgate))
        place = layout.rows(dy, x, gate, dx, dgate)
        assert place is not None  # noqa: S101 - contiguous tensors
    dweight = backward_launches.gradients(
        place, group_size, gating, dy, x, gate, dx, dgate, rstd, weight, weight_offset or None, need_dweight
    )
    dx, dgate = (t if t is None or not copied else layouts.laid_out_like(given, t) for t in (dx, dgate))
    return dx, dgate, dweight


def _gating(x: Tensor, gate: Tensor | None, group_size: int, activation: int, gate_first: bool) -> Gating | None:
    """How x and its gate go together, for arguments that fit; None without a gate."""
    operators._require(group_size > 0 and x.shape[-1] % group_size == 0, "group_size must divide the columns")
    operators._require(activation in range(len(ACTIVATIONS)), "unknown activation")
    operators._require(
        gate is None or (gate.shape == x.shape and gate.dtype == x.dtype and gate.device == x.device),
        "gate must have x's shape, dtype and device",
    )
    silu = ACTIVATIONS[activation] == "silu"
    return None if gate is None else Gating(silu, gate_first)


def _in_reach(x: Tensor, group_size: int) -> bool:
    """Whether there are kernels for x's device, and they can count its groups."""
    return operators._in_reach(x) and x.numel() <= configurations.MOST_ROWS * group_size


def _normalize(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    activation: int,
    gate_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor | None]:
    """y, and rstd where wanted."""
    normed, x_hat = operators._checked(x, weight, rounding)
    group_size = group_size or x.shape[-1]
    gating = _gating(x, gate, group_size, activation, gate_first)
    operators._require(math.isfinite(eps) and math.isfinite(weight_offset), "eps and weight_offset must be finite")
    if not _in_reach(x, group_size):
        options = rounding, group_size, activation, gate_first
        return fallback.gated_forward_train(x, gate, weight, eps, weight_offset, *options)
    given = x
    x, gate = operators._with_adjacent_columns(x), None if gate is None else operators._with_adjacent_columns(gate)
    if weight is not None:
        weight = weight.contiguous()
    groups = x.shape[-1] // group_size
    rstd = torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device) if train else None
    last = gating is not None and not gating.first
    dtype = x.dtype if last else normed
    y = layouts.like(x, dtype)
    place = layout.rows(x, gate, y)
    copied = place is None
    if place is None:
        x, gate = x.contiguous(), None if gate is None else gate.contiguous()
        y = torch.empty_like(x, dtype=dtype)
        place = layout.rows(x, gate, y)
        assert place is not None  # noqa: S101 - contiguous tensors
    if place.number:
        before_gate = operators._TRITON[normed if last and rounding else torch.float32]
        offset = weight_offset or None
        launch_forward(place, group_size, gating, x, gate, weight, y, rstd, eps, offset, x_hat, before_gate)
    return layouts.laid_out_like(given, y) if copied else y, rstd
