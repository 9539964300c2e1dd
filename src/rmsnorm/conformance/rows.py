"""The fixed rows that accuracy is measured on, hard ones among them."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = (
    "normal",
    "large",
    "small",
    "beside eps",
    "positive",
    "one outlier",
    "eight binades",
    "heavy tails",
    "sparse",
    "signs",
    "powers of two",
    "below powers of two",
)


def hard_rows(width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Two rows of each kind, (2 * kinds, width); none whose squares leave float32."""
    generator = torch.Generator().manual_seed(seed + width)

    def normal() -> Tensor:
        return torch.randn(2, width, generator=generator, dtype=torch.float64)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(2, width, dtype=torch.float64).uniform_(low, high, generator=generator)

    signs = normal().sign()
    outlier = normal() * 2.0**-6
    outlier[:, width // 3] = 1000.0
    rows = [
        normal(),
        normal() * 500,
        normal() / 16,
        normal() * 3e-3,
        uniform(1, 2),
        outlier,
        signs * 2 ** uniform(-8, 8),
        (normal() / normal().abs().clamp_min(1e-3)).clamp(-6e4, 6e4),
        normal() * (uniform(0, 1) < max(0.05, 2 / width)),
        signs,
        signs * 2 ** uniform(-4, 4).round(),
        signs * (1 - torch.finfo(dtype).eps / 2),
    ]
    return torch.cat(rows).to(dtype)
