"""What tensors the public functions accept; options are checked by spec.py.

Every refusal is a ValueError or TypeError that names what came and what may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rmsnorm.spec import check_shape, is_integer

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dtype(dtype: Any, name: str, allowed: tuple[torch.dtype, ...] = _FLOATS) -> None:
    """One that we compute in; None where it is left to PyTorch."""
    if dtype is not None and dtype not in allowed:
        given = repr(dtype).removeprefix("torch.")
        names = ", ".join(map(_name, allowed))
        what = "" if isinstance(dtype, torch.dtype) else "a torch.dtype, "
        raise TypeError(f"{name} must be {what}one of {names}, got {given}")


def check_tensor(t: Any, name: str) -> None:
    """A dense floating-point tensor of a dtype we compute in, whose memory is there."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.is_nested and t.layout == torch.strided:
        raise TypeError(f"{name} must be dense, or nested with layout torch.jagged, got nested with torch.strided")
    if t.layout != torch.strided and not t.is_nested:
        raise TypeError(f"{name} must be dense, got layout {t.layout}")
    check_dtype(t.dtype, name)
    if is_freed(t):
        raise ValueError(f"{name} has no memory: its storage was freed, as FSDP and offloading do between uses")


def is_freed(t: Tensor) -> bool:
    """Whether the tensor has elements, and its storage none. Tensors of subclasses are what their parts are."""
    if torch.compiler.is_compiling() or type(t) not in (Tensor, torch.nn.Parameter) or t.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(t) or not torch._C._has_storage(t):
        return False
    return t.numel() > 0 and t.untyped_storage().nbytes() == 0


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


def check_next_weight(next_weight: Any, x: Tensor, dims: int = 1) -> None:
    """The weight of a second norm, over the same dimensions."""
    check_tensor(next_weight, "next_weight")
    shape = tuple(x.shape[-dims:])
    if tuple(next_weight.shape) != shape:
        raise ValueError(f"next_weight must have shape {shape}, as the weight has, got {tuple(next_weight.shape)}")
    if next_weight.device != x.device:
        raise ValueError(f"next_weight must be on x's device {x.device}, got {next_weight.device}")


def check_residual(residual: Tensor, x: Tensor) -> None:
    """x's shape and device; of a dtype that goes with x's."""
    _check_beside(residual, x, "residual")


def check_gate(gate: Tensor, x: Tensor) -> None:
    """x's shape and device; of a dtype that goes with x's."""
    _check_beside(gate, x, "gate")


def _check_beside(t: Tensor, x: Tensor, name: str) -> None:
    check_tensor(t, name)
    for what in ("shape", "device"):
        if getattr(t, what) != getattr(x, what):
            raise ValueError(f"{name} must have x's {what} {_plain(getattr(x, what))}, got {_plain(getattr(t, what))}")
    if (t.dtype == torch.float64) != (x.dtype == torch.float64):
        allowed = "float64" if x.dtype == torch.float64 else "float32, bfloat16 or float16"
        raise ValueError(f"{name} must be {allowed} where x is {_name(x.dtype)}, got {_name(t.dtype)}")


def check_broadcast(t: Any, x: Tensor, name: str, dims: int = 1) -> None:
    """A tensor on x's device that has its last `dims` dimensions and is broadcast over those before."""
    check_tensor(t, name)
    leading, trailing = t.shape[:-dims], tuple(x.shape[-dims:])
    over = x.shape[x.dim() - t.dim() : -dims] if t.dim() <= x.dim() else ()
    if (
        tuple(t.shape[-dims:]) != trailing
        or len(over) != len(leading)
        or any(size not in (1, whole) for size, whole in zip(leading, over, strict=True))
        or (t.is_nested and t.shape != x.shape)
    ):
        raise ValueError(
            f"{name} must end in {trailing} and broadcast to x's shape {tuple(x.shape)}, got {tuple(t.shape)}"
        )
    if t.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {t.device}")


def check_rotary_dim(rotary_dim: Any, x: Tensor) -> int:
    """An even number of x's columns; None means all."""
    cols = x.shape[-1]
    if rotary_dim is None:
        if cols % 2:
            raise ValueError(f"x must have an even last dimension, or rotary_dim less than it, got {tuple(x.shape)}")
        return cols
    if not is_integer(rotary_dim) or rotary_dim < 2 or rotary_dim % 2 or rotary_dim > cols:
        raise ValueError(f"rotary_dim must be an even number from 2 to x's last dimension {cols}, got {rotary_dim!r}")
    return rotary_dim if isinstance(rotary_dim, torch.SymInt) else int(rotary_dim)  # type: ignore[return-value]


def check_angles(cos: Any, sin: Any, x: Tensor, rotary_dim: int) -> None:
    """On x's device; broadcast over its leading dimensions, and of one width: all columns that rotate, or half."""
    for name, t in (("cos", cos), ("sin", sin)):
        check_tensor(t, name)
        leading = zip(reversed(t.shape[:-1]), reversed(x.shape[:-1]), strict=False)
        if (
            not 0 < t.dim() <= x.dim()
            or t.shape[-1] not in (rotary_dim, rotary_dim // 2)
            or t.shape[-1] != cos.shape[-1]
            or any(size not in (1, whole) for size, whole in leading)
        ):
            raise ValueError(
                f"{name} must have {rotary_dim} columns or {rotary_dim // 2}, as rotary_dim says, and as cos has, and "
                f"broadcast to x's shape {tuple(x.shape)}, got {tuple(t.shape)}"
            )
        if t.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {t.device}")


def check_out(out: Tensor, x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> None:
    """x's shape and device, the result's dtype, and no memory shared with what is still to be read."""
    check_tensor(out, "out")
    for what, wanted in (("shape", x.shape), ("dtype", dtype), ("device", x.device)):
        if getattr(out, what) != wanted:
            raise ValueError(f"out must have {what} {_plain(wanted)}, got {_plain(getattr(out, what))}")
    if torch.compiler.is_compiling():
        return  # traced tensors have no address, and compiled code writes out last
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("out is an inference tensor, which can be written only inside torch.inference_mode()")
    if _overlaps_itself(out):
        raise ValueError(f"out must not overlap itself, got strides {out.stride()} for shape {tuple(out.shape)}")
    if not _same_elements(out, x) and _overlap(out, x):
        raise ValueError("out must be x itself or share no memory with it, got one that overlaps x partly")
    if weight is not None:
        check_apart(out, weight, "weight")


def check_apart(out: Tensor, t: Tensor, name: str) -> None:
    """No memory shared with a tensor that is still to be read."""
    if not torch.compiler.is_compiling() and _overlap(out, t):
        raise ValueError(f"out must share no memory with {name}")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
