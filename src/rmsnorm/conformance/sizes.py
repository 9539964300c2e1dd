"""Sizes that no longer fit where sizes are often kept: 16 bits, a grid's dimension, one block of a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rmsnorm.conformance.context import CheckContext, Gradients, far_off
from rmsnorm.conformance.implementation import Raised
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short

# Beyond 65,535, which is the largest second dimension of a CUDA grid and the largest 16-bit number: so many times
# the same rows, for which what is right is computed once.
_ROWS, _TIMES = 90, 740
_WIDE = 131_165
_MOST = 1 << 24


def many_rows(context: CheckContext) -> Outcome:
    return _sized(context, _ROWS, _TIMES, context.width)


def wide_rows(context: CheckContext) -> Outcome:
    if context.implementation.width is not None:
        return not_applicable(f"it has width {context.implementation.width} only")
    return _sized(context, 3, 1, _WIDE)


def _sized(context: CheckContext, rows: int, times: int, width: int) -> Outcome:
    where = f"{rows * times:,} rows of {width:,}"
    if rows * times * width > _MOST:
        return not_applicable(f"{where} are more than is tried")
    for dtype in context.dtypes:
        x, weight = context.rows(rows, width, dtype, seed=30), context.weight(width, dtype)
        y = context.run(x.repeat(times, 1), weight).view(times, rows, width)
        correct = context.exact(x, weight)
        if far_off(y, correct):
            wrong = [far_off(*pair) for part in y for pair in zip(part, correct, strict=True)]
            told = f"of {where} in {short(dtype)}, {sum(wrong):,} are wrong, from the {wrong.index(True) + 1:,}th"
            return failed(f"{sum(wrong):,} rows wrong", told)
        if not context.untrained and (name := _wrong_gradient(context, x, weight, times)):
            return failed(f"{name} wrong", f"{name} of {where} in {short(dtype)} is wrong")
    return passed(f"{where}, forward and backward" if not context.untrained else where)


def _wrong_gradient(context: CheckContext, x: Tensor, weight: Tensor | None, times: int) -> str:
    """Which gradient is wrong; dweight in float32 alone: a sum in 16 bits is for the checks of gradients."""
    dy = context.rows(len(x), x.shape[-1], x.dtype, seed=32) + x  # its dweight does not cancel
    try:
        found: Gradients = context.gradients(x.repeat(times, 1), weight, dy.repeat(times, 1))
    except Raised:
        return ""  # the checks of gradients say so
    correct = context.exact_gradients(x, weight, dy)
    if far_off(found.dx.view(times, *x.shape), correct.dx):
        return "dx"
    if x.dtype == torch.float32 and found.dweight is not None and correct.dweight is not None:
        return "dweight" if far_off(found.dweight, correct.dweight * times) else ""
    return ""


def checks() -> Iterator[Check]:
    yield Check("many-rows", "Rows after the 65,535th are right, and their gradients.", many_rows)
    yield Check("wide-rows", "Rows of more than 65,536 elements are right, and their gradients.", wide_rows)
