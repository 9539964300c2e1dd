"""The reference of rmsnorm.numerics with its options one by one, as tests write them."""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm.numerics import reference
from rmsnorm.numerics.reference import rebuild as rebuild
from rmsnorm.spec import NormSpec, make_spec

Pair = tuple[Tensor, Tensor]


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Pair:
    """y and rstd of a norm of whole rows."""
    return reference.forward(x, None, weight, make_spec(eps, offset, rounding))


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and rstd."""
    return reference.add_forward(x, residual, weight, make_spec(eps, offset, rounding))


def backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, dh: Tensor | None = None
) -> Pair:
    """dx and dweight of a norm of whole rows."""
    dx, _, dweight = reference.backward(dy, x, None, rstd, weight, dh, NormSpec(0.0, offset))
    return dx, dweight


def gated_forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    group_size: int,
    activation: str,
    norm_before_gate: bool,
) -> Pair:
    """y and rstd."""
    options = {"activation": activation, "norm_before_gate": norm_before_gate}
    return reference.forward(x, gate, weight, make_spec(eps, offset, rounding, group_size, **options))


def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    group_size: int,
    activation: str,
    norm_before_gate: bool,
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, dgate and dweight."""
    options = {"activation": activation, "norm_before_gate": norm_before_gate}
    spec = make_spec(0.0, offset, group_size=group_size, **options)
    return reference.backward(dy, x, gate, rstd, weight, dh, spec)


def result_dtype(x: Tensor, weight: Tensor | None, rounding: str) -> torch.dtype:
    """The dtype of y."""
    return reference.result_dtype(x.dtype, weight, make_spec(rounding=rounding))
