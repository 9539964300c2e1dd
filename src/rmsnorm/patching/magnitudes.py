"""Rows, weights and gates of every magnitude: what is bounded, clamped or switched somewhere shows.

Here results are held to an interval: the formula, with as many roundings as the module was seen to make among ordinary
values, and with the underflow and overflow that squares have where a module takes them in 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm.patching.convention import Convention, Evidence
from rmsnorm.patching.judging import coarsest, exact, name_of, parts
from rmsnorm.patching.probes import SMALLEST_EPS
from rmsnorm.patching.samples import Sample, cast, row_shape, run
from rmsnorm.patching.specimen import NotRMSNorm, Specimen

# Exponents of two, whose squares and their sums are within float32's range; bfloat16 has the same, float16 less.
_ROWS = (-60, -48, -36, -26, -20, -16, -12, -8, -4, 0, 4, 10, 20, 30, 40, 50)
_ROWS_OF_FLOAT16 = (-20, -17, -14, -12, -10, -8, -6, -4, 0, 3, 6, 9, 12)
_SMALLEST_WEIGHT, _SMALLEST_WEIGHT_OF_FLOAT16 = -110, -14
_GATES = (0.0, 0.1, 1.0, 3.0, 6.0, 9.0, 12.0, 20.0, 40.0, 80.0, 100.0, 1000.0, 30000.0)
# Of wide rows fewer are tried: their elements are many.
_WIDE = 2**14
# Products on the way may be larger than the result by this much.
_HEADROOM = 64.0
_NOTHING = torch.finfo(torch.float32).tiny


def check(specimen: Specimen, convention: Convention) -> None:
    """Every magnitude comes out as the formula says.

    Raises:
        NotRMSNorm: one does not.
    """
    for evidence in convention.evidence:
        pair = evidence.x, evidence.weight
        if evidence.weight in (None, evidence.x):
            _check(specimen, convention, evidence, cast(specimen, _rows(convention, evidence.x), *pair), "rows")
            if convention.activation is not None:
                _check(specimen, convention, evidence, cast(specimen, _gates(convention), *pair), "gates")
        if evidence.weight is not None:
            made = _weights(convention, evidence.weight)
            _check(specimen, convention, evidence, cast(specimen, made, *pair), "weights")


def _ordinary(convention: Convention, rows: int, generator: torch.Generator) -> Sample:
    shape = row_shape(convention)
    made = {"x": torch.randn(1, rows, *shape, generator=generator)}
    if convention.activation is not None:
        made["gate"] = torch.randn(1, rows, *shape, generator=generator)
    if convention.weight is not None:
        made["weight"] = torch.empty(shape).uniform_(0.5, 1.5, generator=generator) - convention.weight_offset
    return made


def _rows(convention: Convention, dtype: torch.dtype) -> Sample:
    """Rows of every magnitude, and some with zeros, of one value, or with one value that outdoes the others."""
    width = torch.Size(row_shape(convention)).numel()
    exponents = _ROWS_OF_FLOAT16 if dtype == torch.float16 else _ROWS
    eps = torch.finfo(torch.float32).eps if convention.eps is None else convention.eps
    chosen = [e for e in exponents if eps >= SMALLEST_EPS or 4.0**e >= SMALLEST_EPS][:: 4 if width > _WIDE else 1]
    made = _ordinary(convention, len(chosen) + 6, torch.Generator().manual_seed(11))
    rows = made["x"].view(len(chosen) + 6, width)
    for row, exponent in zip(rows, chosen, strict=False):
        row *= 2.0**exponent
    half, first, end, alike, above, outdone = rows[len(chosen) :]
    half[::2] = 0.0
    first[1:] = 0.0
    end[(width + 1) // 2 :] = 0.0
    alike[:] = -0.75
    above.abs_()
    outdone[0] = 200.0
    return made


def _weights(convention: Convention, dtype: torch.dtype) -> Sample:
    """Weights of every magnitude up to the largest, each with both signs."""
    made = _ordinary(convention, 2, torch.Generator().manual_seed(12))
    weight = made["weight"].view(-1)
    largest = torch.finfo(dtype).max
    smallest = _SMALLEST_WEIGHT_OF_FLOAT16 if dtype == torch.float16 else _SMALLEST_WEIGHT
    pairs = (weight.numel() + 1) // 2
    exponents = torch.linspace(0.0, smallest - torch.tensor(largest).log2(), pairs, dtype=torch.float64)
    sizes = (largest * torch.exp2(exponents)).repeat_interleave(2)[: weight.numel()].float()
    sizes[1::2] *= -1
    weight[:] = sizes
    rows = made["x"].view(2, -1)
    rows[0, 0], rows[1, 1] = 4.0, -4.0  # so that the largest overflow
    return made


def _gates(convention: Convention) -> Sample:
    width = torch.Size(row_shape(convention)).numel()
    sizes = torch.tensor(_GATES[:: 4 if width > _WIDE else 1])
    made = _ordinary(convention, len(sizes), torch.Generator().manual_seed(13))
    made["gate"] = made["gate"].sign() * sizes.view(-1, *(1 for _ in row_shape(convention)))
    return made


def _check(specimen: Specimen, convention: Convention, evidence: Evidence, given: Sample, of: str) -> None:
    theirs = run(specimen, convention, given)
    wrong = ~_within(convention, evidence, given, theirs)
    if not wrong.any():
        return
    where = name_of(evidence.x, evidence.weight)
    place = tuple(int(i) for i in wrong.nonzero()[0])
    value = f"{float(theirs[place]):.3g} where the formula gives {float(exact(convention, given)[place]):.3g}"
    raise NotRMSNorm(f"for {where} it computes something else for {of} of other magnitudes: {value}", True)


def _within(convention: Convention, evidence: Evidence, given: Sample, theirs: Tensor) -> Tensor:
    """Where a result is what the formula can come to."""
    y = theirs.double().view(1, theirs.shape[1], -1)
    u, rstd, factor = parts(convention, given)
    correct = u * rstd * factor
    result = torch.finfo(theirs.dtype)
    # What one rounding does to numbers around zero, in the coarsest arithmetic that there may be.
    coarse = torch.finfo(max((evidence.x, theirs.dtype), key=lambda dtype: torch.finfo(dtype).tiny))
    unit = coarse.smallest_normal * coarse.eps / 2
    low, high = (exact(convention, given, shift).abs().view_as(y) for shift in (4 * unit, -4 * unit))
    # As many roundings as there were among ordinary values, and some more for other ones.
    margin = (2 * evidence.theirs + 1) * torch.finfo(_precision(convention, evidence, theirs)).eps / 2
    floor = margin * result.smallest_normal + 4 * unit * (1 + factor.abs()) * (1 + rstd)
    if "gate" in given:
        # An activation may be subnormal, or nothing where exp overflows before it.
        x, z = (given[name].double().abs().view_as(y) for name in ("x", "gate"))
        gain = given["weight"].double().flatten() + convention.weight_offset if "weight" in given else torch.ones(())
        floor = floor + (4 * unit + _NOTHING) * (1 + z) * x * rstd * gain.abs()
    low, high = low * (1 - margin) - floor, high * (1 + margin) + floor
    size, alike = y.abs(), y.sign() == correct.sign()
    inside = (size >= low) & (size <= high) & (alike | (size <= floor)) & size.isfinite() & (low <= result.max)
    # Too large for the result's dtype; or on the way to it, which is no fault but the module's own.
    narrow = min(torch.finfo(t.dtype).max for t in (*given.values(), theirs))
    inside |= size.isinf() & (high * _HEADROOM >= narrow) & alike
    inside |= high.isnan() & (y.isnan() | (y == 0))  # zero by zero
    if theirs.dtype == torch.float16:
        # Where its squares overflow, nothing is left of a row.
        overflows = u.abs().amax(-1, keepdim=True) >= 0.99 * result.max**0.5
        inside |= overflows & ((y == 0) | ~size.isfinite())
    return inside.view(theirs.shape)


def _precision(convention: Convention, evidence: Evidence, theirs: Tensor) -> torch.dtype:
    return coarsest(convention, evidence.x, evidence.weight, theirs.dtype)
