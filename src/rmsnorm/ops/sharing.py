"""Broadcasting over rows as a function of autograd, whose gradient is a sum in one order (numerics/modulation.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmsnorm.numerics.modulation import sum_shared


def expand(t: Tensor, shape: Sequence[int]) -> Tensor:
    """`t.expand(shape)`, whose gradient `sum_shared` adds."""
    return Expand.apply(t, Shape(tuple(shape)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Shape:
    """A shape as one argument: functorch takes tuples apart."""

    sizes: tuple[int, ...]


class Expand(torch.autograd.Function):
    """`expand`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, shape: Shape) -> Tensor:
        return t.expand(shape.sizes).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        t, ctx.wide = inputs
        ctx.narrow = Shape(tuple(t.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return SumShared.apply(grad, ctx.narrow), None

    @staticmethod
    def jvp(ctx: Any, dt: Tensor, _: None) -> Tensor:
        return Expand.apply(dt, ctx.wide)  # type: ignore[no-any-return]


class SumShared(torch.autograd.Function):
    """`sum_shared(terms, shape)`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(terms: Tensor, shape: Shape) -> Tensor:
        return sum_shared(terms, shape.sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        terms, ctx.narrow = inputs
        ctx.wide = Shape(tuple(terms.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Expand.apply(grad, ctx.wide), None

    @staticmethod
    def jvp(ctx: Any, dterms: Tensor, _: None) -> Tensor:
        return SumShared.apply(dterms, ctx.narrow)  # type: ignore[no-any-return]
