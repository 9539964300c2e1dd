"""A wrong kernel has no speed: every result is held to float64 before it is timed.

The bounds ask whether the formula was computed, in the precision that an implementation can be expected to use, and not
how well: any order of summation in float32 passes, and so does the rounding to the dtype that some make on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rmsnorm.cli.bench.shapes import Case
from rmsnorm.cli.bench.tensors import EPS, Inputs

# Roundings to the dtype of the tensors. y: x_hat, and the product with the weight; after an add, h first. dx: dy *
# weight, dx, and once in between. dweight: x_hat, its product with dy, and the sum.
ROUNDINGS = {"y": 2, "h": 1, "dx": 3, "dweight": 3}
# N. Higham and T. Mary, "A new approach to probabilistic rounding error analysis", 2019: n sums err by more than
# LAMBDA * sqrt(n) units of rounding with a probability of 2 * exp(-LAMBDA^2 / 2), here 3e-8.
LAMBDA = 6.0
# In float32 (eps, square root, reciprocal or division, two products, and what is fused differently).
FEW = 6


def find_error(case: Case, formula: str, inputs: Inputs, outputs: Sequence[Tensor]) -> str | None:
    """Return what is wrong with the outputs of a contestant, or None."""
    if case.what == "quantized":
        return _quantized_error(case, formula, inputs, *outputs)
    for name, (want, scale, sums) in _truth(case.what, formula, inputs).items():
        got = outputs[NAMES[case.what].index(name)]
        if got.shape != want.shape or got.dtype != inputs.x.dtype:
            shape, dtype = tuple(got.shape), str(got.dtype).removeprefix("torch.")
            return f"{name} has shape {shape} and dtype {dtype}"
        unit = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps / 2
        roundings = ROUNDINGS[name] + ((case.what, name) == ("add", "y"))
        relative = roundings * torch.finfo(got.dtype).eps / 2 + unit * (FEW + LAMBDA * math.sqrt(sums))
        # Below the smallest normal number a result is a multiple of the smallest subnormal one.
        allowed = relative * scale + torch.finfo(got.dtype).tiny
        error = (got.double() - want).abs()
        # Written so that a NaN is wrong.
        if not bool((error <= allowed).all()):
            worst = torch.nan_to_num(error / allowed, nan=torch.inf).max().item()
            return f"{name} is off by up to {worst:.3g} times what rounding explains"
    return None


def _quantized_error(case: Case, formula: str, inputs: Inputs, q: Tensor, scale: Tensor) -> str | None:
    """What is wrong with int8 and its scales: each element is half a step off, and as far as the norm itself may be."""
    if q.dtype != torch.int8 or q.shape != inputs.x.shape or scale.numel() != len(inputs.x):
        return (
            f"q has shape {tuple(q.shape)} and dtype {str(q.dtype).removeprefix('torch.')}, with {scale.numel()} scales"
        )
    want, size, sums = _truth("forward", formula, inputs)["y"]
    step = scale.double().reshape(-1, 1)
    unit = torch.finfo(torch.float32).eps / 2
    relative = ROUNDINGS["y"] * torch.finfo(inputs.x.dtype).eps / 2 + unit * (FEW + 2 + LAMBDA * math.sqrt(sums))
    # Up to 127 steps, whose quotient is rounded in float32.
    allowed = (0.5 + 128 * unit) * step + relative * size
    error = (q.double() * step - want).abs()
    if not bool((error <= allowed).all()):
        worst = torch.nan_to_num(error / allowed, nan=torch.inf).max().item()
        return f"q * scale is off by up to {worst:.3g} times what rounding explains"
    full = q.double().abs().amax(-1)
    if not bool(((full >= 126) | (want == 0).all(-1)).all()):
        return f"the largest element of some row is {full.min().item():g} and not 127"
    return None


NAMES = {"forward": ("y",), "add": ("y", "h"), "backward": ("dx", "dweight"), "training": ("dx", "dweight")}


def _truth(what: str, formula: str, inputs: Inputs) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Each result in float64, the magnitude its errors are relative to, and the length of the longest sum in it."""
    x, weight, cols = inputs.x.double(), inputs.weight.double(), inputs.x.shape[-1]
    if what == "add":
        x = x + inputs.residual.double()
    mean = x.mean(-1, keepdim=True) if formula == "LayerNorm" else torch.zeros((), dtype=x.dtype, device=x.device)
    centred = x - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    x_hat = centred * rstd
    # x - mean cancels; the error of the mean is one of the sum of |x|.
    size = (x.abs() + x.abs().mean(-1, keepdim=True) if formula == "LayerNorm" else x.abs()) * rstd
    if what in ("forward", "add"):
        y = x_hat * weight, size * weight.abs(), cols
        return {"y": y} if what == "forward" else {"y": y, "h": (x, x.abs(), 0)}
    dx_hat = inputs.dy.double() * weight
    along = (dx_hat * x_hat).mean(-1, keepdim=True)
    dx = rstd * (dx_hat - x_hat * along)
    scale = rstd * (dx_hat.abs() + size * (dx_hat * size).abs().mean(-1, keepdim=True))
    if formula == "LayerNorm":
        dx = dx - rstd * dx_hat.mean(-1, keepdim=True)
        scale = scale + rstd * dx_hat.abs().mean(-1, keepdim=True)
    products = inputs.dy.double() * x_hat
    dweight = products.sum(0), (inputs.dy.double().abs() * size).sum(0), x.shape[0]
    return {"dx": (dx, scale, cols), "dweight": dweight}
