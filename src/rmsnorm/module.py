"""RMSNorm as a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm import checks, functional


class RMSNorm(nn.Module):
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
        memory_efficient: training keeps y instead of x, which the next layer mostly keeps anyway. x is rebuilt from y,
            to within y's own rounding; where a gain is (nearly) zero x is kept after all. First derivatives only.
        sequence_parallel: sets that attribute on the parameter, for trainers in the manner of Megatron.
        device, dtype: of the parameter.

    Raises:
        ValueError: a dim or eps that is not positive, an eps that is not finite, an unknown rounding.
        TypeError: an eps that is no number, a dtype that is not floating-point.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        dim: int | Sequence[int],
        eps: float | None = 1e-6,
        *,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        rounding: str = "once",
        group_size: int | None = None,
        memory_efficient: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = checks.check_shape(dim, "dim")
        self.eps = None if eps is None else checks.check_eps(eps)
        if self.eps is not None and self.eps <= 0:
            raise ValueError(f"eps must be positive, got {eps!r}")
        self.elementwise_affine = elementwise_affine
        self.weight_offset = checks.check_weight_offset(weight_offset)
        checks.check_rounding(rounding)
        checks.check_dtype(dtype, "dtype")
        self.rounding = rounding
        if group_size is not None:
            checks.check_group_size(group_size, self.normalized_shape[-1])
            if memory_efficient or len(self.normalized_shape) > 1:
                raise ValueError("group_size divides one dimension, and is not offered with memory_efficient=True")
        self.group_size = group_size
        self.memory_efficient = memory_efficient
        self.sequence_parallel = sequence_parallel
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    # PyTorch makes a new parameter, without the attributes of the old, where it copies, unpickles, moves or assigns.

    def _mark_weight(self) -> None:
        weight = self._parameters.get("weight")
        if weight is not None:
            weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_weight()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_weight()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RMSNorm:
        super()._apply(fn, recurse)
        self._mark_weight()
        return self

    @classmethod
    def from_module(cls, module: nn.Module) -> RMSNorm:
        """The RMSNorm that computes what another module computes, found by running it (see `identify`).

        >>> RMSNorm.from_module(torch.nn.RMSNorm(64, eps=1e-5))
        RMSNorm(64, eps=1e-05)

        It holds the module's own parameter, and takes over its training mode.

        Raises:
            ValueError: the module is not recognised, and why; it is gated; or it does not say its width.
        """
        from rmsnorm.patching import convert

        return convert.from_module(module, cls)

    def reset_parameters(self) -> None:
        """The gain, weight + weight_offset, starts at one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.weight_offset == 1.0 else 1.0)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Y of x's shape (*, dim); with a residual of that shape, y and h = x + residual."""
        weight = self.weight  # once: a module looks long for its parameters
        if residual is None and not self.memory_efficient:
            return functional.rms_norm(
                x,
                weight,
                self.eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                normalized_shape=self.normalized_shape if weight is None else None,
                group_size=self.group_size,
            )
        if residual is not None and self.group_size is not None:
            checks.check_residual(x, residual)
            total = x + residual
            return functional.rms_norm(
                total,
                weight,
                self.eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                group_size=self.group_size,
            ), total
        if residual is not None and weight is not None:
            return functional.add_rms_norm(
                x, residual, weight, self.eps, weight_offset=self.weight_offset, rounding=self.rounding
            )
        y, h = functional.normalize(
            x,
            residual,
            weight,
            self.eps,
            self.weight_offset,
            self.rounding,
            self.normalized_shape,
            self.memory_efficient,
        )
        return y if h is None else (y, h)

    def extra_repr(self) -> str:
        """The size, eps and every option that is not the default."""
        dim = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        parts = [str(dim), f"eps={self.eps}"]
        defaults = {
            "elementwise_affine": True,
            "weight_offset": 0.0,
            "rounding": "once",
            "group_size": None,
            "memory_efficient": False,
            "sequence_parallel": False,
        }
        parts += [f"{name}={value!r}" for name, d in defaults.items() if (value := getattr(self, name)) != d]
        return ", ".join(parts)
