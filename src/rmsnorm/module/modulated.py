"""ModulatedRMSNorm: the norm, scaled and shifted by what depends on the sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rmsnorm.functional import modulated_rms_norm
from rmsnorm.module.base import Norm
from rmsnorm.spec import check_shape


class ModulatedRMSNorm(Norm):
    """Root mean square normalisation, scaled and shifted by what a model computes for each sample or token.

        y = norm(x) * (1 + scale) + shift

    >>> norm = ModulatedRMSNorm(8, elementwise_affine=False)
    >>> scale, shift = torch.zeros(2, 16).view(2, 1, 16).chunk(2, dim=-1)  # a linear layer of the time step makes them
    >>> norm(torch.ones(2, 5, 8), scale, shift).shape
    torch.Size([2, 5, 8])

    Args:
        dim: the trailing dimension to normalise over, or a shape of several.
        eps, weight_offset, rounding: as for `modulated_rms_norm`.
        elementwise_affine: whether there is a weight beside the scale.
        device, dtype: of the parameter.

    Raises:
        ValueError: a dim or eps that is not positive, an unknown option.
        TypeError: an eps that is no number, a dtype that is not floating-point.
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
        flags = {"elementwise_affine": elementwise_affine}
        self._set_up(self.normalized_shape, eps, options, flags, device, dtype)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        """Y of x's shape (*, dim); scale and shift broadcast to it over leading dimensions."""
        return modulated_rms_norm(
            x,
            scale,
            shift,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            normalized_shape=self.normalized_shape,
        )

    def _shape_text(self) -> str:
        return str(self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape)
