"""First-order training on the kernels, in eager and compiled code, and its derivative.

What is saved is x (or h, or y) and one number per row, and nothing else of the input's size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm.numerics import decomposition, reference
from rmsnorm.ops.library import operators
from rmsnorm.ops.vmap import is_batched

# x is rebuilt from y where every gain lies between these: a gain of zero keeps nothing of x, and a small one little.
SMALLEST_GAIN, LARGEST_GAIN = 2.0**-10, 2.0**10
# The tensors that tracing runs on: they have no values.
TRACERS = (torch._subclasses.FakeTensor, torch._subclasses.functional_tensor.FunctionalTensor)


def invertible(weight: Tensor | None, weight_offset: float) -> bool:
    """Whether x can be rebuilt from y: no gain is zero or nearly so."""
    if weight is None or weight.is_meta or isinstance(weight, TRACERS):
        return True
    gain = (weight.float() + weight_offset).abs()
    return bool(((gain >= SMALLEST_GAIN) & (gain <= LARGEST_GAIN)).all())


class RMSNorm(torch.autograd.Function):
    """y = rms_norm(x). Saves x, or y where `memory_efficient` allows, and rstd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        code: int,
        memory_efficient: bool,
    ) -> Tensor:
        y, rstd = operators(x).forward_train(x, weight, eps, weight_offset, code)
        rebuilt = None
        if memory_efficient and not torch.compiler.is_compiling() and invertible(weight, weight_offset):
            rebuilt = x.dtype
        ctx.save_for_backward(x if rebuilt is None else y, weight, rstd)
        ctx.options = eps, weight_offset, rebuilt
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        eps, weight_offset, rebuilt = ctx.options
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() and rebuilt is not None:
            # y depends on x and weight: a derivative of what is rebuilt from it would not be one of the input.
            raise RuntimeError("memory_efficient=True keeps y instead of x and cannot be differentiated twice")
        dx, dweight = gradients(dy, None, x, weight, rstd, eps, weight_offset, rebuilt, need_dx, need_dweight)
        return dx, dweight, None, None, None, None


class AddRMSNorm(torch.autograd.Function):
    """h = x + residual, y = rms_norm(h). Saves h, which is an output, and rstd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        code: int,
    ) -> tuple[Tensor, Tensor]:
        y, h, rstd = operators(x).add_forward(x, residual, weight, eps, weight_offset, code)
        ctx.save_for_backward(h, weight, rstd)
        ctx.options = eps, weight_offset
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dh, dh, None, None, None, None
        h, weight, rstd = ctx.saved_tensors
        eps, weight_offset = ctx.options
        need_dh = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dx, dweight = gradients(dy, dh, h, weight, rstd, eps, weight_offset, None, need_dh, ctx.needs_input_grad[2])
        return dx, dx, dweight, None, None, None


def gradients(
    dy: Tensor,
    dh: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    weight_offset: float,
    rebuilt: torch.dtype | None,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dweight: from the kernel, in a way that can be differentiated again where that is wanted."""
    dx: Tensor | None
    dweight: Tensor | None
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    # The computation's dtype is rstd's: x may be y, which has another.
    if forward_ad._current_level >= 0 or (
        (again or rstd.dtype == torch.float64) and (is_batched(dy) or is_batched(dh))
    ):
        # Under the older vmap `Backward` would lose the graph, and the reference reads bits, which has no rule there.
        x = x if rebuilt is None else reference.rebuild(x, rstd, weight, weight_offset, rebuilt)
        dx, dweight = decomposition.backward(dy, x, weight, eps, weight_offset, dh)
    elif again:
        dx, dweight = Backward.apply(dy, dh, x, weight, rstd, eps, weight_offset, need_dx, need_dweight)
    else:
        dx, dweight = _kernel(dy, x, rstd, weight, weight_offset, dh, rebuilt, need_dx, need_dweight)
    return dx if need_dx else None, dweight if need_dweight else None


def _kernel(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    dh: Tensor | None,
    rebuilt: torch.dtype | None,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    if type(rstd).__name__ == "DTensor":
        from rmsnorm.distributed import dtensor  # not before it is needed: it takes seconds to import

        return dtensor.backward(dy, x, rstd, weight, weight_offset, dh, need_dx, need_dweight)  # type: ignore[arg-type]
    return operators(rstd).backward(dy, x, rstd, weight, weight_offset, dh, rebuilt, need_dx, need_dweight)  # type: ignore[no-any-return]


class Backward(torch.autograd.Function):
    """The backward as a function of dy, dh, x and weight. Its derivatives, of any order, are those of the formula."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dy: Tensor,
        dh: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        eps: float,
        weight_offset: float,
        need_dx: bool,
        need_dweight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        return _kernel(dy, x, rstd, weight, weight_offset, dh, None, need_dx, need_dweight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        dy, dh, x, weight, _, *options = inputs
        ctx.save_for_backward(dy, dh, x, weight)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        eps, weight_offset, *needed = ctx.options

        def wanted(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            dy, dh, x, weight = (None if t is None else next(given) for t in saved)
            outputs = decomposition.backward(dy, x, weight, eps, weight_offset, dh)  # type: ignore[arg-type]
            return tuple(o for o, need in zip(outputs, needed, strict=True) if need and o is not None)

        # torch.func.vjp, and not torch.autograd.grad: it works inside other transforms, to any depth.
        pull_back = torch.func.vjp(wanted, *(t for t in saved if t is not None))[1]
        found = iter(pull_back(tuple(g for g, need in zip(grads, needed, strict=True) if need)))
        dy, dh, x, weight = (None if t is None else next(found) for t in saved)
        return dy, dh, x, weight, None, None, None, None, None
