"""RMSNormAdd: the norm that closes a branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rmsnorm.functional import rms_norm_add, rms_norm_add_rms_norm
from rmsnorm.module.base import Norm
from rmsnorm.module.plain import RMSNorm
from rmsnorm.spec import check_shape


class RMSNormAdd(Norm):
    """Root mean square normalisation of a branch, added to the residual stream; see `rms_norm_add`.

        h = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) + residual

    >>> closing, opening = RMSNormAdd(4), RMSNorm(4)
    >>> branch, stream = torch.ones(2, 4), torch.ones(2, 4)
    >>> h = closing(branch, stream)
    >>> y, h = closing(branch, stream, opening)  # and the next block's norm of h, in the same pass

    Args:
        dim: the trailing dimension to normalise over, or a shape of several.
        eps, weight_offset, rounding: as for `rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the parameter.

    Raises:
        ValueError, TypeError: as `RMSNorm`; and for a next norm with other options than this one's.
    """

    rounding: str
    _defaults: ClassVar[dict[str, Any]] = {"elementwise_affine": True, "weight_offset": 0.0, "rounding": "once"}

    def __init__(
        self,
        dim: int | Sequence[int],
        eps: float | None = 1e-6,
        *,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        rounding: str = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = check_shape(dim, "dim")
        options: dict[str, Any] = {"weight_offset": weight_offset, "rounding": rounding}
        self._set_up(self.normalized_shape, eps, options, {"elementwise_affine": elementwise_affine}, device, dtype)

    def forward(self, x: Tensor, residual: Tensor, opening: RMSNorm | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """h of x's shape (*, dim); with the next block's norm, y and h."""
        options: Any = {"weight_offset": self.weight_offset, "rounding": self.rounding}
        options["normalized_shape"] = self.normalized_shape
        if opening is None:
            return rms_norm_add(x, residual, self.weight, self.eps, **options)
        for name, value in options.items():
            if getattr(opening, name, None) != value:
                raise ValueError(f"the next norm must have {name}={value!r}, got {opening!r}")
        if opening.group_size is not None:
            raise ValueError(f"the next norm must have no groups, got {opening!r}")
        return rms_norm_add_rms_norm(
            x, residual, self.weight, opening.weight, self.eps, next_eps=opening.eps, **options
        )

    def _shape_text(self) -> str:
        return str(self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape)
