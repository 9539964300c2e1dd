"""Which rounding a norm has, and the proof that this library's result is the same or nearer to exact arithmetic.

A result is accepted in a pair of dtypes if it has the module's dtype and is not further from exact arithmetic than the
module, or than the contract promises; and if the two lie within one unit in the last place, or the module is that far
off itself. Some round after every step in 16 bits; and where both round twice, a last bit of float32 may tip the first
rounding and so move the result by two units. What else has to hold, trials.py, magnitudes.py and gradients.py try.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from rmsnorm.patching import gradients, magnitudes, trials
from rmsnorm.patching.convention import Convention, Evidence
from rmsnorm.patching.judging import judge
from rmsnorm.patching.samples import DTYPES, Pair, Sample, run, sample
from rmsnorm.patching.specimen import NotRMSNorm, Specimen
from rmsnorm.spec import ROUNDINGS


def prove(specimen: Specimen, form: Convention) -> Convention:
    """The form with its rounding and its evidence.

    Raises:
        NotRMSNorm: some result differs by more than it may, and where.
    """
    pairs: list[Pair] = [(dtype, None if form.weight is None else dtype) for dtype in DTYPES]
    if form.weight is not None:
        pairs += [(x, weight) for x in DTYPES for weight in DTYPES if x != weight]
    samples = {pair: sample(specimen, form, *pair) for pair in pairs}
    theirs = {pair: _own_result(specimen, form, given) for pair, given in samples.items()}
    proved = _with_rounding(form, samples, theirs)
    results = {pair: result for pair, result in theirs.items() if isinstance(result, Tensor)}
    trials.check_training(specimen, proved, samples, results)
    magnitudes.check(specimen, proved)
    trials.check_special_rows(specimen, proved, samples)
    gradients.check(specimen, proved, samples, results)
    first = samples[pairs[0]]
    proved = replace(proved, square=trials.check_dimensions(specimen, proved, first))
    return replace(proved, autocast=trials.under_autocast(specimen, proved, samples, results))


def _own_result(specimen: Specimen, form: Convention, given: Sample) -> Tensor | NotRMSNorm:
    try:
        return run(specimen, form, given)
    except NotRMSNorm as reason:
        # Whether dtypes mix is its own affair: a pair that fails is not replaced.
        if "weight" not in given or given["weight"].dtype == given["x"].dtype:
            raise
        return reason


def _with_rounding(
    form: Convention,
    samples: dict[Pair, Sample],
    theirs: dict[Pair, Tensor | NotRMSNorm],
) -> Convention:
    """The form with the rounding that reproduces most."""
    best: tuple[float, Convention] | None = None
    failure: NotRMSNorm | None = None
    for rounding in ROUNDINGS if form.weight is not None else ROUNDINGS[:1]:
        candidate = replace(form, rounding=rounding)
        found = []
        for (x, weight), given in samples.items():
            result = theirs[x, weight]
            judged = result if isinstance(result, NotRMSNorm) else judge(candidate, given, result)
            if isinstance(judged, Evidence):
                found.append(judged)
            elif weight in (None, x):
                failure = failure or judged
                break
        else:
            score = len(found) + sum(e.equal for e in found) / (len(found) + 1)
            if best is None or score > best[0]:
                best = score, replace(candidate, evidence=tuple(found))
    if best is None:
        raise NotRMSNorm(f"an RMSNorm ({form}) whose results are not reproduced: {failure}", True)
    return best[1]


def confirm(specimen: Specimen, convention: Convention) -> None:
    """One quick look whether the convention holds for the module's own tensors, in their own dtype.

    Weights that are not there have nothing to show: on the meta device, not finite yet, or spread over processes.

    Raises:
        NotRMSNorm: it does not.
    """
    weight = None if convention.weight is None else specimen.tensors[convention.weight]
    if weight is not None and (
        type(weight) not in (Tensor, nn.Parameter) or weight.is_meta or not weight.isfinite().all()
    ):
        return
    dtype = torch.float32 if weight is None or weight.dtype not in DTYPES else weight.dtype
    given = sample(specimen, convention, dtype, None if weight is None else dtype, scales=(1.0,), rows=1)
    if weight is not None:
        given["weight"] = weight.detach().to(dtype)
    judged = judge(convention, given, run(specimen, convention, given))
    if isinstance(judged, NotRMSNorm):
        raise judged
