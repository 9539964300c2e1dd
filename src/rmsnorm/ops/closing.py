"""Training with the norm that closes a branch: an `autograd.Function` around its operators, on tensors they take.

The derivative is that of the separate norms, one after the other, each by its own operator. What is saved is x, h and
one number per row of each norm, and nothing else of the input's size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm.numerics import reference
from rmsnorm.ops.autograd import gradients
from rmsnorm.ops.library import operators
from rmsnorm.spec import NormSpec


class NormAdd(torch.autograd.Function):
    """h = norm(x) + residual."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, spec: NormSpec) -> Tensor:
        h, rstd = operators(x).norm_add_forward(x, residual, weight, *spec[:3])
        ctx.save_for_backward(x, None, weight, rstd)
        ctx.spec = spec
        return h  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = _of_branch(dh, ctx.saved_tensors, ctx.spec, ctx.needs_input_grad[0], ctx.needs_input_grad[2])
        return dx, dh, dweight, None


class NormAddNorm(torch.autograd.Function):
    """h = norm(x) + residual and y = norm(h)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        next_weight: Tensor | None,
        spec: NormSpec,
        next_eps: float,
    ) -> tuple[Tensor, Tensor]:
        operator = operators(x).norm_add_norm_forward
        y, h, rstd, next_rstd = operator(x, residual, weight, next_weight, spec.eps, next_eps, *spec[1:3])
        ctx.save_for_backward(x, weight, rstd, h, next_weight, next_rstd)
        ctx.spec, ctx.next_spec = spec, spec._replace(eps=next_eps)
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rstd, h, next_weight, next_rstd = ctx.saved_tensors
        need_x, need_residual, need_weight, need_next = ctx.needs_input_grad[:4]
        dnext = dx = dweight = None
        if dy is not None:
            needed = need_x or need_residual or need_weight, False, need_next
            dh, _, dnext = gradients(dy, dh, (h, None, next_weight, next_rstd), ctx.next_spec, needed)
        if dh is not None and (need_x or need_weight):
            dx, dweight = _of_branch(dh, (x, None, weight, rstd), ctx.spec, need_x, need_weight)
        return dx, dh if need_residual else None, dweight, dnext, None, None


def _of_branch(
    dh: Tensor, saved: Any, spec: NormSpec, need_dx: bool, need_dweight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dweight, of the gradient of h; in between lies that of the norm's result, in its dtype."""
    x, _, weight, _ = saved
    dn = dh.to(reference.result_dtype(x.dtype, weight, spec))
    dx, _, dweight = gradients(dn, None, saved, spec, (need_dx, False, need_dweight))
    return dx, dweight
