"""`rms_norm_rotary` and `qk_norm_rotary`: the norm of queries and keys, and the rotary embedding after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.overrides import handle_torch_function

from rmsnorm import checked, checks, dispatch
from rmsnorm.functional.fast_path import FLOAT64, ROUNDING_INDEX, direct, grad_enabled, has_gpu, is_common, on_gpu
from rmsnorm.functional.plain import rms_norm
from rmsnorm.numerics import decomposition, reference
from rmsnorm.numerics.rotation import ROTARY_ROUNDINGS, Rotation, rotate
from rmsnorm.ops.library import operators
from rmsnorm.ops.rotation import Rotated
from rmsnorm.ops.sharing import expand
from rmsnorm.spec import ROUNDINGS, NormSpec, check_choice, check_flag


def rms_norm_rotary(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    rotary_rounding: str = "once",
    out: Tensor | None = None,
) -> Tensor:
    """Root mean square normalisation of each head, and its rotary position embedding, in one pass over memory.

        n = rms_norm(x, weight, eps);  o = n * cos + rotate_half(n) * sin

    >>> angle = torch.tensor([torch.pi / 2])
    >>> rms_norm_rotary(torch.tensor([3.0, -3.0]), None, angle.cos(), angle.sin())
    tensor([1.0000, 1.0000])

    Args:
        x: (*, d), as for `rms_norm`: (batch, heads, tokens, d), or (batch, tokens, heads, d), also as a part of a
            larger tensor, such as the result of a projection to queries, keys and values.
        weight, eps, weight_offset, rounding, normalized_shape: as for `rms_norm`.
        cos, sin: broadcast to x over leading dimensions, and `unsqueeze` says where the heads stand. As many columns as
            are rotated, or half of them, one for both of a pair. Any dtype.
        rotary_dim: how many columns are rotated, from the first on; the others are normalised only. None means all.
        interleaved: whether the pairs are columns (0, 1), (2, 3), ... and not (0, d / 2), (1, d / 2 + 1), ...
        rotary_rounding: "once": two products and their sum in float32, rounded at the end; "each": cos and sin, the
            products and the sum are rounded to the dtype of n, as in eager code of transformers.
        out: receives the result; may be x itself. For inference: not together with a gradient.

    Returns:
        o of x's shape, in the dtype of the norm's result, to which n is rounded before it is rotated: o has the bits of
        the two steps, and so have the gradients, of cos and sin too.

    Raises:
        ValueError, TypeError: as `rms_norm`; and for cos and sin that do not match x.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; the norm before it in
    Qwen3, Gemma 3 and FLUX.
    """
    options: Any = {"weight_offset": weight_offset, "rounding": rounding}
    if (
        type(cos) is type(sin) is Tensor
        and is_common(x, weight, eps, weight_offset, rounding)
        and normalized_shape is None
        and rotary_dim is None
        and out is None
        and cos.dtype is sin.dtype
        and cos.dtype is not FLOAT64
        and type(interleaved) is bool
        and rotary_rounding in ROTARY_ROUNDINGS
        and x.dim()
        and not (grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, cos, sin)))
    ):
        try:
            forward = (on_gpu if has_gpu and x.is_cuda else direct).rotary_forward
            return forward(  # type: ignore[no-any-return]
                x, weight, cos, sin, eps, weight_offset, ROUNDING_INDEX[rounding],
                x.shape[-1], interleaved, rotary_rounding == "each",
            )[0]  # fmt: skip
        except RuntimeError as error:
            refusal = error
        checks.check_inputs(x, weight, None)
        _check(x, cos, sin, rotary_dim, interleaved, rotary_rounding)
        checked.explain(refusal, (x, None, None, weight, None), eps, **options)
    if checked.is_proxy(x):
        rotary = {"rotary_dim": rotary_dim, "interleaved": interleaved, "rotary_rounding": rotary_rounding, "out": out}
        options |= {"normalized_shape": normalized_shape, **rotary}
        return handle_torch_function(rms_norm_rotary, (x,), x, weight, cos, sin, eps, **options)
    spec = checked.spec_of(x, eps, **options)
    dims = checks.check_inputs(x, weight, normalized_shape)
    if x.is_nested and isinstance(x.shape[-1], int) and x.lengths() is None:  # type: ignore[attr-defined]
        return _rotate_jagged(x, weight, cos, sin, spec, dims, (rotary_dim, interleaved, rotary_rounding), out)
    rotation = _check(x, cos, sin, rotary_dim, interleaved, rotary_rounding)
    if out is not None:
        return _write_out(out, x, weight, cos, sin, spec, rotation, dims)
    return _rotated(x, weight, cos, sin, spec, rotation, dims)


def qk_norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    rotary_rounding: str = "once",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each normalised by its own weight and rotated by the same angles: `rms_norm_rotary` of both.

    >>> q, k, angle = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(5, 1, 4)
    >>> q, k = qk_norm_rotary(q, k, None, None, angle.cos(), angle.sin())

    Args:
        q, k: as x of `rms_norm_rotary`; they may have different numbers of heads.
        q_weight, k_weight: (d,) each, or None.
        cos, sin: what broadcasts to q and to k.
        out: a pair of tensors that receive the results; may be (q, k).
        eps, weight_offset, rounding, normalized_shape, rotary_dim, interleaved, rotary_rounding: as for
            `rms_norm_rotary`.

    Returns:
        q and k.

    Raises:
        ValueError, TypeError: as `rms_norm_rotary`.
    """
    options: dict[str, Any] = {
        "weight_offset": weight_offset, "rounding": rounding, "normalized_shape": normalized_shape,
        "rotary_dim": rotary_dim, "interleaved": interleaved, "rotary_rounding": rotary_rounding,
    }  # fmt: skip
    if out is None:
        q = rms_norm_rotary(q, q_weight, cos, sin, eps, **options)
        return q, rms_norm_rotary(k, k_weight, cos, sin, eps, **options)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out must be a pair of tensors, for q and for k, got {type(out).__name__}")
    q = rms_norm_rotary(q, q_weight, cos, sin, eps, **options, out=out[0])
    return q, rms_norm_rotary(k, k_weight, cos, sin, eps, **options, out=out[1])


def _check(x: Tensor, cos: Any, sin: Any, rotary_dim: Any, interleaved: Any, rotary_rounding: Any) -> Rotation:
    dim = checks.check_rotary_dim(rotary_dim, x)
    checks.check_angles(cos, sin, x, dim)
    each = check_choice(rotary_rounding, "rotary_rounding", ROTARY_ROUNDINGS) == 1
    return Rotation(dim, check_flag(interleaved, "interleaved"), each)


def _rotated(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, spec: NormSpec, rotation: Rotation, dims: int
) -> Tensor:
    """o of checked arguments."""
    grad = torch.is_grad_enabled()
    if dims > 1 or not dispatch.can_fuse(x, weight, cos, sin) or (grad and (cos.requires_grad or sin.requires_grad)):
        return steps(x, weight, cos, sin, spec, rotation, dims)
    if cos.dtype != sin.dtype:
        cos, sin = cos.float(), sin.float()  # which has all values of the others
    if grad and (x.requires_grad or (weight is not None and weight.requires_grad)):
        if torch.compiler.is_compiling():  # the compiler takes no tensor twice
            sin = sin.view_as(sin) if sin is cos else sin
        else:
            x, weight, cos, sin = dispatch.savable(x, weight, cos, sin)
        return Rotated.apply(x, weight, cos, sin, spec, rotation)  # type: ignore[no-any-return]
    return operators(x).rotary_forward(x, weight, cos, sin, *spec[:3], *rotation)[0]  # type: ignore[no-any-return]


def steps(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, spec: NormSpec, rotation: Rotation, dims: int = 1
) -> Tensor:
    """What the fused operator stands for, in functions that take every kind of tensor and every transform."""
    options: Any = {"weight_offset": spec.weight_offset, "rounding": ROUNDINGS[spec.rounding]}
    n = rms_norm(x, weight, spec.eps, normalized_shape=x.shape[-dims:], **options)
    return rotate(n, _beside(cos, n), _beside(sin, n), rotation)


def _beside(t: Tensor, n: Tensor) -> Tensor:
    """As an operand beside n, and of its shape where the gradient is to be a sum in one order."""
    if type(n).__name__ == "DTensor" and type(t).__name__ != "DTensor":
        from torch.distributed.tensor import DTensor, Replicate  # not before it is needed: it takes seconds to import

        mesh = n.device_mesh  # type: ignore[attr-defined]
        return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if not t.requires_grad or decomposition.exporting() or torch.compiler.is_compiling():
        return t
    if type(n).__name__ == "DTensor":
        return t
    return expand(t.to(torch.promote_types(n.dtype, torch.float32)), (*n.shape[:-1], t.shape[-1]))


def _rotate_jagged(
    x: Any, weight: Any, cos: Any, sin: Any, spec: NormSpec, dims: int, options: tuple[Any, ...], out: Any
) -> Tensor:
    """The rows of a jagged tensor lie in one dense tensor; angles are jagged as x is, or broadcast to those rows."""
    if out is not None:
        raise TypeError("out must be left out where x is jagged")
    values = []
    for name, t in (("cos", cos), ("sin", sin)):
        checks.check_tensor(t, name)
        ragged = x._ragged_idx
        if t.is_nested and (t.dim() != x.dim() or t._ragged_idx != ragged or t.shape[ragged] != x.shape[ragged]):
            raise ValueError(f"{name} must be jagged as x is, of shape {tuple(x.shape)}, got {tuple(t.shape)}")
        values.append(t.values() if t.is_nested else t)
    rotation = _check(x.values(), *values, *options)
    y = _rotated(x.values(), weight, values[0], values[1], spec, rotation, dims)
    return nested_tensor_from_jagged(y, x.offsets(), jagged_dim=x._ragged_idx)


def _write_out(
    out: Any, x: Tensor, weight: Any, cos: Tensor, sin: Tensor, spec: NormSpec, rotation: Rotation, dims: int
) -> Tensor:
    """Into `out` by the operator where it lies as x, or apart from it; else through a copy."""
    if isinstance(out, Tensor) and dispatch.dispatches_itself(out):
        raise TypeError(f"out must be a plain torch.Tensor, got {type(out).__name__}")
    checks.check_out(out, x, weight, reference.result_dtype(x.dtype, weight, spec))
    for name, t in (("cos", cos), ("sin", sin)):
        checks.check_apart(out, t, name)
    needed = any(t is not None and t.requires_grad for t in (x, weight, cos, sin, out))
    if (torch.is_grad_enabled() and needed) or dispatch.differentiating():
        raise ValueError("out is for inference: call under torch.no_grad(), or leave it out where a gradient is needed")
    in_place = out.data_ptr() == x.data_ptr() and out.stride() == x.stride() if not out.is_meta else False
    plain = in_place or (out.is_contiguous() and x.is_contiguous())
    angles = (cos, sin) if cos.dtype == sin.dtype else (cos.float(), sin.float())
    direct = dims == 1 and plain and all(t is None or t.stride(-1) == 1 for t in (x, weight, *angles))
    if not direct or torch.compiler.is_compiling() or out.is_neg() or not dispatch.can_fuse(x, weight, cos, sin):
        return out.copy_(_rotated(x, weight, cos, sin, spec, rotation, dims))  # type: ignore[no-any-return]
    operators(x).rotary_forward_out(x, weight, *angles, *spec[:3], *rotation, out)
    if not out.is_inference():
        torch.autograd.graph.increment_version((out,))  # the operator does not: see autograd's check of what it saved
    return out  # type: ignore[no-any-return]
