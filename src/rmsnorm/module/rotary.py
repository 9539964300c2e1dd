"""QKNormRotary: the norms of queries and keys, and the rotary embedding after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm import checks
from rmsnorm.functional import qk_norm_rotary
from rmsnorm.module.plain import RMSNorm
from rmsnorm.numerics.rotation import ROTARY_ROUNDINGS
from rmsnorm.spec import check_choice, check_flag


class QKNormRotary(nn.Module):
    """Root mean square normalisation of queries and keys, and their rotary embedding; see `qk_norm_rotary`.

    >>> rotary = QKNormRotary(8)
    >>> q, k, angle = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(5, 1, 4)
    >>> q, k = rotary(q, k, angle.cos(), angle.sin())

    Its norms are `q_norm` and `k_norm`, as attention layers call them.

    Args:
        head_dim: the width of a head.
        eps, weight_offset, rounding, rotary_dim, interleaved, rotary_rounding: as for `rms_norm_rotary`.
        elementwise_affine: whether there are weights.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        head_dim: int,
        eps: float | None = 1e-6,
        *,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        rounding: str = "once",
        rotary_dim: int | None = None,
        interleaved: bool = False,
        rotary_rounding: str = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: Any = {"weight_offset": weight_offset, "rounding": rounding, "device": device, "dtype": dtype}
        self.q_norm = RMSNorm(head_dim, eps, elementwise_affine=elementwise_affine, **options)
        self.k_norm = RMSNorm(head_dim, eps, elementwise_affine=elementwise_affine, **options)
        checks.check_rotary_dim(rotary_dim, torch.empty(head_dim, device="meta"))
        check_flag(interleaved, "interleaved")
        check_choice(rotary_rounding, "rotary_rounding", ROTARY_ROUNDINGS)
        self.rotary: dict[str, Any] = {
            "rotary_dim": rotary_dim, "interleaved": interleaved, "rotary_rounding": rotary_rounding
        }  # fmt: skip

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q and k, of shapes (*, head_dim), normalised and rotated."""
        norm = self.q_norm
        options: Any = {"weight_offset": norm.weight_offset, "rounding": norm.rounding, **self.rotary}
        return qk_norm_rotary(q, k, norm.weight, self.k_norm.weight, cos, sin, norm.eps, **options)

    def extra_repr(self) -> str:
        """Every option of the rotation that is not the default."""
        defaults = {"rotary_dim": None, "interleaved": False, "rotary_rounding": "once"}
        return ", ".join(f"{name}={self.rotary[name]!r}" for name, d in defaults.items() if self.rotary[name] != d)
