"""What the fast paths of the public functions share: their tests, and names that cost nothing to look up.

Fast path: common calls go directly to an operator, or to the `autograd.Function` around it, whose own checks guard
memory; of what it refuses, checked.py says why. Every other call is checked first, and dispatch.py chooses its way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from rmsnorm.ops import autograd
from rmsnorm.ops.library import operators
from rmsnorm.spec import ACTIVATIONS, ROUNDINGS, NormSpec

ROUNDING_INDEX = {name: index for index, name in enumerate(ROUNDINGS)}
ACTIVATION_INDEX = {name: index for index, name in enumerate(ACTIVATIONS)}
ONCE = ROUNDINGS[0]  # interned, as the default and every literal is
FLOAT64, TENSORS = torch.float64, (nn.Parameter, Tensor)
direct, on_gpu = operators.direct, operators.gpu
has_gpu = on_gpu is not direct
train = super(torch.autograd.Function, autograd.Norm).apply  # less what Function.apply does for functorch
functorch_active = torch._C._are_functorch_transforms_active
compiling = torch.compiler.is_dynamo_compiling  # of exporters, x has a type of its own
grad_enabled = torch.is_grad_enabled


@functools.lru_cache(maxsize=256)  # a call is answered in a third of the time that building the record takes
def spec_of(
    eps: float,
    weight_offset: float,
    rounding: str,
    group_size: int | None = None,
    activation: str = "silu",
    gate_first: bool = False,
) -> NormSpec:
    """The record of options that the fast path has found to be of the right types."""
    group, act = group_size or 0, ACTIVATION_INDEX[activation]
    return NormSpec(eps, weight_offset, ROUNDING_INDEX[rounding], group, act, gate_first)


def is_common(x: Any, weight: Any, eps: Any, weight_offset: Any, rounding: Any) -> bool:
    """Whether a call may go to an operator, or the `autograd.Function` around it, with no check but the operator's."""
    return (
        type(x) is Tensor
        and type(eps) is float
        and type(weight_offset) is float
        and type(rounding) is str
        and rounding in ROUNDING_INDEX
        and x.dtype is not FLOAT64
        and (weight is None or (type(weight) in TENSORS and weight.dim() == 1 and weight.dtype is not FLOAT64))
        and not functorch_active()
        and forward_ad._current_level < 0
        and not compiling()
    )


def can_write(out: Any, x: Tensor, weight: Tensor | None) -> bool:
    """Whether the operator may write out, without a check but its own."""
    return (
        type(out) is Tensor
        and out.layout is torch.strided
        and out.is_contiguous()
        and x.is_contiguous()
        and (weight is None or weight.is_contiguous())
        and out.device == x.device
        and not out.is_neg()
        and (torch.is_inference_mode_enabled() or not out.is_inference())
        and not (grad_enabled() and any(t is not None and t.requires_grad for t in (out, x, weight)))
    )
