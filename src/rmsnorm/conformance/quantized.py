"""Norms whose result is quantised: q and scale against the definition, by the conventions that they were seen to have.

    amax  = the largest |y| of a row, or of a block of it
    scale = amax / qmax
    q     = y / scale, rounded to the nearest of q's dtype, half to even, and never beyond qmax

A scale of E8M0 is a power of two: of the largest element, less q's largest exponent, or the next above amax / qmax.
y is the norm, exact or rounded to its dtype; which is not asked here. Rows of ones have a norm of exactly the weight,
whose quantisation is known to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rmsnorm.conformance.context import CheckContext, same_bits
from rmsnorm.conformance.form import DTYPES, EPS, Form
from rmsnorm.conformance.implementation import QUANTIZED, Crashed, Implementation, Raised
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short

_WIDTH, _ROWS = 128, 33
# Beside ones it is nothing, in float32 and in 16 bits.
_NO_EPS = 1e-12


@dataclass(frozen=True)
class Quantized:
    """A result: q, and its scales as (rows, blocks), which may be powers of two."""

    q: Tensor
    scale: Tensor
    powers: bool = False

    @property
    def block(self) -> int:
        return self.q.shape[-1] // self.scale.shape[-1]

    @property
    def qmax(self) -> float:
        return QUANTIZED[self.q.dtype]

    def spread(self) -> Tensor:
        """The scale of each element, in float64."""
        return self.scale.double().repeat_interleave(self.block, -1)

    def blocks(self, t: Tensor) -> Tensor:
        return t.reshape(*self.scale.shape, self.block)


def find(implementation: Implementation, device: torch.device) -> Form:
    """The form of an implementation whose result is quantised: what it adds to the weight, q's dtype, the blocks.

    Raises:
        Refused, Crashed: it does not run on ordinary rows.
    """
    first: Raised | None = None
    for dtype in DTYPES:
        context = CheckContext(implementation, Form(0.0, EPS, "inside", "once", implementation.has_weight), device)
        try:
            x, weight = context.rows(_ROWS, context.width, dtype, seed=110), context.weight(context.width, dtype)
            got = _run(context, x, weight)
        except Raised as error:
            first = first or error
            continue
        apart = {}
        for offset in (0.0, 1.0) if implementation.has_weight else (0.0,):
            form = Form(offset, EPS, "inside", "once", implementation.has_weight, None, _said(got))
            correct = CheckContext(implementation, form, device).exact(x, weight)
            apart[form] = float((got.q.double() * got.spread() - correct).abs().max())
        return min(apart, key=lambda form: apart[form])
    assert first is not None  # noqa: S101 - there are dtypes
    raise first


def _said(got: Quantized) -> str:
    where = "row" if got.scale.shape[-1] == 1 else f"block of {got.block}"
    return f"in {short(got.q.dtype)} with a {'power of two' if got.powers else 'scale'} for each {where}"


def _run(context: CheckContext, x: Tensor, weight: Tensor | None, eps: float | None = None) -> Quantized:
    with torch.no_grad():
        q, scale = context.norm(weight, x.shape[-1], eps).quantized(x.to(context.device, copy=True))
    if q.shape != x.shape or scale.numel() % len(x) or x.numel() % scale.numel():
        raise Crashed(f"for {len(x)} rows of {x.shape[-1]} it returned {q.numel()} numbers and {scale.numel()} scales")
    powers = scale.dtype.itemsize == 1
    return Quantized(q.cpu(), (scale.float() if powers else scale).cpu().reshape(len(x), -1), powers)


def scales(dtype: torch.dtype, context: CheckContext) -> Outcome:
    """Within what the norm itself may be off by, and a rounding of the scale. The last element is the largest."""
    worst = 0.0
    for width in context.widths(_WIDTH, 96, 1000):
        x, weight = context.rows(_ROWS, width, dtype, seed=111), context.weight(width, dtype)
        x[:, -1] = 30.0 * x[:, -1].abs().clamp_min(0.5)  # the last element is the largest
        try:
            got = _run(context, x, weight)
        except Raised:
            if width == _WIDTH:
                raise
            continue  # a width that its blocks do not divide
        correct = got.blocks(context.exact(x, weight)).abs().amax(-1) / got.qmax
        allowed = context.limit(dtype) * torch.finfo(dtype).eps + 2 * torch.finfo(got.scale.dtype).eps
        off = ((got.scale.double() - correct).abs() / correct).nan_to_num(nan=torch.inf)
        if got.powers:
            off = torch.where(_is_power(got, correct, allowed), 0.0, off)
        if float(off.max()) > allowed:
            tail = bool((off[:, -1] > allowed).all()) and got.scale.shape[-1] > 1
            said = (
                f"scales of rows of {width} in {short(dtype)} are up to {float(off.max()):.2%} off amax / {got.qmax:g}"
            )
            return failed(f"{float(off.max()):.2%} off", said + (": in their last block" if tail else ""))
        worst = max(worst, float(off.max()) / allowed)
    return passed(f"amax / {got.qmax:g}, {worst:.2f} of the limit", max=worst)


def _is_power(got: Quantized, correct: Tensor, allowed: float) -> Tensor:
    """Whether each scale is the power of two of the largest element, or the next above, within what that is off by."""
    right = torch.zeros_like(correct, dtype=torch.bool)
    for moved in (correct * (1 - allowed), correct, correct * (1 + allowed)):
        down = 2.0 ** ((moved * got.qmax).log2().floor() - torch.tensor(got.qmax).log2().floor())
        up = 2.0 ** moved.log2().ceil()
        right |= (got.scale == down) | (got.scale == up)
    return right


def values(dtype: torch.dtype, context: CheckContext) -> Outcome:
    """With its own scale, the nearest number of q's dtype; beyond that only as far as the norm itself may be off."""
    x, weight = context.rows(_ROWS, context.width, dtype, seed=112), context.weight(context.width, dtype)
    got = _run(context, x, weight)
    y = context.exact(x, weight)
    wanted = (y / got.spread()).clamp(-got.qmax, got.qmax)
    step = torch.ones_like(wanted) if got.q.dtype == torch.int8 else _step(wanted, got.q.dtype)
    # Half a step, the norm's own error, and a rounding of the quotient in float32.
    allowed = 0.5 * step + wanted.abs() * (context.limit(dtype) * torch.finfo(dtype).eps + 2.0**-22)
    share = float(((got.q.double() - wanted).abs() / allowed).nan_to_num(nan=torch.inf).max())
    measured = f"{share:.2f} of what rounding explains"
    if share <= 1:
        return passed(measured, max=share)
    said = f"q of {short(dtype)} rows is not the nearest of {short(got.q.dtype)} to y / scale"
    return failed(measured, said, max=share)


def _step(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What the numbers of a float8 dtype are apart at each value; of subnormal ones, the smallest."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(values, info.eps), exponent - 1)


def _known(context: CheckContext, dtype: torch.dtype, numbers: list[float], rows: int = 4) -> Quantized:
    """Rows of ones: their norm is the gain, which begins with these numbers and is the largest of them elsewhere."""
    width = context.width
    gain = torch.full((width,), max(numbers, key=abs))
    gain[: len(numbers)] = torch.tensor(numbers)
    weight = (gain - context.form.offset).to(dtype)
    return _run(context, torch.ones(rows, width, dtype=dtype), weight, _NO_EPS)


def ties(context: CheckContext) -> Outcome:
    if not context.form.weighted or not context.takes_eps:
        return not_applicable("no weight and eps that can be given")
    for dtype in _asked_in(context):
        qmax = _run(context, torch.ones(1, context.width, dtype=dtype), context.weight(context.width, dtype)).qmax
        if qmax == QUANTIZED[torch.int8]:
            given, right = [0.5, 1.5, 2.5, -0.5, -1.5, 63.5, 126.5], [0.0, 2.0, 2.0, 0.0, -2.0, 64.0, 126.0]
        else:  # between neighbours of e4m3 and of e5m2
            given, right = [18.0, 22.0, -18.0, 2.25, 2.75], [16.0, 24.0, -16.0, 2.0, 3.0]
            if qmax == QUANTIZED[torch.float8_e4m3fn]:
                given, right = [17.0, 19.0, -17.0, 2.125, 2.375], [16.0, 20.0, -16.0, 2.0, 2.5]
        got = _known(context, dtype, [*given, qmax])
        if not bool((got.scale == 1).all()):
            return failed("another scale", f"rows whose largest element is {qmax:g} have a scale of other than 1")
        found = got.q[0, : len(right)].double().tolist()
        if found != right:
            at = next(i for i, (a, b) in enumerate(zip(found, right, strict=True)) if a != b)
            told = f"{given[at]:g} steps become {found[at]:g}, and not {right[at]:g}: ties do not go to even"
            return failed(f"{given[at]:g} becomes {found[at]:g}", f"{told}, in {short(dtype)}")
    return passed("half to even")


def saturation(context: CheckContext) -> Outcome:
    """The largest element is qmax, whatever the quotient rounds to, and never what lies beyond it."""
    for dtype in _asked_in(context):
        x = context.rows(256, context.width, dtype, seed=113)
        got = _run(context, x, context.weight(context.width, dtype))
        largest = got.blocks(got.q.double()).abs().amax(-1)
        if bool(largest.isnan().any()) or bool(largest.isinf().any()):
            return failed("NaN", f"the largest element of some row becomes NaN or infinite, in {short(dtype)}")
        if float(largest.max()) > got.qmax:
            return failed(f"{float(largest.max()):g}", f"q goes to {float(largest.max()):g}, beyond {got.qmax:g}")
        least = 126 / 127 if got.q.dtype == torch.int8 else 0.5 - 2.0**-4 if got.powers else 1 - 2.0**-3
        if float(largest.min()) < got.qmax * least:
            return failed(f"{float(largest.min()):g}", f"the largest element of some row is {float(largest.min()):g}")
    return passed("to qmax")


def zeros(context: CheckContext) -> Outcome:
    for dtype in _asked_in(context):
        x = context.rows(4, context.width, dtype, seed=114)
        x[1:3] = 0
        got = _run(context, x, context.weight(context.width, dtype))
        if bool((got.q[1:3].double() != 0).any()):
            return failed("no zeros", f"a row of zeros does not become zeros, in {short(dtype)}")
        if not bool(got.scale[1:3].isfinite().all()):
            return failed("NaN scale", f"a row of zeros has a scale that is no number, in {short(dtype)}")
    return passed(f"zeros, with a scale of {float(got.scale[1, 0]):.3g}")


def not_numbers(context: CheckContext) -> Outcome:
    """int8 has no NaN: then the scale must have it, or what comes out looks like a row of numbers."""
    for dtype in _asked_in(context):
        x = context.rows(6, context.width, dtype, seed=115)
        x[2, 5] = torch.nan
        got = _run(context, x, context.weight(context.width, dtype))
        if bool((got.q[2].double() * got.spread()[2]).isfinite().all()):
            return failed(f"NaN swallowed in {short(dtype)}", "a NaN in a row shows neither in q nor in its scale")
        others = [0, 1, 3, 4, 5]
        if not bool((got.q[others].double() * got.spread()[others]).isfinite().all()):
            return failed("other rows suffer", "a NaN in one row shows in others")
    return passed("a NaN shows, in its row")


def rows_alone(context: CheckContext) -> Outcome:
    """A scale of the whole batch makes a row's numbers depend on its neighbours."""
    for dtype in _asked_in(context):
        x, weight = context.rows(_ROWS, context.width, dtype, seed=116), context.weight(context.width, dtype)
        x[3] *= 100  # which a norm undoes
        whole = _run(context, x, weight)
        alone = _run(context, x[7:8], weight)
        if not same_bits(whole.scale[7:8], alone.scale):
            return failed("scales differ", f"the scale of a row in {short(dtype)} depends on the batch around it")
        if bool((whole.q[7:8].double() != alone.q.double()).any()):
            return failed("q differs", f"q of a row in {short(dtype)} depends on the batch around it")
    return passed("a row alone and in a batch")


def _asked_in(context: CheckContext) -> Iterator[torch.dtype]:
    for dtype in DTYPES:
        try:
            _run(context, context.rows(2, context.width, dtype), context.weight(context.width, dtype))
        except Raised:
            continue
        yield dtype


def checks() -> Iterator[Check]:
    found: list[tuple[str, str, Callable[[CheckContext], Outcome]]] = [
        (f"quantized-scale-{short(dtype)}", "Scales are amax / qmax.", partial(scales, dtype)) for dtype in DTYPES
    ]
    found += [
        (f"quantized-values-{short(dtype)}", "q is the nearest to y / scale.", partial(values, dtype))
        for dtype in DTYPES
    ]
    found += [
        ("quantized-ties", "Ties go to even.", ties),
        ("quantized-saturation", "The largest is qmax, and nothing is beyond it.", saturation),
        ("quantized-zeros", "A row of zeros becomes zeros, with a scale that is a number.", zeros),
        ("quantized-nan", "A NaN shows in q or in the scale, in its row.", not_numbers),
        ("quantized-rows", "A row has its own scale, whatever stands beside it.", rows_alone),
    ]
    for name, meaning, function in found:
        yield Check(name, meaning, function, about="quantized")
