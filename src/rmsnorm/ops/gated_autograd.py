"""Training of the gated and grouped norms on the kernels, eager, compiled and under functorch, and its derivatives.

What is saved is x, the gate and one number per group. `options` are the operators': eps, weight_offset, rounding,
group_size, activation, gate_first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm.numerics import decomposition
from rmsnorm.ops.gated import Options, named, operators
from rmsnorm.ops.vmap import is_batched

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
_NO_OPTIONS = (None,) * 6


class GatedRMSNorm(torch.autograd.Function):
    """y for eager and compiled code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
        y, rstd = operators(x).gated_forward_train(x, gate, weight, *options)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.options = options
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(dy, ctx.saved_tensors, ctx.options, ctx.needs_input_grad), *_NO_OPTIONS


class FunctorchGatedRMSNorm(torch.autograd.Function):
    """y and rstd for `torch.func`, which wants a forward that knows no context and returns all it saves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
        return operators(x).gated_forward_train(x, gate, weight, *options)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, rstd = *inputs[:3], output[1]
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(*tensors, rstd)
        ctx.options = inputs[3:]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(dy, ctx.saved_tensors, ctx.options, ctx.needs_input_grad), *_NO_OPTIONS


def gradients(
    dy: Tensor, saved: tuple[Tensor, Tensor | None, Tensor | None, Tensor], options: Options, needed: Sequence[bool]
) -> Gradients:
    """dx, dgate and dweight: from the kernel, in a way that can be differentiated again where that is wanted."""
    x, gate, weight, rstd = saved
    needed = needed[:3]
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if forward_ad._current_level >= 0 or ((again or rstd.dtype == torch.float64) and is_batched(dy)):
        found = _of_formula(dy, x, gate, weight, options, needed, again)
    elif again:
        found = Backward.apply(dy, x, gate, weight, rstd, options, needed)
    else:
        found = operators(rstd).gated_backward(dy, x, gate, rstd, weight, None, *_shape(options), *needed)
    dx, dgate, dweight = (g if need else None for g, need in zip(found, needed, strict=True))
    return dx, dgate, dweight


def _shape(options: Options) -> tuple[float, int, int, bool]:
    """The options of the backward operator."""
    _, weight_offset, _, group_size, activation, gate_first = options
    return weight_offset, group_size, activation, gate_first


def formula_of(x: Tensor, gate: Tensor | None, weight: Tensor | None, options: Options) -> Tensor:
    """y in ordinary differentiable operations."""
    return decomposition.gated_forward(x, gate, weight, *named(options))


def _of_formula(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    options: Options,
    needed: Sequence[bool],
    again: bool,
) -> Gradients:
    """The gradients by automatic differentiation of the formula, in ordinary operations."""
    with torch.enable_grad():
        y = formula_of(x, gate, weight, options)
    wanted = [t for t, need in zip((x, gate, weight), needed, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=again))
    dx, dgate, dweight = (next(found) if need else None for need in needed)
    return dx, dgate, dweight


class Backward(torch.autograd.Function):
    """The backward as a function of dy, x, gate and weight. Its derivatives, of any order, are those of the formula."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dy: Tensor,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor | None,
        rstd: Tensor,
        options: Options,
        needed: Sequence[bool],
    ) -> Gradients:
        return operators(rstd).gated_backward(dy, x, gate, rstd, weight, None, *_shape(options), *needed)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        dy, x, gate, weight, _, ctx.options, ctx.needed = inputs
        ctx.save_for_backward(dy, x, gate, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, options, needed = ctx.saved_tensors, ctx.options, ctx.needed

        def wanted(dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            def y_of(*tensors: Tensor) -> Tensor:
                given = iter(tensors)
                x, gate, weight = (None if t is None else next(given) for t in saved[1:])
                return formula_of(x, gate, weight, options)  # type: ignore[arg-type]

            found = iter(torch.func.vjp(y_of, *tensors)[1](dy))
            outputs = (None if t is None else next(found) for t in saved[1:])
            return tuple(o for o, need in zip(outputs, needed, strict=True) if need and o is not None)

        # torch.func.vjp, and not torch.autograd.grad: it works inside other transforms, to any depth.
        pull_back = torch.func.vjp(wanted, *(t for t in saved if t is not None))[1]
        found = iter(pull_back(tuple(g for g, need in zip(grads, needed, strict=True) if need)))
        dy, x, gate, weight = (None if t is None else next(found) for t in saved)
        return dy, x, gate, weight, None, None, None
