"""The kernels under functorch: `torch.func.grad`, `vjp`, `jacrev` and `vmap`, in any nesting.

functorch wants an `autograd.Function` whose forward knows no context and returns all it saves; eager calls do better
without (autograd.py). `vmap` reaches the operators through the rules of batching.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm.ops import autograd
from rmsnorm.ops.library import operators

_KNOWN = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Vmap)


def dispatches_itself(t: Tensor) -> bool:
    """A subclass that decides for every operation what it means, except for the tracers', which know ours."""
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(t, autograd.TRACERS)


def inside(t: Tensor) -> Tensor:
    """The tensor under the wrappers of all transforms in force."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def only_reverse_mode_and_vmap() -> bool:
    """Whether every transform in force is one of `grad`'s kind or `vmap`."""
    return all(layer.key() in _KNOWN for layer in torch._C._functorch.get_interpreter_stack() or ())


class RMSNorm(torch.autograd.Function):
    """y, rstd = rms_norm(x)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, code: int) -> tuple[Tensor, Tensor]:
        return operators(x).forward_train(x, weight, eps, weight_offset, code)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, *options, _ = inputs
        _, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        eps, weight_offset = ctx.options
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        dx, dweight = autograd.gradients(dy, None, x, weight, rstd, eps, weight_offset, None, need_dx, need_dweight)
        return dx, dweight, None, None, None


class AddRMSNorm(torch.autograd.Function):
    """y, h, rstd = add_rms_norm(x, residual)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, code: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return operators(x).add_forward(x, residual, weight, eps, weight_offset, code)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, _, weight, *options, _ = inputs
        _, h, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(h, weight, rstd)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, rstd = ctx.saved_tensors
        eps, weight_offset = ctx.options
        need_dh = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dx, dweight = autograd.gradients(
            dy, dh, h, weight, rstd, eps, weight_offset, None, need_dh, ctx.needs_input_grad[2]
        )
        return dx, dx, dweight, None, None, None
