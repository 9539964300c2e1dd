"""Quantisation of a norm's result, in plain PyTorch: the definition of every bit of q and scale.

    amax  = max |y| over a row, or over each block of it
    scale = min(amax, scale_ub) / qmax, not below `smallest`          float32, a true division; or given
    q     = y / scale, to the nearest of q's dtype, half to even, and not beyond qmax

A scale of E8M0 is a power of two: 2^(floor(log2(amax)) - emax), as OCP MX has it, or the smallest that is not below
amax / qmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The largest of each dtype, and the exponent of its power of two.
QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
EMAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
DTYPES = tuple(QMAX)
# How scales are stored, and where a power of two lies.
SCALES = ("float32", "e8m0", "e8m0_up")
# Rows of zeros have the smallest normal float32 as a scale, and q of 0.
SMALLEST = torch.finfo(torch.float32).tiny
_INFINITY, _FRACTION = 0x7F800000, 0x7FFFFF


class QuantSpec(NamedTuple):
    """How y is quantised; the order is that of the operator's arguments.

    Attributes:
        type: of q, an index into `DTYPES`.
        scale_kind: an index into `SCALES`.
        block_size: how many elements share a scale; 0 means the whole row.
        qmax: amax / qmax is the scale.
        scale_ub: amax counts as at most this.
        smallest: no scale is below it.
        lowest: the smallest int8.
    """

    type: int = 0
    scale_kind: int = 0
    block_size: int = 0
    qmax: float = 127.0
    scale_ub: float = float("inf")
    smallest: float = SMALLEST
    lowest: float = -127.0

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.type]

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float8_e8m0fnu if self.scale_kind else torch.float32


def quantize(y: Tensor, scale: Tensor | None, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """q of y's shape, contiguous, and a scale for each block of each row."""
    block = spec.block_size or y.shape[-1]
    blocks = y.to(torch.float32).unflatten(-1, (-1, block))
    wide = None
    if scale is None:
        amax = blocks.abs().amax(-1)
        if spec.scale_kind:
            scale, wide = _power_of_two(amax, spec)
        else:
            scale = (amax.clamp(max=spec.scale_ub) / spec.qmax).clamp(min=spec.smallest)
    divided = blocks / (scale if wide is None else wide).unsqueeze(-1)
    return _round(divided, spec).flatten(-2).contiguous(), scale.contiguous()


def _power_of_two(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The scale as E8M0 and as float32."""
    bits = amax.view(torch.int32)
    finite = bits < _INFINITY
    if SCALES[spec.scale_kind] == "e8m0":
        field = (bits >> 23) - EMAX[spec.dtype]
    else:
        least = (amax / spec.qmax).view(torch.int32)
        field = (least >> 23) + ((least & _FRACTION) != 0).to(torch.int32)
        field = torch.where(least <= 0x400000, 0, field)  # at most 2^-127, which is no normal number
    field = field.clamp(0, 0xFE)
    wide = torch.where(field == 0, 0x400000, field << 23).view(torch.float32)
    field, wide = torch.where(finite, field, 0xFF), torch.where(finite, wide, torch.nan)
    return field.to(torch.uint8).view(torch.float8_e8m0fnu), wide


def _round(v: Tensor, spec: QuantSpec) -> Tensor:
    if spec.dtype == torch.int8:
        return torch.where(v.isnan(), 0.0, v).clamp(spec.lowest, 127.0).round().to(torch.int8)
    return v.clamp(-spec.qmax, spec.qmax).to(spec.dtype)


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """q * scale, in float32."""
    block = q.shape[-1] // scale.shape[-1]
    blocks: Tensor = q.to(torch.float32).unflatten(-1, (-1, block))
    return (blocks * scale.to(torch.float32).unsqueeze(-1)).flatten(-2)
