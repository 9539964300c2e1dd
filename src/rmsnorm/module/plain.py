"""RMSNorm: the norm alone, and with a residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rmsnorm import checked
from rmsnorm.functional import add_rms_norm, rms_norm, rms_norm_quantized
from rmsnorm.functional.quantized import Quantized, check_quantize
from rmsnorm.module.base import Norm
from rmsnorm.spec import check_flag, check_partial, check_shape, is_integer


class RMSNorm(Norm):
    """Root mean square normalisation with a learned weight.

        y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)

    >>> norm = RMSNorm(4)
    >>> norm(torch.tensor([1.0, -1.0, 1.0, -1.0])).detach()
    tensor([ 1.0000, -1.0000,  1.0000, -1.0000])
    >>> y, h = norm(torch.ones(2, 4), torch.ones(2, 4))  # with a residual: the norm of the sum, and the sum

    Args:
        dim: the trailing dimension to normalise over, or a shape of several.
        eps: a positive number, or text that reads as one; None means finfo(computation dtype).eps.
        elementwise_affine: whether there is a weight; without one the gain is 1, and no offset is added to it.
        weight_offset: added to the weight. With 1.0 the weight starts at zeros and means an offset from one (Gemma).
        rounding: "once", "before_scale" (Llama, Qwen) or "weight_dtype" (T5); see `rms_norm`.
        group_size: how many consecutive elements share their statistics; it divides dim. None means all of them.
        sum, alpha: of `add_rms_norm`, for calls with a residual.
        bias: whether there is a bias, added after the weight.
        partial, axis: as for `rms_norm`; these and a bias are not offered with a residual.
        memory_efficient: training keeps y instead of x, which the next layer mostly keeps anyway. x is rebuilt from y,
            to within y's own rounding; where a gain is (nearly) zero x is kept after all. First derivatives only; not
            with groups.
        quantize: the result is quantised: a dtype, or the arguments of `quantize` as a dictionary. Calls give
            what `rms_norm_quantized` gives.
        sequence_parallel: sets that attribute on the parameter, for trainers in the manner of Megatron.
        device, dtype: of the parameter.

    Raises:
        ValueError: a dim or eps that is not positive, an eps that is not finite, an unknown option.
        TypeError: an eps that is no number, a dtype that is not floating-point.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    rounding: str
    group_size: int | None
    sum: str
    alpha: float
    bias: nn.Parameter | None
    partial: float | None = None
    axis: int | None = None
    memory_efficient: bool
    quantize: dict[str, Any] | None
    sequence_parallel: bool
    _extended: bool = False  # whether calls need more than the options of `add_rms_norm`
    _defaults: ClassVar[dict[str, Any]] = {
        "elementwise_affine": True,
        "weight_offset": 0.0,
        "rounding": "once",
        "group_size": None,
        "sum": "rounded",
        "alpha": 1.0,
        "partial": None,
        "axis": None,
        "memory_efficient": False,
        "quantize": None,
        "sequence_parallel": False,
    }

    def __init__(
        self,
        dim: int | Sequence[int],
        eps: float | None = 1e-6,
        *,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        rounding: str = "once",
        group_size: int | None = None,
        sum: str = "rounded",  # noqa: A002 - as in add_rms_norm
        alpha: float = 1.0,
        bias: bool = False,
        partial: float | None = None,
        axis: int | None = None,
        memory_efficient: bool = False,
        quantize: torch.dtype | dict[str, Any] | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = check_shape(dim, "dim")
        options = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
        options |= {"sum": sum, "alpha": alpha}
        flags = {"elementwise_affine": elementwise_affine, "memory_efficient": memory_efficient}
        flags |= {"sequence_parallel": sequence_parallel}
        for name, value in (("group_size", group_size), ("bias", bias or None), ("partial", partial), ("axis", axis)):
            if memory_efficient and value is not None:
                raise ValueError(f"memory_efficient=True is not offered with {name}")
        check_flag(bias, "bias")
        check_partial(partial, torch.Size(self.normalized_shape).numel())
        if partial is not None and group_size is not None:
            raise ValueError("partial is not offered with group_size")
        if axis is not None and (not is_integer(axis) or len(self.normalized_shape) > 1):
            raise ValueError(f"axis must be an integer, where dim is one too, got {axis!r} and {dim!r}")
        self.partial, self.axis = partial, axis
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)) if bias else None
        )
        self.quantize = check_quantize(quantize)
        if quantize is not None and (bias or partial is not None or axis is not None or memory_efficient):
            raise ValueError("quantize is not offered with bias, partial, axis and memory_efficient")
        self._extended = bias or partial is not None or axis is not None or quantize is not None
        self._set_up(self.normalized_shape, eps, options, flags, device, dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor] | Quantized:
        """Y of x's shape (*, dim); with a residual of that shape, y and h = x + residual."""
        weight = self.weight  # once: a module looks long for its parameters
        if self._extended:
            return self._normalize_with_options(x, residual, weight)
        if residual is not None:
            return add_rms_norm(
                x,
                residual,
                weight,
                self.eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                normalized_shape=self.normalized_shape if weight is None else None,
                group_size=self.group_size,
                sum=self.sum,
                alpha=self.alpha,
            )
        if self.memory_efficient:
            return checked.rms_norm_keeping_y(
                x,
                weight,
                self.eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                normalized_shape=self.normalized_shape,
            )
        return rms_norm(
            x,
            weight,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            normalized_shape=self.normalized_shape if weight is None else None,
            group_size=self.group_size,
        )

    def _normalize_with_options(self, x: Tensor, residual: Tensor | None, weight: Any) -> Tensor | Quantized:
        if self.quantize is not None:
            return rms_norm_quantized(
                x,
                weight,
                self.eps,
                residual=residual,
                sum=self.sum,
                alpha=self.alpha,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                group_size=self.group_size,
                normalized_shape=self.normalized_shape if weight is None else None,
                **self.quantize,
            )
        if residual is not None:
            raise ValueError("a residual is not offered with bias, partial and axis")
        return rms_norm(
            x,
            weight,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            normalized_shape=self.normalized_shape if weight is None and self.axis is None else None,
            group_size=self.group_size,
            bias=self.bias,
            partial=self.partial,
            axis=self.axis,
        )

    def reset_parameters(self) -> None:
        """The gain, weight + weight_offset, starts at one, and the bias at zero."""
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """The size, eps and every option that is not the default."""
        return super().extra_repr() + ("" if self.bias is None else ", bias=True")

    def _shape_text(self) -> str:
        return str(self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape)
