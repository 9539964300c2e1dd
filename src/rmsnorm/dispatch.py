"""Which way a checked call goes; one table.

DTensor                                        -> each rank's part, or the row's pieces (rmsnorm.distributed)
jagged                                         -> its values, one dense tensor, rewrapped
exporters, unknown subclasses and transforms   -> the decomposition, in operations they know
functorch, forward mode                        -> FunctorchNorm
a gradient is wanted                           -> Norm
else                                           -> the operators
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nested import nested_tensor_from_jagged

from rmsnorm.numerics import decomposition, reference
from rmsnorm.ops import autograd, doors
from rmsnorm.spec import NormSpec

Result = tuple[Tensor, Tensor | None]

_TRANSFORMS = torch._C._functorch.TransformType
_functorch_active = torch._C._are_functorch_transforms_active
_compile_as = "kernels"


def compile_as(way: str) -> None:
    """What `torch.compile` makes of a norm from now on (docs/compile.md).

    Args:
        way: "kernels" (default), which have the bits of eager code; or "decomposition" (also "formula"), which the
            compiler fuses with its neighbours, and whose bits depend on them.
    """
    global _compile_as
    if way not in ("kernels", "decomposition", "formula"):
        raise ValueError(f"way must be 'kernels' or 'decomposition', got {way!r}")
    _compile_as = "decomposition" if way == "formula" else way


def normalize(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    spec: NormSpec,
    memory_efficient: bool = False,
) -> Result:
    """y, and h when there is a residual, of checked arguments; over the last dimension."""
    if spec.group_size == x.shape[-1]:
        spec = spec._replace(group_size=0)
    tensors = [t for t in (x, residual, gate, weight) if t is not None]
    transforming = _functorch_active()
    if not transforming and x.dtype != torch.float64 and any(type(t).__name__ == "DTensor" for t in tensors):
        from rmsnorm.distributed import dtensor  # not before it is needed: it takes seconds to import

        return dtensor.normalize(x, residual, gate, weight, spec)
    if x.is_nested and isinstance(x.shape[-1], int) and x.lengths() is None:  # type: ignore[attr-defined]
        return _normalize_jagged(x, residual, gate, weight, spec)
    if _need_decomposition(tensors):
        if residual is not None:
            return decomposition.add_forward(x, residual, weight, spec)
        return decomposition.forward(x, gate, weight, spec), None

    result = reference.y_dtype(x.dtype, gate, weight, spec)
    if weight is not None and weight.dtype == torch.float64 != x.dtype:
        weight = weight.float()
    y, h = _on_kernels(x, residual, gate, weight, spec, memory_efficient)
    return y if y.dtype == result else y.to(result), h


def _on_kernels(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    spec: NormSpec,
    memory_efficient: bool,
) -> Result:
    if differentiating():
        y, *h, _ = autograd.FunctorchNorm.apply(x, residual, gate, weight, spec)
        return y, h[0] if h else None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, gate, weight)):
        if not torch.compiler.is_compiling():  # autograd saves no inference tensor outside inference mode
            x, gate, weight = savable(x, gate, weight)
        else:  # the compiler takes no tensor twice
            residual = x.view_as(x) if residual is x else residual
            gate = x.view_as(x) if gate is x else gate
        results = autograd.Norm.apply(x, residual, gate, weight, spec, memory_efficient)
        return (results, None) if residual is None else results
    if residual is not None:
        return doors.add_forward(x, residual, weight, spec)[:2]
    return doors.forward(x, gate, weight, spec), None


def can_fuse(*tensors: Tensor | None) -> bool:
    """Whether a fused operator, or the `autograd.Function` around it, takes these tensors.

    A function that fuses the norm with what follows it has the bits of the separate steps, so everything else takes
    the steps: DTensor, jagged tensors, subclasses, functorch, forward mode, exporters, float64.
    """
    given = [t for t in tensors if t is not None]
    return (
        not differentiating()
        and not _functorch_active()
        and not any(type(t).__name__ == "DTensor" or t.is_nested or t.dtype == torch.float64 for t in given)
        and not _need_decomposition(given)
    )


def savable(*tensors: Any) -> list[Any]:
    """The tensors, and copies of those that autograd refuses to save: inference tensors outside inference mode."""
    return [t.clone() if t is not None and t.is_inference() else t for t in tensors]


def on_values(function: Callable[..., tuple[Tensor, ...]], x: Any, *others: Any) -> list[Tensor]:
    """The results of a function of rows for jagged tensors of one layout, whose values are dense tensors of rows."""
    results = function(*(t.values() for t in (x, *others)))
    return [nested_tensor_from_jagged(t, x.offsets(), jagged_dim=x._ragged_idx) for t in results]


def _normalize_jagged(x: Any, residual: Any, gate: Any, weight: Tensor | None, spec: NormSpec) -> Result:
    """The rows of a jagged tensor lie in one dense tensor, which is normalised as any other."""
    residual, gate = (t if t is None else t.values() for t in (residual, gate))
    y, h = normalize(x.values(), residual, gate, weight, spec)

    def jagged(t: Tensor) -> Tensor:
        return nested_tensor_from_jagged(t, x.offsets(), jagged_dim=x._ragged_idx)

    return jagged(y), None if h is None else jagged(h)


def differentiating() -> bool:
    """Whether a transform of functorch is in force, or forward-mode differentiation, for which `out` is not."""
    if forward_ad._current_level >= 0:
        return True
    return _functorch_active() and any(key != _TRANSFORMS.Functionalize for key in _transforms())


def functionalizing() -> bool:
    """Whether `torch.func.functionalize` is in force, which has no rule for an `autograd.Function`."""
    return _functorch_active() and _TRANSFORMS.Functionalize in _transforms()


def _transforms() -> list[Any]:
    return [layer.key() for layer in torch._C._functorch.get_interpreter_stack() or ()]


def _need_decomposition(tensors: list[Tensor]) -> bool:
    """Whether only operations that PyTorch itself knows will do."""
    compiling, transforming = torch.compiler.is_compiling(), _functorch_active()
    if decomposition.exporting():
        return True
    # The compiler would unroll the reference's sums, and traces no `autograd.Function` under functorch.
    if compiling and (_compile_as == "decomposition" or transforming or forward_ad._current_level >= 0):
        return True
    # The reference, which computes float64, reads the bits of numbers: torch 2.10 cannot `vmap` that.
    if tensors[0].dtype == torch.float64 and (compiling or transforming or forward_ad._current_level >= 0):
        return True
    # functorch has no rule for an `autograd.Function` under `functionalize`.
    if transforming and _TRANSFORMS.Functionalize in (keys := _transforms()) and set(keys) != {keys[0]}:
        return True
    return any(dispatches_itself(_unwrapped(t) if transforming else t) for t in tensors)


def dispatches_itself(t: Tensor) -> bool:
    """A subclass that decides for every operation what it means, except for the tracers', which know ours."""
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(t, autograd.TRACERS)


def _unwrapped(t: Tensor) -> Tensor:
    """The tensor under the wrappers of all transforms in force."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t
