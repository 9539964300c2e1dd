"""Which rounding a norm has, and the proof that this library's result is the same or nearer to exact arithmetic.

A result is accepted in a pair of dtypes if it has the module's dtype and is not further from exact arithmetic than the
module, or than the contract promises; and if the two lie within one unit in the last place, or the module is that far
off itself. Some round after every step in 16 bits; and where both round twice, a last bit of float32 may tip the first
rounding and so move the result by two units. Gradients in float32 are held to those of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rmsnorm.numerics import fixed_sum
from rmsnorm.patching.convention import Convention, Evidence, short
from rmsnorm.patching.probes import SMALLEST_EPS
from rmsnorm.patching.specimen import NotRMSNorm, Specimen
from rmsnorm.spec import ROUNDINGS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half units of the result's precision that a module may be off by and still be called an RMSNorm. Ten operations, each
# rounded: squares, mean, eps, square root, quotient, three products with gate and weight, two more in the activation.
THEIR_ROUNDINGS = 12.0
# docs/numerics.md: three roundings of float32 and the last one; where a rounding comes before the weight, one more.
# Gates add two products and the activation's own two.
OUR_ROUNDINGS, OUR_GATED_ROUNDINGS = 4.0, 8.0
# Errors of one rounding are 1/4 unit in the mean, of two they are 1/3: 4/3 times as many, or 1 if they round alike.
ONE_MORE_ROUNDING = 7 / 6
# The widest row that is also tried as the channels of an image, which takes its square of elements.
LARGEST_IMAGE = 1024
# Of float32, for gradients: sums over the row and the rows, whose terms partly cancel.
GRADIENT_TOLERANCE = 1e-4
# Of float32, in the mean over all elements: errors of products cancel, those of three operations in rstd partly.
SYSTEMATIC = 2.0
# Magnitudes of the rows. float32 alone shows eps at work: 16-bit squares of such rows would underflow in modules that
# take them.
_SCALES = (0.25, 1.0, 4.0)
_SCALES_BESIDE_EPS = (0.3, 1.0, 3.0)
_OUTLIER = 16.0


def prove(specimen: Specimen, form: Convention) -> Convention:
    """The form with its rounding and its evidence.

    Raises:
        NotRMSNorm: some result differs by more than it may, and where.
    """
    pairs = [(dtype, None if form.weight is None else dtype) for dtype in DTYPES]
    if form.weight is not None:
        pairs += [(x, weight) for x in DTYPES for weight in DTYPES if x != weight]
    samples = [_sample(specimen, form, x, weight) for x, weight in pairs]
    theirs: list[Tensor | NotRMSNorm] = []
    for sample, (x, weight) in zip(samples, pairs, strict=True):
        try:
            theirs.append(_run(specimen, form, sample))
        except NotRMSNorm as error:
            if weight in (None, x):
                raise
            theirs.append(error)
    best: tuple[float, Convention] | None = None
    failure: NotRMSNorm | None = None
    for rounding in ROUNDINGS if form.weight is not None else ROUNDINGS[:1]:
        candidate = replace(form, rounding=rounding)
        found = []
        for sample, result, (x, weight) in zip(samples, theirs, pairs, strict=True):
            judged = result if isinstance(result, NotRMSNorm) else _judge(candidate, sample, result)
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
    _check_training(specimen, best[1], samples[0])
    _check_special_rows(specimen, best[1], samples[0])
    _check_dimensions(specimen, best[1], samples[0])
    _check_gradients(specimen, best[1], samples[0])
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
    sample = _sample(specimen, convention, dtype, None if weight is None else dtype, scales=(1.0,), rows=1)
    if weight is not None:
        sample["weight"] = weight.detach().to(dtype)
    judged = _judge(convention, sample, _run(specimen, convention, sample))
    if isinstance(judged, NotRMSNorm):
        raise judged


def _sample(
    specimen: Specimen,
    form: Convention,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    scales: Sequence[float] = _SCALES,
    rows: int = 2,
) -> dict[str, Tensor]:
    """Fresh random rows of several magnitudes, with a gate and a weight."""
    shape = form.shape or (form.group_size or 64,)
    generator = torch.Generator().manual_seed(DTYPES.index(x_dtype) + 3 * len(shape))
    if x_dtype == torch.float32:
        # Below, a row of data would have to be all but zero, where forms that clamp the norm instead of adding eps
        # differ.
        low = max(form.eps or torch.finfo(torch.float32).eps, SMALLEST_EPS) ** 0.5
        scales = [*scales, *(factor * low for factor in _SCALES_BESIDE_EPS)]
    x = torch.randn(len(scales), rows, *shape, generator=generator)
    x.view(*x.shape[:2], -1)[0, 0, 1] *= _OUTLIER
    x *= torch.tensor(scales).view(-1, 1, *(1 for _ in shape))
    sample = {"x": x}
    if form.activation is not None:
        sample["gate"] = torch.randn(x.shape, generator=generator) * 3
    if weight_dtype is not None:
        # Both signs, and some that are nearly 1 or nearly no offset.
        weight = torch.randn(shape, generator=generator)
        weight.view(-1)[::3] = 1 - form.weight_offset + 0.02 * weight.view(-1)[::3]
        weight.view(-1)[1] = _OUTLIER
        sample["weight"] = weight
    dtypes = {"x": x_dtype, "gate": x_dtype, "weight": weight_dtype}
    return {name: t.to(specimen.device, dtypes[name]) for name, t in sample.items()}


def _run(
    specimen: Specimen, form: Convention, sample: dict[str, Tensor], training: bool = False, grad: bool = False
) -> Tensor:
    inputs = [sample["x"], sample["gate"]] if "gate" in sample else [sample["x"]]
    tensors = {}
    if form.weight is not None:
        tensors[form.weight] = sample["weight"].view(specimen.tensors[form.weight].shape)
    return specimen.run(*inputs, tensors=tensors, training=training, grad=grad)


def _judge(convention: Convention, sample: dict[str, Tensor], theirs: Tensor) -> Evidence | NotRMSNorm:
    x, weight, gate = sample["x"], sample.get("weight"), sample.get("gate")
    ours = convention.apply(x, weight, gate)
    where = short(x.dtype)
    if weight is not None and weight.dtype != x.dtype:
        where += f" with a weight in {short(weight.dtype)}"
    if ours.dtype != theirs.dtype:
        return NotRMSNorm(f"for {where} it returns {short(theirs.dtype)} where {short(ours.dtype)} was expected", True)
    if not theirs.isfinite().all():
        return NotRMSNorm(f"for {where} its result is not finite", True)
    correct = exact(convention, x, weight, gate)
    precision = _precision(convention, x, weight, ours.dtype)
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


def exact(convention: Convention, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """The formula in float64, without intermediate roundings."""
    shape = x.shape
    rows = 1 if convention.shape is None else len(convention.shape)
    u = x.double().flatten(-rows) if rows > 1 else x.double()
    act = None
    if gate is not None:
        z = gate.double().reshape(u.shape)
        act = torch.sigmoid(z) * (z if convention.activation == "silu" else 1.0)
    if act is not None and not convention.norm_before_gate:
        u = u * act
    eps = torch.finfo(torch.float32).eps if convention.eps is None else convention.eps
    group = convention.group_size or u.shape[-1]
    u = u.reshape(*u.shape[:-1], u.shape[-1] // group, group)
    y = (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = y * (weight.double().flatten() + convention.weight_offset)
    if act is not None and convention.norm_before_gate:
        y = y * act
    return y.view(shape)


def _precision(convention: Convention, x: Tensor, weight: Tensor | None, result: torch.dtype) -> torch.dtype:
    """The coarsest dtype that a value is rounded to on its way."""
    dtypes = [result]
    if convention.rounding == "before_scale":
        dtypes.append(x.dtype)
    elif convention.rounding == "weight_dtype" and weight is not None:
        dtypes.append(weight.dtype)
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


def _check_training(specimen: Specimen, convention: Convention, sample: dict[str, Tensor]) -> None:
    if not torch.equal(_run(specimen, convention, sample), _run(specimen, convention, sample, training=True)):
        raise NotRMSNorm("it computes something else in training", True)


def _check_special_rows(specimen: Specimen, convention: Convention, sample: dict[str, Tensor]) -> None:
    """Rows that are not finite stay as visible as they were, and rows of zeros are what they were."""
    sample = {**sample, "x": sample["x"].clone()}
    rows = sample["x"].view(*sample["x"].shape[:2], -1)
    rows[0, 0, 0], rows[0, 1, 0], rows[1, 0] = torch.inf, torch.nan, 0.0
    theirs = _run(specimen, convention, sample)
    ours = convention.apply(sample["x"], sample.get("weight"), sample.get("gate"))
    if not torch.equal(ours.isnan(), theirs.isnan()):
        raise NotRMSNorm("rows of zeros or with infinities or NaN come out otherwise", True)


def _check_dimensions(specimen: Specimen, convention: Convention, sample: dict[str, Tensor]) -> None:
    """Rows are rows however many dimensions hold them: some modules take those of four for images."""
    wanted = _run(specimen, convention, sample)
    row = wanted.shape[2:]
    many = wanted.shape[:2].numel()
    leads: list[tuple[int, ...]] = [(many,), (1, *wanted.shape[:2])]
    if len(row) == 1 and row[0] <= LARGEST_IMAGE:
        leads.append((1, row[0], 1))  # where a row's size is also that of the channels
    for lead in leads:
        index = torch.arange(math.prod(lead)) % many
        again = {name: t.flatten(0, 1)[index].view(*lead, *row) for name, t in sample.items() if name != "weight"}
        try:
            found = _run(specimen, convention, {**sample, **again})
        except NotRMSNorm:
            continue  # its own affair: its replacement is more lenient
        if not torch.allclose(found, wanted.flatten(0, 1)[index].view_as(found), rtol=1e-4):
            raise NotRMSNorm(f"it computes something else for inputs of {found.dim()} dimensions", True)


def _check_gradients(specimen: Specimen, convention: Convention, sample: dict[str, Tensor]) -> None:
    """The gradients are those of the formula: a module might detach what it divides by."""
    names = list(sample)
    leaves = {name: t.clone().requires_grad_() for name, t in sample.items()}
    theirs = _run(specimen, convention, leaves, grad=True)
    if not theirs.requires_grad:
        raise NotRMSNorm("its result has no gradient", True)
    dy = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(4)).to(theirs.device)
    # Summed here: given dy as a gradient, torch would first import a second of symbolic mathematics.
    try:
        found = torch.autograd.grad((theirs * dy).sum(), list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        raise NotRMSNorm(f"its gradient fails: {str(error).partition(chr(10))[0]}", True) from None
    wide = {name: t.double().requires_grad_() for name, t in sample.items()}
    with torch.enable_grad():
        y = (exact(convention, wide["x"], wide.get("weight"), wide.get("gate")) * dy.double()).sum()
    correct = torch.autograd.grad(y, list(wide.values()))
    for name, got, wanted in zip(names, found, correct, strict=True):
        if got is None:
            raise NotRMSNorm(f"{convention.weight if name == 'weight' else name} gets no gradient", True)
        # Rows differ in magnitude, and so do their gradients.
        rows = (got.double() - wanted).flatten(2) if name != "weight" else (got.double() - wanted).flatten()
        scale = wanted.flatten(2) if name != "weight" else wanted.flatten()
        difference = float((rows.abs().amax(-1) / scale.abs().amax(-1)).max())
        if not difference <= GRADIENT_TOLERANCE:
            raise NotRMSNorm(f"its gradient of {name} is not the formula's: it differs by {difference:.1g}", True)
