"""How near results are to exact arithmetic, and over which range of magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from rmsnorm.conformance import exact
from rmsnorm.conformance.context import CheckContext
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.conformance.rows import KINDS, hard_rows
from rmsnorm.patching.convention import short

_SIXTEEN = (torch.bfloat16, torch.float16)
_THREE = (torch.float32, *_SIXTEEN)
# Rows whose squares, summed, stay within float32: this many times this, squared, is below its largest number.
_RANGE_WIDTH = 64
_UP_TO = {torch.float32: 2.0**59, torch.bfloat16: 2.0**59, torch.float16: 2.0**15}
# An eps that float16 cannot hold: its smallest number is 6e-8.
_TINY_EPS = 1e-12


def accuracy(dtype: torch.dtype, context: CheckContext) -> Outcome:
    found = []
    worst, where = -1.0, ""
    for width in context.widths(64, 1024, 4096):
        x, weight = hard_rows(width, dtype), context.weight(width, dtype)
        y = context.run(x, weight)
        error = context.errors(y, context.exact(x, weight), dtype, None if weight is None else dtype)
        found.append(error.flatten())
        if not float(error.max()) <= worst:
            worst, where = float(error.max()), f"a row of {width}, {KINDS[int(error.amax(-1).argmax()) // 2]}"
    return _judged(context, torch.cat(found), dtype, where)


def accuracy_float64(context: CheckContext) -> Outcome:
    if context.form.place != "inside" or context.form.group:
        return not_applicable("measured for whole rows and eps inside the root alone")
    width = context.width
    x, weight = hard_rows(width, torch.float64)[::3], context.weight(width, torch.float64)
    y = context.run(x, weight)
    if y.dtype != torch.float64:
        return failed(f"returns {short(y.dtype)}", f"for float64 it returns {short(y.dtype)}")
    error = exact.float64_errors(y, x, context.form.gain(weight), context.eps, context.form.place)
    return _judged(context, error.flatten(), torch.float64, "")


def _judged(context: CheckContext, error: Tensor, dtype: torch.dtype, where: str) -> Outcome:
    largest, most, limit = float(error.max()), float(error.quantile(0.999)), context.limit(dtype)
    figures = {"max": largest, "p99.9": most, "limit": limit}
    measured = f"{_ulp(largest)} ulp, 99.9 %: {_ulp(most)} (limit {limit:g})"
    if largest <= limit:
        return passed(measured, **figures)
    if largest == torch.inf:
        return failed("not finite", f"{short(dtype)} results are not finite, where they should be", limit=limit)
    said = f"{short(dtype)} results are up to {_ulp(largest)} units in the last place off"
    if dtype == torch.float64 and largest > 1e4:
        said += ": it computes in float32"
    return failed(measured, f"{said} (at {where})" if where else said, **figures)


def _ulp(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e6 else f"{value:.2g}"


def row_factor(dtype: torch.dtype, context: CheckContext) -> Outcome:
    """A factor common to a whole row.

    A variance, or its root, rounded to 16 bits moves a slope by up to one rounding; stores that truncate move all
    slopes down by 0.7.
    """
    width = context.widths(4096)[0]
    x, weight = context.rows(32, width, dtype, seed=2), context.weight(width, dtype)
    slope, limit = slopes(context.run(x, weight).to(dtype), context.staged(x, weight), -1)
    largest = float(slope.abs().max())
    figures = {"max": largest, "mean": float(slope.mean()), "limit": limit}
    measured = f"{largest:.3f} roundings (limit {limit:.3f})"
    if largest <= limit:
        return passed(measured, **figures)
    if not bool(slope.isfinite().all()):
        return failed("not finite", f"{short(dtype)} results are not finite, where they should be", limit=limit)
    if bool((slope < 0).all()) and -1 < float(slope.mean()) < -0.4:
        said = f"every {short(dtype)} row is too small by {-slope.mean():.2f} roundings: stores truncate, towards zero"
    elif largest > 3:
        said = f"whole {short(dtype)} rows are off by up to {largest * torch.finfo(dtype).eps / 2:.2%}"
    else:
        said = f"each {short(dtype)} row is off by one factor: its variance, or the root of it, is rounded to 16 bits"
    return failed(measured, said, **figures)


def slopes(y: Tensor, correct: Tensor, dim: int) -> tuple[Tensor, float]:
    """The slopes of y against what is correct, along a dimension, less one; and how far they may be from that.

    In roundings u of y's dtype. Honest errors average out: each is at most u of its element, 0.42 u in the root mean
    square, and they leave a slope off by 0.42 u * sqrt(sum e^4) / sum e^2. Six times that is the limit.
    """
    square = correct.square()
    slope = ((y.double() * correct).sum(dim) / square.sum(dim) - 1) / (torch.finfo(y.dtype).eps / 2)
    return slope, float(6 * 0.42 * (square.square().sum(dim).sqrt() / square.sum(dim)).max())


def sweep(context: CheckContext, dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest magnitude of rows with right results, in one stretch from ordinary ones."""
    width = context.widths(_RANGE_WIDTH)[0]
    info = torch.finfo(dtype)
    lowest, highest = torch.tensor([info.smallest_normal * info.eps, info.max], dtype=torch.float64).frexp().exponent
    pattern = torch.empty(width, dtype=torch.float64).uniform_(1, 1.99, generator=torch.Generator().manual_seed(4))
    pattern[::3] *= -1
    pattern *= 1 - info.eps
    exponents = torch.arange(int(lowest) - 1, int(highest))
    x = torch.ldexp(pattern.expand(len(exponents), -1), exponents.view(-1, 1)).to(dtype)
    weight = context.weight(width, dtype)
    eps = _TINY_EPS if context.takes_eps else None
    error = context.errors(
        context.run(x, weight, eps), context.exact(x, weight, eps), dtype, None if weight is None else dtype
    )
    right = (error <= context.limit(dtype)).all(-1).tolist()
    low = high = int((exponents == 0).nonzero())
    if not right[low]:
        return 1.0, 1.0
    while low > 0 and right[low - 1]:
        low -= 1
    while high + 1 < len(right) and right[high + 1]:
        high += 1
    return 2.0 ** int(exponents[low]), float(x[high].abs().max())


def magnitudes(dtype: torch.dtype, context: CheckContext) -> Outcome:
    low, high = sweep(context, dtype)
    needed = torch.finfo(dtype).smallest_normal, _UP_TO[dtype]
    measured = f"right from {low:.2g} to {high:.2g}"
    figures = {"low": low, "high": high, "needed": needed}
    if low == high:
        return failed("wrong everywhere", f"{short(dtype)} rows of ordinary size are wrong", **figures)
    if high < needed[1]:
        said = f"{short(dtype)} rows above {high:.2g} are wrong: their squares overflow"
        return failed(measured, said, **figures)
    if low > needed[0]:
        why = "squares, or eps, are too small for what they are kept in"
        return failed(measured, f"{short(dtype)} rows below {low:.2g} are wrong: {why}", **figures)
    return passed(measured, **figures)


def whole_range(context: CheckContext) -> Outcome:
    found, wrong = [], []
    for dtype in _THREE:
        low, high = sweep(context, dtype)
        info = torch.finfo(dtype)
        if low > info.smallest_normal * info.eps or high < 0.9 * info.max:
            found.append(f"{short(dtype)} {low:.1g} to {high:.2g}")
            wrong.append(f"{short(dtype)} rows are right from {low:.2g} to {high:.2g} only")
    if wrong:
        return failed("; ".join(found), "; ".join(wrong))
    return passed("every finite row")


def checks() -> Iterator[Check]:
    for dtype in _THREE:
        yield _of(accuracy, dtype, "accuracy", "Results are within the limit of exact arithmetic, on hard rows too.")
    for dtype in _SIXTEEN:
        yield _of(row_factor, dtype, "row-factor", "Errors average out over a row: no factor common to all of it.")
    for dtype in _THREE:
        yield _of(magnitudes, dtype, "range", "Large and small rows are right, as far as float32 squares reach.")


def extras() -> Iterator[Check]:
    yield Check("accuracy-float64", "float64 is computed in float64.", accuracy_float64, extra=True)
    yield Check(
        "whole-range",
        "Every finite row is right, up to the largest number and down to subnormals.",
        whole_range,
        extra=True,
    )


def _of(function: Callable[[torch.dtype, CheckContext], Outcome], dtype: torch.dtype, name: str, meaning: str) -> Check:
    return Check(f"{name}-{short(dtype)}", meaning, partial(function, dtype))
