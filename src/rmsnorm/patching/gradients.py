"""The gradients are those of the formula: a module might detach what it divides by."""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.judging import exact, name_of
from rmsnorm.patching.samples import Pair, Sample, run, same
from rmsnorm.patching.specimen import NotRMSNorm, Specimen

# Relative to the row's norm. float32: sums over the row and the rows, whose terms partly cancel.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}
# Magnitudes of the gradients that arrive, row by row.
_SIZES, _SIZES_OF_FLOAT16 = (1.0, 2.0**20, 2.0**-20), (1.0, 2.0**4, 2.0**-4)
# Of the part that lies along the formula's gradient: roundings have no direction.
_SCALE = {torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def check(specimen: Specimen, convention: Convention, samples: dict[Pair, Sample], results: dict[Pair, Tensor]) -> None:
    """In every pair of dtypes, in training and out of it; and the results stay what they are without gradients.

    Raises:
        NotRMSNorm: a gradient is missing, fails, or is another; or so is the result.
    """
    for evidence in convention.evidence:
        given = samples[evidence.x, evidence.weight]
        where = name_of(evidence.x, evidence.weight)
        dtypes = (evidence.x, evidence.weight or evidence.x)
        precision = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        dy = torch.randn(given["x"].shape, generator=torch.Generator().manual_seed(104)).to(given["x"].device)
        sizes = torch.tensor(_SIZES_OF_FLOAT16 if torch.float16 in dtypes else _SIZES).repeat(len(dy))[: len(dy)]
        dy = dy * sizes.to(dy.device).view(-1, *(1 for _ in dy.shape[1:]))
        correct: list[Tensor] | None = None
        for training in (True, False):
            leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
            y = run(specimen, convention, leaves, training=training, grad=True)
            if not same(y.detach(), results[evidence.x, evidence.weight]):
                raise NotRMSNorm(f"for {where} it computes something else where gradients are enabled", True)
            theirs = _gradients(convention, leaves, y, dy, where)
            correct = correct or _correct(convention, given, dy)
            for name, got, wanted in zip(given, theirs, correct, strict=True):
                _compare(name, got, wanted, where, precision)
        for wanting in given if precision == torch.float32 else ():
            leaves = {name: t.clone().requires_grad_(name == wanting) for name, t in given.items()}
            if not same(run(specimen, convention, leaves, grad=True).detach(), results[evidence.x, evidence.weight]):
                raise NotRMSNorm(f"it computes something else where {wanting} alone wants a gradient", True)


def _gradients(convention: Convention, leaves: Sample, y: Tensor, dy: Tensor, where: str) -> list[Tensor]:
    if not y.requires_grad:
        raise NotRMSNorm(f"for {where} its result has no gradient", True)
    # Summed here: given dy as a gradient, torch would first import a second of symbolic mathematics.
    try:
        found = torch.autograd.grad((y * dy.to(y.dtype)).sum(), list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        raise NotRMSNorm(f"for {where} its gradient fails: {str(error).partition(chr(10))[0]}", True) from None
    for name, got in zip(leaves, found, strict=True):
        if got is None:
            raise NotRMSNorm(f"for {where} {convention.weight if name == 'weight' else name} gets no gradient", True)
    return list(found)


def _correct(convention: Convention, given: Sample, dy: Tensor) -> list[Tensor]:
    wide = {name: t.double().requires_grad_() for name, t in given.items()}
    with torch.enable_grad():
        y = (exact(convention, wide) * dy.double()).sum()
    return list(torch.autograd.grad(y, list(wide.values())))


def _compare(name: str, got: Tensor, wanted: Tensor, where: str, precision: torch.dtype) -> None:
    # Rows differ in magnitude, and so do their gradients.
    got, wanted = (t.double().flatten(2) if name != "weight" else t.double().flatten() for t in (got, wanted))
    size = wanted.square().sum(-1)
    difference = float(((got - wanted).square().sum(-1) / size).sqrt().max())
    along = float((((got - wanted) * wanted).sum(-1) / size).abs().max())
    if not (difference <= _TOLERANCE[precision] and along <= _SCALE[precision]):
        raise NotRMSNorm(
            f"for {where} its gradient of {name} is not the formula's: it differs by {difference:.1g}", True
        )
