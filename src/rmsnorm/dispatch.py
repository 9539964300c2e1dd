"""Which way a call takes that is not plain: rows of checked arguments, on kernels, DTensors or the formula.

First-order training and inference stay on the kernels, through the `autograd.Function` that eager code, functorch or
DTensor needs. What operators do not know (forward-mode differentiation, export, other subclasses) gets the formula in
ordinary operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nested import nested_tensor_from_jagged

from rmsnorm.numerics import decomposition, reference
from rmsnorm.ops import autograd, functorch
from rmsnorm.ops.library import operators

_compiling = torch.compiler.is_compiling
_functorch_active = torch._C._are_functorch_transforms_active
_FLOAT64 = torch.float64
_compile_as = "kernels"


def compile_as(way: str) -> None:
    """What `torch.compile` makes of a norm from now on (docs/compile.md).

    Args:
        way: "kernels" (default), which have the bits of eager code; or "formula", which the compiler fuses with its
            neighbours, and whose bits depend on them.
    """
    global _compile_as
    if way not in ("kernels", "formula"):
        raise ValueError(f"way must be 'kernels' or 'formula', got {way!r}")
    _compile_as = way


def straight(x: Tensor, weight: Tensor | None, eps: float | None, weight_offset: float) -> bool:
    """Whether a call may go to the operator, or the `autograd.Function` around it, with no check but the operator's."""
    return (
        type(x) is Tensor
        and type(eps) is float
        and type(weight_offset) is float
        and x.dtype is not _FLOAT64
        and (weight is None or (weight.dim() == 1 and weight.dtype is not _FLOAT64))
        and not _functorch_active()
        and forward_ad._current_level < 0
        and not _compiling()
    )


def normalize_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    code: int,
    memory_efficient: bool,
) -> tuple[Tensor, Tensor | None]:
    """y, and h when there is a residual, over the last dimension; `code` is an index into `reference.ROUNDINGS`."""
    rounding = reference.ROUNDINGS[code]
    h: Tensor | None = None
    transforming = _functorch_active()
    distributed = any(type(t).__name__ == "DTensor" for t in (x, residual, weight))
    if distributed and not transforming and x.dtype != torch.float64:
        from rmsnorm.distributed import dtensor  # not before it is needed: it takes seconds to import

        return dtensor.normalize(x, residual, weight, eps, weight_offset, code)  # type: ignore[arg-type]
    if x.is_nested and isinstance(x.shape[-1], int) and x.lengths() is None:  # type: ignore[attr-defined]
        return _normalize_jagged(x, residual, weight, eps, weight_offset, code)
    if need_plain_operations(x, residual, weight):
        if residual is not None:
            x = h = x + residual
        return decomposition.forward(x, weight, eps, weight_offset, rounding), h

    result = reference.result_dtype(x, weight, rounding)
    if weight is not None and weight.dtype == torch.float64 != x.dtype:
        weight = weight.float()
    options = (eps, weight_offset, code)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight))
    if transforming:
        if residual is not None:
            y, h, _ = functorch.AddRMSNorm.apply(x, residual, weight, *options)
        else:
            y, _ = functorch.RMSNorm.apply(x, weight, *options)
    elif residual is not None:
        if wanted:
            if torch.compiler.is_compiling() and residual is x:
                residual = x.view_as(x)  # the compiler takes no tensor twice
            y, h = autograd.AddRMSNorm.apply(x, residual, weight, *options)
        else:
            y, h, _ = operators(x).add_forward(x, residual, weight, *options)
    elif wanted:
        y = autograd.RMSNorm.apply(x, weight, *options, memory_efficient)
    else:
        y = operators(x).forward(x, weight, *options)
    return y if y.dtype == result else y.to(result), h


def _normalize_jagged(
    x: Any, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float, code: int
) -> tuple[Tensor, Tensor | None]:
    """The rows of a jagged tensor lie in one dense tensor, which is normalised as any other."""
    dense = None if residual is None else residual.values()
    y, h = normalize_rows(x.values(), dense, weight, eps, weight_offset, code, False)

    def jagged(t: Tensor) -> Tensor:
        return nested_tensor_from_jagged(t, x.offsets(), jagged_dim=x._ragged_idx)

    return jagged(y), None if h is None else jagged(h)


def need_plain_operations(x: Tensor, *others: Tensor | None) -> bool:
    """Whether only operations that PyTorch itself knows will do."""
    compiling, transforming = torch.compiler.is_compiling(), _functorch_active()
    if decomposition.exporting() or forward_ad._current_level >= 0:
        return True
    # The compiler would unroll the reference's sums, and traces no `autograd.Function` under functorch.
    if compiling and (_compile_as == "formula" or transforming):
        return True
    # The reference, which computes float64, reads the bits of numbers: torch 2.10 cannot `vmap` that.
    if x.dtype == torch.float64 and (compiling or transforming):
        return True
    if transforming and not functorch.only_reverse_mode_and_vmap():
        return True
    tensors = [t for t in (x, *others) if t is not None]
    return any(functorch.dispatches_itself(functorch.inside(t) if transforming else t) for t in tensors)
