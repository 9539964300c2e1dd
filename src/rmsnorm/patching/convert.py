"""Weights between the two ways of storing a gain: as it is, and as an offset from one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from rmsnorm.module import GatedRMSNorm, Norm, RMSNorm
from rmsnorm.patching.convention import Convention, short
from rmsnorm.patching.identifying import examine
from rmsnorm.patching.specimen import NotRMSNorm

Made = TypeVar("Made", RMSNorm, GatedRMSNorm)


@dataclass(frozen=True)
class Conversion:
    """A converted weight, and what its rounding cost.

    Args:
        weight: the new weight, in the dtype that was asked for.
        changed: how many gains are not exactly the old ones.
        largest: the largest relative change of a gain.
    """

    weight: Tensor
    changed: int
    largest: float

    def __str__(self) -> str:
        total = self.weight.numel()
        if not self.changed:
            return f"all {total} gains are exactly what they were"
        return f"{self.changed} of {total} gains changed by rounding, by at most {self.largest:.2g} of their size"


def fold_offset(weight: Tensor, weight_offset: float = 1.0, dtype: torch.dtype | None = None) -> Conversion:
    """The plain weight of a norm that adds `weight_offset` to its own: weight + weight_offset.

    The sum is formed in float32 (float64 for float64), exactly as the norm forms its gain, and rounded once to `dtype`.
    Kept in float32 nothing changes; rounded to 16 bits a gain near 1 keeps only steps of 2^-7 (bfloat16) or 2^-10
    (float16), where the offset kept far finer ones.

    >>> print(fold_offset(torch.tensor([0.0, 2.0**-9], dtype=torch.bfloat16)))
    all 2 gains are exactly what they were
    >>> print(fold_offset(torch.tensor([0.0, 2.0**-9], dtype=torch.bfloat16), dtype=torch.bfloat16))
    1 of 2 gains changed by rounding, by at most 0.0019 of their size

    Args:
        weight: of any floating-point dtype.
        weight_offset: what the norm adds.
        dtype: of the result; float32 (float64 for float64) by default.

    Raises:
        TypeError: the weight is no floating-point tensor, or dtype no floating-point dtype.
    """
    gain = _wide(weight, dtype) + weight_offset
    return _converted(gain.to(dtype or gain.dtype), gain, 0.0)


def unfold_offset(weight: Tensor, weight_offset: float = 1.0, dtype: torch.dtype | None = None) -> Conversion:
    """The weight of a norm that adds `weight_offset`, from a plain one: weight - weight_offset.

    The difference is formed in float32 (float64 for float64) and rounded once to `dtype`, by default the weight's own.
    It is exact for gains between half and twice the offset; the gain that the norm then forms from it is compared with
    the old one.

    >>> print(unfold_offset(torch.tensor([1.0, 1.0 + 2.0**-7], dtype=torch.bfloat16)))
    all 2 gains are exactly what they were
    """
    gain = _wide(weight, dtype)
    return _converted((gain - weight_offset).to(dtype or weight.dtype), gain, weight_offset)


def from_module(module: nn.Module, cls: type[Made]) -> Made:
    """This library's module that computes what a recognised one computes, with the same parameter object.

    Raises:
        ValueError: it is not recognised, and why; it is of the other kind, takes any width, or has no eps.
    """
    try:
        convention = examine(module)
    except NotRMSNorm as reason:
        raise ValueError(f"{type(module).__name__} is no RMSNorm that can be converted: {reason}") from None
    return from_convention(module, convention, cls)


def from_convention(module: nn.Module, convention: Convention, cls: type[Made]) -> Made:
    """`from_module`, of a module that was examined."""
    name = type(module).__name__
    if (convention.activation is not None) != issubclass(cls, GatedRMSNorm):
        raise ValueError(
            f"{name} is gated: use GatedRMSNorm" if convention.activation else f"{name} has no gate: use RMSNorm"
        )
    if convention.shape is None:
        raise ValueError(f"{name} takes any width: write RMSNorm(dim, eps={convention.eps}, elementwise_affine=False)")
    if convention.activation is not None and len(convention.shape) > 1:
        raise ValueError(f"{name} scales rows of shape {convention.shape}, {cls.__name__} those of one dimension")
    if convention.eps == 0:
        raise ValueError(f"{name} has eps 0, which {cls.__name__} does not take: use the function")
    weight = None if convention.weight is None else getattr(module, convention.weight)
    made = cls(**convention.arguments)
    if weight is not None and made.weight is not None:
        shape = tuple(made.weight.shape)
        if isinstance(made, RMSNorm):
            made.sequence_parallel = getattr(weight, "sequence_parallel", False)
        if tuple(weight.shape) == shape and isinstance(weight, nn.Parameter):
            made.weight = weight
        else:
            made.weight = nn.Parameter(weight.detach().reshape(shape), requires_grad=weight.requires_grad)
    return made.train(module.training)


def _wide(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor, got {type(weight).__name__}")
    for name, given in (("weight", weight.dtype), ("dtype", dtype or torch.float32)):
        if not isinstance(given, torch.dtype):
            raise TypeError(f"{name} must be a torch.dtype, got {given!r}")
        if not given.is_floating_point:
            raise TypeError(f"{name} must be floating-point, got {short(given)}")
    return weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)


def _converted(weight: Tensor, gain: Tensor, weight_offset: float) -> Conversion:
    now = weight.to(gain.dtype) + weight_offset
    different = now != gain
    relative = ((now - gain).double().abs() / gain.double().abs().clamp_min(torch.finfo(gain.dtype).tiny))[different]
    return Conversion(weight, int(different.sum()), float(relative.max()) if relative.numel() else 0.0)


Norm.converter = staticmethod(from_module)
