"""GatedRMSNorm: the norm with a gate."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rmsnorm.functional import gated_rms_norm
from rmsnorm.module.base import Norm
from rmsnorm.spec import check_shape


class GatedRMSNorm(Norm):
    """Root mean square normalisation with a learned weight and a gate; see `gated_rms_norm`.

    >>> norm = GatedRMSNorm(8, group_size=4, norm_before_gate=False)
    >>> norm(torch.ones(2, 8), torch.zeros(2, 8)).shape
    torch.Size([2, 8])

    Args:
        dim: the last dimension.
        eps, activation, norm_before_gate, group_size, weight_offset, rounding: as for `gated_rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the parameter.

    Raises:
        ValueError: a dim or eps that is not positive, a group size that does not divide dim, an unknown option.
        TypeError: an eps that is no number, a dtype that is not floating-point.
    """

    activation: str
    norm_before_gate: bool
    group_size: int | None
    rounding: str
    _defaults: ClassVar[dict[str, Any]] = {
        "elementwise_affine": True,
        "activation": "silu",
        "norm_before_gate": True,
        "group_size": None,
        "weight_offset": 0.0,
        "rounding": "once",
    }

    def __init__(
        self,
        dim: int,
        eps: float | None = 1e-6,
        *,
        elementwise_affine: bool = True,
        activation: str = "silu",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        weight_offset: float = 0.0,
        rounding: str = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        (self.dim,) = check_shape(dim, "dim")
        options = {"activation": activation, "norm_before_gate": norm_before_gate, "group_size": group_size}
        options |= {"weight_offset": weight_offset, "rounding": rounding}
        self._set_up((self.dim,), eps, options, {"elementwise_affine": elementwise_affine}, device, dtype)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Y of x's shape (*, dim); the gate has it too. Without a gate, the norm alone."""
        return gated_rms_norm(
            x,
            gate,
            self.weight,
            self.eps,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            normalized_shape=None if self.elementwise_affine else self.dim,
        )

    def _shape_text(self) -> str:
        return str(self.dim)
