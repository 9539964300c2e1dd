"""The launch of the forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.call_cache import Step
from rmsnorm.gpu.kernels import forward as kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel
from rmsnorm.spec import ACTIVATIONS, NormSpec

FORWARD = Kernel(kernels.forward)
_FORWARD_IN_PIECES = Kernel(kernels.forward_in_pieces)


def prepare(place: layout.Rows, tensors: dict[str, Tensor], spec: NormSpec, x_hat: Any, normed: Any) -> Step:
    """Fills y, and h and rstd where they are.

    Args:
        place: the rows of x, residual, gate, y and h.
        tensors: by the kernel's names.
        x_hat, normed: what x * rstd is rounded to, and the norm before a gate multiplies it.
    """
    x, gate = tensors["x"], tensors.get("gate")
    width, device = x.shape[-1], x.device
    cols, target = spec.group_size or width, launching.target(device)
    groups = width // cols
    tile = configurations.forward(cols, target, gate is not None)
    whole = tile is not None
    if tile is None:
        tile = configurations.forward_pieces(target, gate is not None)
    names = FORWARD.names[: FORWARD.tensors]
    given = [tensors.get(name) for name in names]
    arguments = (
        *(*given, *([place.number] if whole else []), cols, place.inner, *place.strides),
        *(1.0 / cols, spec.eps, spec.weight_offset or None, None if spec.alpha == 1.0 else spec.alpha),
        *(groups, ACTIVATIONS[spec.activation] == "silu", spec.gate_first, spec.exact_sum, x_hat, normed, place.nested),
        *([tile.rows, tile.block, tile.block == cols] if whole else [tile.block]),
        *(configurations.log_cols(cols), configurations.form(target, cols, gate is not None), INTERPRETED),
    )
    kernel, rows = (FORWARD, tile.rows) if whole else (_FORWARD_IN_PIECES, 1)
    grid = -(-place.number // rows) * groups, 1, 1
    aligned = layout.aligned(cols, place.strides, *given)
    launch = launching.prepare(kernel, device, grid, arguments, aligned, tile.warps)
    return launch, tuple(name if t is not None else "" for name, t in zip(names, given, strict=True))
