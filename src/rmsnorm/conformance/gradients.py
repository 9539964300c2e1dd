"""Gradients against float64 autograd of the same form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from rmsnorm.conformance.context import CheckContext
from rmsnorm.conformance.implementation import BackwardRaised, NoGradient
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short

# dx = rstd * (u - x_hat * k): rounded to 16 bits after u, x_hat, the difference and the product at most. float32 has
# the roundings of u, rstd, x_hat, k, two products, the difference and the result, and those of k's sum.
DX_ROUNDINGS = {torch.float32: 16.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# Of a term of dweight: dy, x_hat, their product; and the result's own.
DWEIGHT_ROUNDINGS = 4.0
_ROWS = 2048
_Measure = Callable[[torch.dtype, CheckContext], Outcome]


def dx(dtype: torch.dtype, context: CheckContext) -> Outcome:
    worst = 0.0
    limit = DX_ROUNDINGS[dtype]
    for width in context.widths(64, 1024):
        x, weight, dy = _sample(context, 24, width, dtype)
        try:
            got = context.gradients(x, weight, dy)
        except (NoGradient, BackwardRaised) as error:
            return failed("missing", str(error))
        if got.dx.dtype != dtype:
            return failed(f"returns {short(got.dx.dtype)}", f"dx of {short(dtype)} comes in {short(got.dx.dtype)}")
        correct = context.exact_gradients(x, weight, dy).dx
        size = terms(context, x, weight, dy)
        worst = max(worst, float(((got.dx.double() - correct).abs() / size).nan_to_num(nan=torch.inf).max()))
        if worst / (torch.finfo(dtype).eps / 2) > limit and weight is not None:
            without = _without_projection(context, x, weight, dy)
            if float(((got.dx.double() - without).abs() / size).max()) < limit * torch.finfo(dtype).eps / 2:
                measured = f"{worst / (torch.finfo(dtype).eps / 2):.3g} roundings (limit {limit:g})"
                return failed(measured, "dx lacks its second term: it treats the root mean square as a constant")
    worst /= torch.finfo(dtype).eps / 2
    measured = f"{worst:.3g} roundings of its terms (limit {limit:g})"
    if worst <= limit:
        return passed(measured, max=worst, limit=limit)
    return failed(
        measured, f"dx in {short(dtype)} is not the formula's: {worst:.3g} roundings off", max=worst, limit=limit
    )


def dweight(dtype: torch.dtype, context: CheckContext) -> Outcome:
    """Many rows, and half the columns with terms of one sign: a sum that is kept in 16 bits stops growing."""
    if not context.form.weighted:
        return not_applicable("no weight")
    width = context.widths(64)[0]
    x, weight, dy = _sample(context, _ROWS, width, dtype)
    dy[:, ::2] = x[:, ::2].sign() * dy[:, ::2].abs()
    try:
        got = context.gradients(x, weight, dy).dweight
    except (NoGradient, BackwardRaised) as error:
        return failed("missing", str(error))
    if got is None:
        return failed("missing", "the weight gets no gradient")
    if got.dtype != dtype:
        return failed(f"returns {short(got.dtype)}", f"dweight of {short(dtype)} comes in {short(got.dtype)}")
    correct = context.exact_gradients(x, weight, dy).dweight
    assert correct is not None  # noqa: S101 - there is a weight
    x_hat = context.form.normalized(x, None, context.eps)
    size = (dy.double() * x_hat).abs().sum(0)
    worst = float(((got.double() - correct).abs() / size).nan_to_num(nan=torch.inf).max())
    rounding = torch.finfo(dtype).eps / 2
    limit = DWEIGHT_ROUNDINGS + sum_limit(_ROWS, rounding)
    measured = f"{worst / rounding:.3g} roundings of its terms (limit {limit:,.4g})"
    figures = {"max": worst / rounding, "limit": limit}
    if worst / rounding <= limit:
        return passed(measured, **figures)
    said = f"dweight of {_ROWS} rows of {short(dtype)} is off by {worst:.2g} of the sum of its terms' magnitudes"
    if dtype.itemsize == 2:
        said += ": it is summed in 16 bits, or its terms are not the formula's"
    return failed(measured, said, **figures)


def sum_limit(count: int, rounding: float) -> float:
    """What a sum in float32 may be off by, in roundings of its result: one of 2^-24 for each term, in any order."""
    return count * 2.0**-24 / rounding


def _sample(context: CheckContext, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows of several magnitudes, a weight, and a dy that leans on y, so that both terms of dx count."""
    x = context.rows(rows, width, torch.float32, seed=6)
    x = (x * torch.tensor([0.25, 1.0, 4.0]).repeat(rows // 3 + 1)[:rows, None]).to(dtype)
    weight = context.weight(width, dtype)
    dy = context.rows(rows, width, torch.float32, seed=7) + 0.5 * context.exact(x, weight).float()
    return x, weight, dy.to(dtype)


def terms(context: CheckContext, x: Tensor, weight: Tensor | None, dy: Tensor) -> Tensor:
    """The largest of each row's rstd |u| + rstd |x_hat k|: dx is their difference, and as exact as they are."""
    return _both(context, x, weight, dy).amax(-1, keepdim=True)


def _both(context: CheckContext, x: Tensor, weight: Tensor | None, dy: Tensor) -> Tensor:
    rstd = context.form.reciprocal(x, context.eps)
    gain = context.form.gain(weight)
    u = dy.double() if gain is None else dy.double() * gain
    x_hat = x.double() * rstd
    return rstd * (u.abs() + (x_hat * context.form.mean(u * x_hat)).abs())


def _without_projection(context: CheckContext, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    gain = context.form.gain(weight)
    assert gain is not None  # noqa: S101 - there is a weight
    return context.form.reciprocal(x, context.eps) * dy.double() * gain


def _if_trained(function: _Measure, dtype: torch.dtype, context: CheckContext) -> Outcome:
    return function(dtype, context) if context.implementation.trains else not_applicable("for inference only")


def checks() -> Iterator[Check]:
    for dtype in DX_ROUNDINGS:
        yield Check(f"dx-{short(dtype)}", "dx is the formula's.", partial(_if_trained, dx, dtype))
    for dtype in DX_ROUNDINGS:
        meaning = "dweight is the formula's, summed in float32."
        yield Check(f"dweight-{short(dtype)}", meaning, partial(_if_trained, dweight, dtype))
