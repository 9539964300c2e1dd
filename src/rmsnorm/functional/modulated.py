"""`modulated_rms_norm`: the norm, scaled and shifted by what depends on the sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nested import nested_tensor_from_jagged
from torch.overrides import handle_torch_function

from rmsnorm import checked, checks, dispatch
from rmsnorm.functional.fast_path import FLOAT64, is_common, spec_of
from rmsnorm.numerics import decomposition, reference
from rmsnorm.numerics.modulation import modulate, shared_dims, unrounded
from rmsnorm.ops.library import operators
from rmsnorm.ops.sharing import expand
from rmsnorm.ops.vmap import is_batched
from rmsnorm.spec import NormSpec


def modulated_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
) -> Tensor:
    """Root mean square normalisation of the last dimension, scaled and shifted: adaptive norms of diffusion models.

        y = norm(x) * (1 + scale) + shift

    >>> x, scale = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])
    >>> modulated_rms_norm(x, scale, shift=torch.tensor([0.0, 1.0]))
    tensor([[1.6971, 2.1314]])

    Args:
        x: (*, d), as for `rms_norm`.
        scale, shift: what broadcasts to x's shape over leading dimensions, as (batch, 1, d), (batch, tokens, d), (d,);
            each in a floating-point dtype of its own. Computed in float32 (float64 for float64).
        weight, eps, weight_offset, normalized_shape: as for `rms_norm`.
        rounding: as for `rms_norm`. A rounding other than "once" also rounds the norm's result before the scale.

    Returns:
        y of x's shape, in the dtype that x, the weight and `rounding` say. Gradients of scale and shift are sums over
        the rows that share them, in one order: the same on any number of threads.

    Raises:
        ValueError, TypeError: as `rms_norm`; and for a scale or shift that does not broadcast to x.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023 (adaLN).
    """
    if normalized_shape is None and _is_common(x, scale, shift, weight, eps, weight_offset, rounding):
        try:
            return fused(x, scale, shift, weight, spec_of(eps, weight_offset, rounding))
        except RuntimeError as error:
            refusal = error
        for name, t in (("scale", scale), ("shift", shift)):
            if t is not None:
                checks.check_broadcast(t, x, name)
        explained = {"weight_offset": weight_offset, "rounding": rounding}
        checked.explain(refusal, (x, None, None, weight, None), eps, **explained)
    options: Any = {"weight_offset": weight_offset, "rounding": rounding}
    if checked.is_proxy(x):
        arguments = (x, scale, shift, weight, eps)
        options |= {"normalized_shape": normalized_shape}
        return handle_torch_function(modulated_rms_norm, (x,), *arguments, **options)
    spec = checked.spec_of(x, eps, **options)
    dims = checks.check_inputs(x, weight, normalized_shape)
    checks.check_broadcast(scale, x, "scale", dims)
    if shift is not None:
        checks.check_broadcast(shift, x, "shift", dims)
    if dims == 1:
        return normalize_and_modulate(x, scale, shift, weight, spec)
    flat = [None if t is None else t.flatten(-dims) for t in (x, scale, shift)]
    weight = None if weight is None else weight.flatten()
    return normalize_and_modulate(*flat, weight, spec).reshape(x.shape)  # type: ignore[arg-type, call-arg]


def _is_common(x: Any, scale: Any, shift: Any, weight: Any, *options: Any) -> bool:
    """Whether a call may go to an operator with no check but the operator's."""
    return (
        type(scale) is Tensor
        and (shift is None or (type(shift) is Tensor and shift.dtype is scale.dtype))
        and scale.dtype is not FLOAT64
        and is_common(x, weight, *options)
    )


def normalize_and_modulate(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, spec: NormSpec
) -> Tensor:
    """y of checked arguments, over the last dimension."""
    if spec.group_size or spec.partial or not dispatch.can_fuse(x, scale, shift, weight):
        return steps(x, scale, shift, weight, spec)
    return fused(x, scale, shift, weight, spec)


def fused(x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, spec: NormSpec) -> Tensor:
    """y, by the operator or the `autograd.Function` around it."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, scale, shift, weight)):
        if not torch.compiler.is_compiling():
            x, scale, weight = dispatch.savable(x, scale, weight)
        return Modulated.apply(x, scale, shift, weight, spec)  # type: ignore[no-any-return]
    scale, shift = _of_one_dtype(scale, shift)
    return operators(x).modulated_forward(x, weight, scale, shift, *spec[:3])  # type: ignore[no-any-return]


def steps(x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, spec: NormSpec) -> Tensor:
    """What the fused operator stands for, in functions that take every kind of tensor and every transform."""
    result = reference.result_dtype(x.dtype, weight, spec)
    n = dispatch.normalize(unrounded(x, spec), None, None, weight, spec)[0]
    if n.is_nested and isinstance(n.shape[-1], int) and n.lengths() is None:  # type: ignore[attr-defined]
        return _modulate_jagged(n, scale, shift, result)
    return modulate(n, _shared(scale, n, "scale"), _shared(shift, n, "shift"), result)


def _shared(t: Tensor | None, n: Tensor, name: str) -> Tensor | None:
    """Of n's shape, where its gradient is to be a sum in one order."""
    if t is None or decomposition.exporting() or torch.compiler.is_compiling() or dispatch.functionalizing():
        return t
    t = t.to(torch.promote_types(n.dtype, torch.float32))
    if type(n).__name__ == "DTensor":
        from rmsnorm.distributed import sharing  # not before it is needed: it takes seconds to import

        return sharing.expand(t, n, name)  # type: ignore[arg-type]
    return expand(t, n.shape)


def _modulate_jagged(n: Any, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The rows of a jagged tensor lie in one dense tensor; a sequence has its own scale and shift, or all have one."""
    values, ragged = n.values(), n._ragged_idx - 1

    def wide(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if t.is_nested:
            return _shared(t.values(), values, "")
        t = t[(None,) * (n.dim() - t.dim())]
        if t.shape[0] == 1:
            return _shared(t[0], values, "")
        return torch.cat([_shared(own, rows, "") for own, rows in zip(t, n.unbind(), strict=True)], ragged)  # type: ignore[misc]

    y = modulate(values, wide(scale), wide(shift), dtype)
    return nested_tensor_from_jagged(y, n.offsets(), jagged_dim=n._ragged_idx)


def _of_one_dtype(scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """As the operators take them; float32 has all values of the others."""
    if scale is None or shift is None or scale.dtype == shift.dtype:
        return scale, shift
    return scale.float(), shift.float()


class Modulated(torch.autograd.Function):
    """y; saves x, scale, weight and rstd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, spec: NormSpec
    ) -> Tensor:
        y, rstd = operators(x).modulated_forward_train(x, weight, *_of_one_dtype(scale, shift), *spec[:3])
        ctx.save_for_backward(x, scale, weight, rstd)
        ctx.spec = spec
        ctx.shift = None if shift is None else (shift.shape, shift.dtype)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad[:4]
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if again or is_batched(dy) or forward_ad._current_level >= 0:
            return *_gradients_of_steps(dy, x, scale, ctx.shift, weight, ctx.spec, need), None
        return *_gradients(dy, x, scale, ctx.shift, weight, rstd, ctx.spec, need), None


def _gradients_of_steps(
    dy: Tensor, x: Tensor, scale: Tensor | None, shift: Any, weight: Tensor | None, spec: NormSpec, need: Any
) -> list[Tensor | None]:
    """dx, dscale, dshift and dweight, where needed, which can be differentiated again."""
    with torch.enable_grad():
        # Of no gradient is the shift's value a part.
        zero = None if shift is None else x.new_zeros(shift[0], dtype=shift[1]).requires_grad_()
        tensors = (x, scale, zero, weight)
        y = steps(x, scale, zero, weight, spec)
        wanted = [t for t, needed in zip(tensors, need, strict=True) if needed]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=torch.is_grad_enabled()))  # type: ignore[arg-type]
    return [next(found) if needed else None for needed in need]


def _gradients(
    dy: Tensor,
    x: Tensor,
    scale: Tensor | None,
    shift: Any,
    weight: Tensor | None,
    rstd: Tensor,
    spec: NormSpec,
    need: Any,
) -> list[Tensor | None]:
    """dx, dscale, dshift and dweight, where needed, by the operator: a pass for each order of rows."""
    need_dx, need_dscale, need_dshift, need_dweight = need
    backward = operators(rstd).modulated_backward
    dscale = dshift = dx = dweight = None
    sums: dict[tuple[int, ...], list[Any]] = {}
    if need_dscale and scale is not None:
        sums.setdefault(tuple(shared_dims(x.shape, scale.shape)), [None, None])[0] = scale.dtype
    if need_dshift and shift is not None:
        sums.setdefault(tuple(shared_dims(x.shape, shift[0])), [None, None])[1] = shift[1]
    for shared, dtypes in sums.items():
        order = [dim for dim in range(x.dim() - 1) if dim not in shared] + list(shared) + [x.dim() - 1]
        in_order, tensors, placed = order == sorted(order), [dy, x, rstd], scale
        if not in_order:
            inverse, tensors = [order.index(dim) for dim in range(x.dim())], [t.permute(order) for t in tensors]
            placed = None if scale is None else scale[(None,) * (x.dim() - scale.dim())].permute(order)
        options = spec.weight_offset, spec.rounding, len(shared)
        # Where all rows share, dweight is a sum in the same order.
        all_at_once = in_order and need_dweight and len(sums) == 1 and x.shape[: x.dim() - 1 - len(shared)].numel() == 1
        part_dx, part_dweight, part_dscale, part_dshift = backward(
            *tensors, weight, placed, *options, need_dx, all_at_once, *dtypes
        )
        if part_dx is not None:
            dx, need_dx = part_dx if in_order else part_dx.permute(inverse), False
        if all_at_once:
            dweight, need_dweight = part_dweight, False
        if part_dscale is not None and scale is not None:
            dscale = (part_dscale if in_order else part_dscale.permute(inverse)).reshape(scale.shape)
        if part_dshift is not None:
            dshift = (part_dshift if in_order else part_dshift.permute(inverse)).reshape(shift[0])
    if need_dx or need_dweight:
        options = spec.weight_offset, spec.rounding, 0
        left_dx, dweight, *_ = backward(dy, x, rstd, weight, scale, *options, need_dx, need_dweight, None, None)
        dx = left_dx if need_dx else dx
    return [dx, dscale, dshift, dweight]
