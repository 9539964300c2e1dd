"""What all contestants of a case are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rmsnorm.cli.bench.shapes import Case

EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """x, residual and dy have the case's shape, weight its columns, and all its dtype."""

    x: Tensor
    weight: Tensor
    residual: Tensor
    dy: Tensor

    @classmethod
    def of(cls, case: Case) -> Inputs:
        """Normally distributed numbers, the same for every run."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(case.device, getattr(torch, case.dtype))

        rows, cols = case.shape.rows, case.shape.cols
        return cls(draw(rows, cols), 1 + 0.2 * draw(cols), draw(rows, cols), draw(rows, cols))
