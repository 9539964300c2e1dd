"""`rms_norm_quantized` and `quantize`: norms whose result is int8 or float8, with its scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm import checks, dispatch
from rmsnorm.functional.gated import gated_rms_norm
from rmsnorm.functional.plain import rms_norm
from rmsnorm.functional.residual import add_rms_norm
from rmsnorm.numerics import quantization
from rmsnorm.numerics.quantization import DTYPES, QMAX, SCALES, SMALLEST, QuantSpec
from rmsnorm.ops.library import operators
from rmsnorm.spec import NormSpec, check_number, is_integer, make_spec


class Quantized(NamedTuple):
    """A quantised result: q * scale is about y.

    Attributes:
        q: of x's shape, in int8 or float8, contiguous.
        scale: (*, 1), or (*, d / block_size), in float32 or E8M0.
        norm: y before it is quantised, if asked for; with `straight_through` q * scale, whose gradient is y's.
        h: x + residual, if there is a residual.
    """

    q: Tensor
    scale: Tensor
    norm: Tensor | None = None
    h: Tensor | None = None


def quantize(
    y: Tensor,
    dtype: torch.dtype = torch.int8,
    *,
    block_size: int | None = None,
    scale: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
    scale_rounding: str = "down",
    scale_ub: float | None = None,
    smallest: float | None = None,
    lowest: int = -127,
) -> Quantized:
    """Quantises rows, each with a scale of its own, or blocks of rows; in plain PyTorch.

        scale = max |y| / qmax;  q = round(y / scale)

    >>> quantize(torch.tensor([[0.0, -1.0, 2.0, 4.0]])).q
    tensor([[  0, -32,  64, 127]], dtype=torch.int8)

    Args:
        y: (*, d), float32, bfloat16, float16 or float64, computed in float32.
        dtype: int8 (qmax 127), float8_e4m3fn (448) or float8_e5m2 (57344).
        block_size: how many consecutive elements share a scale; it divides d. None means a scale for each row.
        scale: a scale that is given, of one element or one for each block, in float32.
        scale_dtype: float32, or float8_e8m0fnu: a power of two, for float8 (OCP MX, whose blocks have 32 elements).
        scale_rounding: where that power of two lies: "down", by the exponent of max |y| as OCP MX has it, or "up",
            where nothing is beyond qmax.
        scale_ub: max |y| counts as at most this; what is larger saturates.
        smallest: no scale is below it; None means the smallest normal float32. A row of zeros has this scale.
        lowest: the smallest int8, -127 or -128.

    Returns:
        q and scale. A row, or block, with a NaN or an infinity has that as its scale, so that q * scale is NaN.

    Raises:
        ValueError, TypeError: an option that is not allowed, or does not go with another.
    """
    checks.check_tensor(y, "y")
    spec = _quant_spec(dtype, block_size, scale, scale_dtype, scale_rounding, scale_ub, smallest, lowest)
    _check_blocks(y, spec)
    given = None if scale is None else _scale_of(scale, y, spec)
    return Quantized(*quantization.quantize(y.detach(), given, spec))


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    dtype: torch.dtype = torch.int8,
    block_size: int | None = None,
    scale: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
    scale_rounding: str = "down",
    scale_ub: float | None = None,
    smallest: float | None = None,
    lowest: int = -127,
    residual: Tensor | None = None,
    sum: str = "rounded",  # noqa: A002 - as in add_rms_norm
    alpha: float = 1.0,
    gate: Tensor | None = None,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
    return_norm: bool = False,
    straight_through: bool = False,
) -> Quantized:
    """Root mean square normalisation whose result is quantised, in one pass over memory.

        y = rms_norm(x, weight);  q, scale = quantize(y)

    >>> x = torch.tensor([[3.0, -4.0]])
    >>> rms_norm_quantized(x).q
    tensor([[  95, -127]], dtype=torch.int8)

    Args:
        x, weight, eps, weight_offset, rounding, normalized_shape, group_size: as for `rms_norm`.
        dtype, block_size, scale, scale_dtype, scale_rounding, scale_ub, smallest, lowest: as for `quantize`.
        residual, sum, alpha: y is `add_rms_norm`'s.
        gate, activation, norm_before_gate: y is `gated_rms_norm`'s; not together with a residual.
        return_norm: also gives y.
        straight_through: also gives q * scale in y's dtype, whose gradient is y's. Without it, gradients are refused.

    Returns:
        Quantized(q, scale, norm, h), with the bits of the two steps.

    Raises:
        ValueError, TypeError: as the functions that it stands for.
        RuntimeError: a gradient is wanted of what has none.
    """
    quant = _quant_spec(dtype, block_size, scale, scale_dtype, scale_rounding, scale_ub, smallest, lowest)
    checks.check_tensor(x, "x")
    spec = make_spec(
        eps, weight_offset, rounding, group_size,
        activation=activation, norm_before_gate=norm_before_gate, sum=sum, alpha=alpha, dtype=x.dtype,
    )  # fmt: skip
    if residual is not None and gate is not None:
        raise ValueError("residual and gate cannot be given together")
    if return_norm and straight_through:
        raise ValueError("return_norm and straight_through cannot be given together: norm is y, or q * scale")
    tensors = (x, residual, gate, weight)
    wants_gradient = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    if wants_gradient and not straight_through:
        raise RuntimeError(
            "a quantised result has no gradient: call under torch.no_grad(), or pass straight_through=True "
            "and use norm of the result"
        )
    _check_blocks(x, quant)
    given = None if scale is None else _scale_of(scale, x, quant)
    if normalized_shape is None and not wants_gradient and _fits(x, residual, gate, weight):
        q, scales, y, h = _operator(x, residual, gate, weight, spec, given, quant, return_norm or straight_through)
    else:
        options: Any = {"weight_offset": weight_offset, "rounding": rounding, "normalized_shape": normalized_shape}
        options |= {"group_size": group_size}
        h = None
        if residual is not None:
            y, h = add_rms_norm(x, residual, weight, eps, sum=sum, alpha=alpha, **options)
        elif gate is not None:
            options |= {"activation": activation, "norm_before_gate": norm_before_gate}
            y = gated_rms_norm(x, gate, weight, eps, **options)
        else:
            y = rms_norm(x, weight, eps, **options)
        q, scales = quantization.quantize(y.detach(), given, quant)
    if straight_through:
        assert y is not None  # noqa: S101 - for the type checker: it was asked for
        y = StraightThrough.apply(y, quantization.dequantize(q, scales).to(y.dtype))
    return Quantized(q, scales, y if return_norm or straight_through else None, h)


class StraightThrough(torch.autograd.Function):
    """A value with another's gradient."""

    @staticmethod
    def forward(y: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _fits(x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None) -> bool:
    """Whether the operator takes these tensors, which are checked on the way."""
    checks.check_inputs(x, weight, None)
    if residual is not None:
        checks.check_residual(residual, x)
    if gate is not None:
        checks.check_gate(gate, x)
    one_dim = weight is None or (weight.dim() == 1 and weight.dtype != torch.float64)
    return one_dim and dispatch.can_fuse(x, residual, gate, weight)


def _operator(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    spec: NormSpec,
    scale: Tensor | None,
    quant: QuantSpec,
    need_norm: bool,
) -> Any:
    operator = operators(x).quantized_forward
    return operator(x, residual, gate, weight, *spec[:8], scale, *quant, need_norm)


def check_quantize(options: Any) -> dict[str, Any] | None:
    """A module's option, a dtype or arguments of `quantize`, as arguments."""
    if options is None:
        return None
    given = {"dtype": options} if isinstance(options, torch.dtype) else options
    if not isinstance(given, dict) or not given.keys() <= _OPTIONS.keys():
        raise TypeError(f"quantize must be a dtype or a dictionary of arguments of quantize, got {options!r}")
    _quant_spec(**{name: given.get(name, default) for name, default in _OPTIONS.items()})
    return dict(given)


_OPTIONS = {
    "dtype": torch.int8,
    "block_size": None,
    "scale": None,
    "scale_dtype": torch.float32,
    "scale_rounding": "down",
    "scale_ub": None,
    "smallest": None,
    "lowest": -127,
}


def _quant_spec(
    dtype: Any,
    block_size: Any,
    scale: Any,
    scale_dtype: Any,
    scale_rounding: Any,
    scale_ub: Any,
    smallest: Any,
    lowest: Any,
) -> QuantSpec:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(_short, DTYPES))}, got {dtype!r}")
    if scale_dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise ValueError(f"scale_dtype must be float32 or float8_e8m0fnu, got {scale_dtype!r}")
    if scale_rounding not in ("down", "up"):
        raise ValueError(f"scale_rounding must be 'down' or 'up', got {scale_rounding!r}")
    kind = 0
    if scale_dtype == torch.float8_e8m0fnu:
        if dtype == torch.int8:
            raise ValueError("scale_dtype float8_e8m0fnu goes with float8 results, got dtype int8")
        for name, value in (("scale", scale), ("scale_ub", scale_ub), ("smallest", smallest)):
            if value is not None:
                raise ValueError(f"{name} is of float32 scales, and scale_dtype is float8_e8m0fnu")
        kind = SCALES.index("e8m0" if scale_rounding == "down" else "e8m0_up")
    elif scale_rounding != "down":
        raise ValueError("scale_rounding is of E8M0 scales, and scale_dtype is float32")
    if scale is not None and (scale_ub is not None or smallest is not None):
        raise ValueError("scale_ub and smallest are of scales that are computed, and scale is given")
    if block_size is not None and (not is_integer(block_size) or block_size < 1):
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")
    for name, value in (("scale_ub", scale_ub), ("smallest", smallest)):
        if value is not None and check_number(value, name) <= 0:
            raise ValueError(f"{name} must be positive, got {value!r}")
    if isinstance(lowest, bool) or lowest not in (-127, -128):
        raise ValueError(f"lowest must be -127 or -128, got {lowest!r}")
    return QuantSpec(
        DTYPES.index(dtype), kind, int(block_size or 0), QMAX[dtype],
        float("inf") if scale_ub is None else float(scale_ub),
        SMALLEST if smallest is None else float(smallest), float(lowest),
    )  # fmt: skip


def _check_blocks(y: Tensor, spec: QuantSpec) -> None:
    if y.dim() == 0 or y.shape[-1] == 0:
        raise ValueError(f"expected rows that are not empty, got shape {tuple(y.shape)}")
    if spec.block_size and y.shape[-1] % spec.block_size:
        raise ValueError(f"block_size must divide the last dimension {y.shape[-1]}, got {spec.block_size}")


def _scale_of(scale: Any, y: Tensor, spec: QuantSpec) -> Tensor:
    """A given scale for each block, contiguous."""
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"scale must be a float32 tensor, got {scale.dtype if isinstance(scale, Tensor) else scale!r}")
    if scale.device != y.device:
        raise ValueError(f"scale must be on the device {y.device}, got {scale.device}")
    shape = (*y.shape[:-1], y.shape[-1] // (spec.block_size or y.shape[-1]))
    try:
        return scale.detach().expand(shape).contiguous()
    except RuntimeError:
        raise ValueError(f"scale must have one element, or broadcast to {shape}, got {tuple(scale.shape)}") from None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
