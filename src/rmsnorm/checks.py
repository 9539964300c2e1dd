"""What the public functions accept. Every refusal is a ValueError or TypeError that names what came and what may."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from rmsnorm.numerics.gated_reference import ACTIVATIONS
from rmsnorm.numerics.reference import ROUNDINGS

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ALLOWED = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
_INF = float("inf")  # compared with, and not math.isfinite: torch.compile traces a dynamic eps through a comparison


def check_eps(eps: Any, x_dtype: torch.dtype | None = None) -> float:
    """A finite float; text is converted, None means finfo of the computation dtype, as in torch.nn.RMSNorm."""
    if eps is None:
        return torch.finfo(torch.float64 if x_dtype == torch.float64 else torch.float32).eps
    try:
        value = _number(eps)
    except (TypeError, ValueError):
        raise (ValueError if isinstance(eps, str) else TypeError)(
            f"eps must be a number, text that reads as one, or None, got {eps!r}"
        ) from None
    if not -_INF < value < _INF:
        raise ValueError(f"eps must be finite, got {eps!r}")
    return value


def check_weight_offset(weight_offset: Any) -> float:
    """A finite float."""
    try:
        value = float("nan") if isinstance(weight_offset, str) else _number(weight_offset)
    except (TypeError, ValueError):
        raise TypeError(f"weight_offset must be a finite number, got {weight_offset!r}") from None
    if not -_INF < value < _INF:
        raise ValueError(f"weight_offset must be a finite number, got {weight_offset!r}")
    return value


def _number(value: Any) -> float:
    # A bool in a number's place is an argument out of order, as in RMSNorm(8, True). Options have no gradient.
    if isinstance(value, (bool, bytes, bytearray)):
        raise TypeError
    if isinstance(value, Tensor) and (value.dtype == torch.bool or value.requires_grad or value.is_meta):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        return _INF


def check_rounding(rounding: str) -> int:
    """Its index in `reference.ROUNDINGS`."""
    if not isinstance(rounding, str) or rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(map(repr, ROUNDINGS))}, got {rounding!r}")
    return ROUNDINGS.index(rounding)


def check_group_size(group_size: Any, cols: int) -> int:
    """A positive integer that divides the row; None means the whole row."""
    if group_size is None:
        return cols
    if not _is_integer(group_size) or group_size < 1 or cols % group_size:
        raise ValueError(
            f"group_size must be a positive integer that divides the last dimension {cols}, got {group_size!r}"
        )
    return group_size if isinstance(group_size, torch.SymInt) else int(group_size)  # type: ignore[return-value]


def check_gate(gate: Tensor, x: Tensor) -> None:
    """A tensor like x."""
    check_tensor(gate, "gate")
    for what in ("shape", "dtype", "device"):
        if getattr(gate, what) != getattr(x, what):
            raise ValueError(f"gate must have x's {what} {getattr(x, what)}, got {getattr(gate, what)}")


def check_activation(activation: Any) -> int:
    """Its index in `gated_reference.ACTIVATIONS`."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    return ACTIVATIONS.index(activation)


def check_shape(shape: Any, name: str) -> tuple[int, ...]:
    """At least one dimension, all of them positive."""
    dims = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, (str, bytes)) else (shape,)
    if not dims or not all(_is_integer(d) and d > 0 for d in dims):
        raise ValueError(f"{name} must be a positive integer or a non-empty shape of them, got {shape!r}")
    return tuple(d if isinstance(d, torch.SymInt) else int(d) for d in dims)  # type: ignore[misc]


def _is_integer(d: Any) -> bool:
    return isinstance(d, (int, torch.SymInt, Integral)) and not isinstance(d, bool)


def check_dtype(dtype: torch.dtype | None, name: str) -> None:
    """One that we compute in."""
    if dtype is not None and dtype not in _FLOATS:
        raise TypeError(f"{name} must be one of {_ALLOWED}, got {str(dtype).removeprefix('torch.')}")


def check_tensor(t: Any, name: str) -> None:
    """A dense floating-point tensor of a dtype we compute in."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.is_nested and t.layout == torch.strided:
        raise TypeError(f"{name} must be dense, or nested with layout torch.jagged, got nested with torch.strided")
    if t.layout != torch.strided and not t.is_nested:
        raise TypeError(f"{name} must be dense, got layout {t.layout}")
    check_dtype(t.dtype, name)


def check_inputs(x: Tensor, weight: Tensor | None, normalized_shape: int | Sequence[int] | None) -> int:
    """Checks x and weight against each other; returns how many trailing dimensions are normalised."""
    check_tensor(x, "x")
    if weight is not None:
        check_tensor(weight, "weight")
    if normalized_shape is not None:
        shape = check_shape(normalized_shape, "normalized_shape")
        if weight is not None and tuple(weight.shape) != shape:
            raise ValueError(f"weight must have normalized_shape {shape}, got {tuple(weight.shape)}")
    elif weight is not None:
        shape = tuple(weight.shape)
    else:
        shape = tuple(x.shape[-1:])
    if not shape:
        given = "x" if weight is None else "weight"
        raise ValueError(f"{given} must have at least one dimension, got a scalar")
    if tuple(x.shape[-len(shape) :]) != shape:
        name = "normalized_shape" if normalized_shape is not None else "weight"
        dims = "dimension" if len(shape) == 1 else f"{len(shape)} dimensions"
        raise ValueError(
            f"{name} must have shape {tuple(x.shape[-len(shape) :])} to match x's last {dims}, got {shape} "
            f"(x has shape {tuple(x.shape)})"
        )
    if 0 in shape:
        raise ValueError(f"the normalised dimensions must not be empty, got x of shape {tuple(x.shape)}")
    if x.is_nested and x._ragged_idx >= x.dim() - len(shape):  # type: ignore[attr-defined]
        raise ValueError(f"the normalised dimensions must not be ragged, got x of shape {tuple(x.shape)}")
    if weight is not None and weight.device != x.device:
        raise ValueError(f"weight must be on x's device {x.device}, got {weight.device}")
    return len(shape)


def check_residual(x: Tensor, residual: Tensor) -> None:
    """The same shape, dtype and device as x."""
    check_tensor(residual, "residual")
    for what in ("shape", "dtype", "device"):
        if getattr(x, what) != getattr(residual, what):
            given, wanted = getattr(residual, what), getattr(x, what)
            raise ValueError(f"residual must have x's {what} {_plain(wanted)}, got {_plain(given)}")


def check_out(out: Tensor, x: Tensor, weight: Tensor | None, dtype: torch.dtype, gate: Tensor | None = None) -> None:
    """x's shape and device, the result's dtype, and no memory shared with what is still to be read."""
    check_tensor(out, "out")
    for what, wanted in (("shape", x.shape), ("dtype", dtype), ("device", x.device)):
        if getattr(out, what) != wanted:
            raise ValueError(f"out must have {what} {_plain(wanted)}, got {_plain(getattr(out, what))}")
    if torch.compiler.is_compiling():
        return  # traced tensors have no address, and compiled code writes out last
    if _overlaps_itself(out):
        raise ValueError(f"out must not overlap itself, got strides {out.stride()} for shape {tuple(out.shape)}")
    if not _same_elements(out, x) and _overlap(out, x):
        raise ValueError("out must be x itself or share no memory with it, got one that overlaps x partly")
    for name, other in (("weight", weight), ("gate", gate)):
        if other is not None and _overlap(out, other):
            raise ValueError(f"out must share no memory with {name}")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def _same_elements(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype)


def _extent(t: Tensor) -> tuple[int, int]:
    """First byte, and the byte after the last."""
    if t.is_contiguous():
        return t.data_ptr(), t.data_ptr() + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _overlaps_itself(t: Tensor) -> bool:
    """Whether two elements share memory. Layouts whose dimensions interleave are refused with them."""
    if t.is_contiguous():
        return False
    dims = sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether any byte belongs to both; exact for tensors whose strides are equal, as two slices of one buffer have."""
    if a.numel() == 0 or b.numel() == 0 or a.device.type == "meta":
        return False
    (a_begin, a_end), (b_begin, b_end) = _extent(a), _extent(b)
    if a_end <= b_begin or b_end <= a_begin:
        return False
    if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype or (a_begin - b_begin) % a.element_size():
        return True
    dims = sorted(((stride, size) for size, stride in zip(a.shape, a.stride(), strict=True) if size > 1), reverse=True)
    return _reaches(abs(a_begin - b_begin) // a.element_size(), dims)


def _reaches(distance: int, dims: list[tuple[int, int]]) -> bool:
    """Whether `distance` is a sum of steps k * stride with |k| < size, one for each dimension."""
    if not dims:
        return distance == 0
    (stride, size), rest = dims[0], dims[1:]
    if stride == 0:
        return _reaches(distance, rest)
    near = distance // stride
    return any(_reaches(abs(distance - k * stride), rest) for k in (near, near + 1) if k < size)
