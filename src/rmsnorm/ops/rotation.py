"""Training with a rotated norm: an `autograd.Function` around its operators, on tensors they take.

The derivative is the rotation's, rounded to the dtype of the norm's result, and then the norm's. What is saved is x and
one number per row, beside the weight, cos and sin as they were given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm.numerics.rotation import Rotation, rotate_back
from rmsnorm.ops.autograd import gradients
from rmsnorm.ops.library import operators
from rmsnorm.ops.vmap import is_batched
from rmsnorm.spec import NormSpec


class Rotated(torch.autograd.Function):
    """The norm of x, rotated; cos and sin, of one dtype, have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, spec: NormSpec, rotation: Rotation
    ) -> Tensor:
        y, rstd = operators(x).rotary_forward(x, weight, cos, sin, *spec[:3], *rotation)
        ctx.save_for_backward(x, weight, cos, sin, rstd)
        ctx.spec, ctx.rotation = spec, rotation
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin, rstd = ctx.saved_tensors
        spec, rotation, (need_dx, need_dweight) = ctx.spec, ctx.rotation, ctx.needs_input_grad[:2]
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if again or is_batched(dy) or forward_ad._current_level >= 0:
            dn = rotate_back(dy, cos, sin, rotation)
            dx, _, dweight = gradients(dn, None, (x, None, weight, rstd), spec, (need_dx, False, need_dweight))
        else:
            backward, offset = operators(rstd).rotary_backward, spec.weight_offset
            dx, dweight = backward(dy, x, rstd, weight, cos, sin, offset, *rotation, need_dx, need_dweight)
        return dx, dweight, None, None, None, None
