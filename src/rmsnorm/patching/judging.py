"""How far results are from exact arithmetic and from each other, and whether a replacement may take their place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rmsnorm.numerics import fixed_sum
from rmsnorm.patching.convention import Convention, Evidence, short
from rmsnorm.patching.samples import Sample
from rmsnorm.patching.specimen import NotRMSNorm

# Half units of the result's precision that a module may be off by and still be called an RMSNorm. Ten operations, each
# rounded: squares, mean, eps, square root, quotient, three products with gate and weight, two more in the activation.
THEIR_ROUNDINGS = 12.0
# docs/numerics.md: three roundings of float32 and the last one; where a rounding comes before the weight, one more.
# Gates add two products and the activation's own two.
OUR_ROUNDINGS, OUR_GATED_ROUNDINGS = 4.0, 8.0
# Errors of one rounding are 1/4 unit in the mean, of two they are 1/3: 4/3 times as many, or 1 if they round alike.
ONE_MORE_ROUNDING = 7 / 6
# Of float32, in the mean over all elements: errors of products cancel, those of three operations in rstd partly.
SYSTEMATIC = 2.0


def judge(convention: Convention, given: Sample, theirs: Tensor) -> Evidence | NotRMSNorm:
    """How the two results compare, or why ours may not take the place of theirs."""
    x, weight, gate = given["x"], given.get("weight"), given.get("gate")
    ours = convention.apply(x, weight, gate)
    where = name_of(x.dtype, None if weight is None else weight.dtype)
    if ours.dtype != theirs.dtype:
        return NotRMSNorm(f"for {where} it returns {short(theirs.dtype)} where {short(ours.dtype)} was expected", True)
    if not theirs.isfinite().all():
        return NotRMSNorm(f"for {where} its result is not finite", True)
    correct = exact(convention, given)
    precision = coarsest(convention, x.dtype, None if weight is None else weight.dtype, ours.dtype)
    evidence = Evidence(
        x.dtype,
        None if weight is None else weight.dtype,
        units_apart(ours, theirs, precision),
        float((ours == theirs).double().mean()),
        roundings(theirs, correct, precision),
        roundings(ours, correct, precision),
    )
    if precision != torch.float32 and _mean_error(ours, correct) > ONE_MORE_ROUNDING * _mean_error(theirs, correct):
        return NotRMSNorm(f"for {where} it rounds less often than its replacement would", True)
    bound = OUR_ROUNDINGS if convention.activation is None else OUR_GATED_ROUNDINGS
    if evidence.ours <= max(evidence.theirs, bound) and (evidence.apart <= 1 or evidence.theirs <= THEIR_ROUNDINGS):
        if precision == torch.float32 and abs(_mean_error(theirs, correct, signed=True)) > SYSTEMATIC * 2.0**-24:
            return NotRMSNorm(f"for {where} its results are off by a factor", True)
        return evidence
    return NotRMSNorm(
        f"for {where} the results are {evidence.apart} units in the last place apart; from exact arithmetic it is "
        f"{evidence.theirs:.1f} roundings, its replacement would be {evidence.ours:.1f}",
        True,
    )


def name_of(x: torch.dtype, weight: torch.dtype | None) -> str:
    """A pair of dtypes in words."""
    return short(x) if weight in (None, x) else f"{short(x)} with a weight in {short(weight)}"


def exact(convention: Convention, given: Sample, shift: float = 0.0) -> Tensor:
    """The formula in float64, without intermediate roundings; `shift` is added to the mean square, down to zero."""
    u, rstd, factor = parts(convention, given, shift)
    return (u * rstd * factor).view(given["x"].shape)


def parts(convention: Convention, given: Sample, shift: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """What is normalised, the reciprocal root of its mean square, and what it is multiplied by; rows lie flat."""
    x, weight, gate = given["x"], given.get("weight"), given.get("gate")
    rows = 1 if convention.shape is None else len(convention.shape)
    u = x.double().flatten(-rows) if rows > 1 else x.double()
    factor = torch.ones((), dtype=torch.float64, device=u.device)
    if weight is not None:
        factor = weight.double().flatten() + convention.weight_offset
    if gate is not None:
        z = gate.double().reshape(u.shape)
        act = torch.sigmoid(z) * (z if convention.activation == "silu" else 1.0)
        u, factor = (u, factor * act) if convention.norm_before_gate else (u * act, factor)
    eps = torch.finfo(torch.float32).eps if convention.eps is None else convention.eps
    group = convention.group_size or u.shape[-1]
    groups = u.unflatten(-1, (-1, group))
    rstd = torch.rsqrt((groups.square().mean(-1, keepdim=True) + (eps + shift)).clamp_min(0.0))
    return u, rstd.expand_as(groups).flatten(-2), factor


def coarsest(convention: Convention, x: torch.dtype, weight: torch.dtype | None, result: torch.dtype) -> torch.dtype:
    """The coarsest dtype that a value is rounded to on its way."""
    dtypes = [result]
    if convention.rounding == "before_scale":
        dtypes.append(x)
    elif convention.rounding == "weight_dtype" and weight is not None:
        dtypes.append(weight)
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def roundings(y: Tensor, correct: Tensor, precision: torch.dtype) -> float:
    """The largest relative error, in half units of a precision; subnormal results have less of it."""
    size = correct.abs().clamp_min(torch.finfo(y.dtype).smallest_normal)
    return float(((y.double() - correct).abs() / (size * torch.finfo(precision).eps / 2)).max())


def _mean_error(y: Tensor, correct: Tensor, signed: bool = False) -> float:
    """Relative to the exact results; signed, it is positive where results are too far from zero."""
    error = (y.double() - correct) / correct.abs().clamp_min(torch.finfo(y.dtype).smallest_normal)
    return float((error * correct.sign() if signed else error.abs()).mean())


def units_apart(a: Tensor, b: Tensor, precision: torch.dtype) -> int:
    """The largest distance of two results in units in the last place of a precision."""
    size = torch.maximum(a.double().abs(), b.double().abs()).clamp_min(torch.finfo(a.dtype).smallest_normal)
    unit = fixed_sum.power_of_two(fixed_sum.exponent_of(size) - 1) * torch.finfo(precision).eps
    return math.ceil(float(((a.double() - b.double()).abs() / unit).max()))
