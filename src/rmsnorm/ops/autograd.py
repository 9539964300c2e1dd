"""Training on the kernels: an `autograd.Function` for eager and compiled code, one for functorch, and their derivative.

What is saved is x (or h, or y), the gate and one number per group of a row, and nothing else of the input's size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm.numerics import decomposition, reference
from rmsnorm.numerics.stages import scale_branch
from rmsnorm.ops import doors
from rmsnorm.ops.doors import Gradients, Needed
from rmsnorm.ops.vmap import is_batched
from rmsnorm.spec import NormSpec

# x is rebuilt from y where every gain lies between these: a gain of zero keeps nothing of x, and a small one little.
SMALLEST_GAIN, LARGEST_GAIN = 2.0**-10, 2.0**10
# The tensors that tracing runs on: they have no values.
TRACERS = (torch._subclasses.FakeTensor, torch._subclasses.functional_tensor.FunctionalTensor)


class Norm(torch.autograd.Function):
    """y, or y and h where there is a residual, which has no gate beside it.

    Saves x, or y where `memory_efficient` allows; h, which is an output, where there is a residual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        weight: Tensor | None,
        spec: NormSpec,
        memory_efficient: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.spec, ctx.rebuilt_dtype = spec, None
        if residual is not None:
            y, h, rstd = doors.add_forward(x, residual, weight, spec)
            ctx.save_for_backward(h, None, weight, rstd)
            ctx.branch_dtype = x.dtype
            ctx.set_materialize_grads(False)
            return y, h
        y, rstd = doors.forward_train(x, gate, weight, spec)
        if memory_efficient and can_rebuild(weight, spec):
            ctx.rebuilt_dtype, x = x.dtype, y
        ctx.save_for_backward(x, gate, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_gate, need_weight = ctx.needs_input_grad[:4]
        need_dx = need_x or need_residual
        dx, dgate, dweight = dh, None, None
        if dy is not None:
            saved, rebuilt_dtype = ctx.saved_tensors, ctx.rebuilt_dtype
            needed = need_dx, need_gate, need_weight
            dx, dgate, dweight = gradients(dy, dh, saved, ctx.spec, needed, rebuilt_dtype)
        if not need_residual:  # there may be one all the same
            return _of_branch(dx, ctx), None, dgate, dweight, None, None
        return _of_branch(dx, ctx), dx, None, dweight, None, None


def _of_branch(dh: Tensor | None, ctx: Any) -> Tensor | None:
    """The gradient of x, of that of h (of x itself, where there is no residual)."""
    dtype = getattr(ctx, "branch_dtype", None)
    if dh is None or dtype is None or not ctx.needs_input_grad[0]:
        return dh
    return scale_branch(dh if dh.dtype == dtype else dh.to(dtype), ctx.spec)


def can_rebuild(weight: Tensor | None, spec: NormSpec) -> bool:
    """Whether x can be rebuilt from y: no gain is zero or nearly so, and nothing traces what that is asked of."""
    if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return False
    if weight is None or weight.is_meta or isinstance(weight, TRACERS):
        return True
    gain = (weight.float() + spec.weight_offset).abs()
    return bool(((gain >= SMALLEST_GAIN) & (gain <= LARGEST_GAIN)).all())


class FunctorchNorm(torch.autograd.Function):
    """y and rstd, or y, h and rstd, in reverse and forward mode.

    functorch wants a forward that knows no context and returns all it saves. `vmap` reaches the operators through the
    rules of vmap.py.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, spec: NormSpec
    ) -> tuple[Tensor, ...]:
        if residual is not None:
            return doors.add_forward(x, residual, weight, spec)
        return doors.forward_train(x, gate, weight, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, gate, weight, ctx.spec = inputs
        rstd = output[-1]
        ctx.mark_non_differentiable(rstd)
        ctx.branch_dtype, kept = (None, x) if residual is None else (x.dtype, output[1])
        ctx.save_for_backward(kept, gate, weight, rstd)
        ctx.save_for_forward(kept, gate, weight, rstd)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_gate, need_weight = ctx.needs_input_grad[:4]
        dh = None if ctx.branch_dtype is None else others[0]
        needed = need_x or need_residual, need_gate, need_weight
        dx, dgate, dweight = gradients(dy, dh, ctx.saved_tensors, ctx.spec, needed)
        return _of_branch(dx, ctx), dx if need_residual else None, dgate, dweight, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dresidual: Tensor | None, dgate: Any, dweight: Any, _: Any) -> Any:
        kept, gate, weight, _rstd = ctx.saved_tensors
        spec = ctx.spec
        if ctx.branch_dtype is None:
            return decomposition.tangent(kept, gate, weight, spec, dx, dgate, dweight), None
        dh = None if dx is None else scale_branch(dx, spec).to(kept.dtype)
        if dresidual is not None:
            dh = dresidual if dh is None else dh + dresidual
        dy = decomposition.tangent(kept, None, weight, spec, dh, None, dweight, ctx.branch_dtype)
        return dy, torch.zeros_like(kept) if dh is None else dh, None


def gradients(
    dy: Tensor,
    dh: Tensor | None,
    saved: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
    spec: NormSpec,
    needed: Needed,
    rebuilt_dtype: torch.dtype | None = None,
) -> Gradients:
    """dx, dgate and dweight: from the kernel, in a way that can be differentiated again where that is wanted."""
    x, gate, weight, rstd = saved
    found: Gradients
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if again and rebuilt_dtype is not None:
        # y depends on x and weight: a derivative of what is rebuilt from it would not be one of the input.
        raise RuntimeError("memory_efficient=True keeps y instead of x and cannot be differentiated twice")
    # The computation's dtype is rstd's: x may be y, which has another.
    if forward_ad._current_level >= 0 or (
        (again or rstd.dtype == torch.float64) and (is_batched(dy) or is_batched(dh))
    ):
        # Under the older vmap `Backward` would lose the graph, and the reference reads bits, which has no rule there.
        x = x if rebuilt_dtype is None else reference.rebuild(x, rstd, weight, spec.weight_offset, rebuilt_dtype)
        found = decomposition.backward(dy, x, gate, weight, dh, spec)
    elif again:
        found = cast(Gradients, Backward.apply(dy, dh, x, gate, weight, rstd, spec, needed))
    else:
        return doors.backward(dy, x, gate, rstd, weight, dh, spec, needed, rebuilt_dtype)
    dx, dgate, dweight = (g if need else None for g, need in zip(found, needed, strict=True))
    return dx, dgate, dweight


class Backward(torch.autograd.Function):
    """The backward as a function of dy, dh, x, gate and weight. Its derivatives are those of the decomposition."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dy: Tensor,
        dh: Tensor | None,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor | None,
        rstd: Tensor,
        spec: NormSpec,
        needed: Needed,
    ) -> Gradients:
        return doors.backward(dy, x, gate, rstd, weight, dh, spec, needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        *tensors, _, ctx.spec, ctx.needed = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, spec, needed = ctx.saved_tensors, ctx.spec, ctx.needed

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            arguments = iter(tensors)
            dy, dh, x, gate, weight = (None if t is None else next(arguments) for t in saved)
            outputs = decomposition.backward(dy, x, gate, weight, dh, spec)  # type: ignore[arg-type]
            return tuple(o for o, need in zip(outputs, needed, strict=True) if need and o is not None)

        # torch.func.vjp, and not torch.autograd.grad: it works inside other transforms, to any depth.
        pull_back = torch.func.vjp(function, *(t for t in saved if t is not None))[1]
        found = iter(pull_back(tuple(g for g, need in zip(grads, needed, strict=True) if need)))
        return *(None if t is None else next(found) for t in saved), None, None, None
