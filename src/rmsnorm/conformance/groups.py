"""With groups: each normalised by itself, of any size that divides the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from rmsnorm.conformance import gradients
from rmsnorm.conformance.context import CheckContext
from rmsnorm.conformance.form import DTYPES
from rmsnorm.conformance.implementation import Raised
from rmsnorm.conformance.outcome import FAIL, Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short

# Rows and the groups that they are divided into; the last is one group, which is the plain norm.
_SIZES = ((64, 16), (96, 48), (1024, 128), (120, 8), (64, 64))
# Neither this size nor so many groups as fit into the row divide it.
_NO_DIVISOR = 12
_WIDTH, _GROUP = 64, 16


def _with(context: CheckContext, group: int) -> CheckContext:
    """The same implementation with groups of that size, and what is right of it."""
    grouped = context.implementation.grouped
    assert grouped is not None  # noqa: S101 - who asks has looked
    implementation = replace(grouped(group), trains=context.implementation.trains)
    return CheckContext(implementation, replace(context.form, group=group), context.device)


def result(dtype: torch.dtype, context: CheckContext) -> Outcome:
    worst = 0.0
    for width, group in _SIZES:
        inner = _with(context, group)
        # Each group of another magnitude: a mean over more than it is far off.
        x = context.rows(24, width, torch.float32, seed=100).view(24, -1, group)
        x = (x * 4.0 ** (torch.arange(x.shape[1]) % 3 - 1).view(-1, 1)).view(24, width).to(dtype)
        error = inner.worst(x, context.weight(width, dtype))
        if not error <= 1:
            whole = context.worst(x, context.weight(width, dtype)) if width != group else 2.0
            y = inner.run(x, context.weight(width, dtype))
            same = whole <= 1 and bool((y == context.run(x, context.weight(width, dtype))).all())
            why = ": the size has no effect" if same else f" of {short(dtype)} are wrong"
            return failed(f"{error:.3g} of the limit", f"groups of {group} in rows of {width}{why}")
        worst = max(worst, error)
    return passed(f"{len(_SIZES)} sizes, {worst:.2f} of the limit of accuracy", max=worst)


def of_gradients(dtype: torch.dtype, context: CheckContext) -> Outcome:
    if not context.implementation.trains:
        return not_applicable("for inference only")
    inner = _with(context, _GROUP)
    inner = CheckContext(replace(inner.implementation, width=_WIDTH), inner.form, context.device)
    found = [measure(dtype, inner) for measure in (gradients.dx, gradients.dweight)]
    wrong = next((outcome for outcome in found if outcome.verdict == FAIL), None)
    return found[0] if wrong is None else replace(wrong, finding=f"in groups of {_GROUP} {wrong.finding}")


def not_numbers(context: CheckContext) -> Outcome:
    inner = _with(context, _GROUP)
    for dtype in context.dtypes:
        x = context.rows(6, _WIDTH, dtype, seed=101)
        x[2, 20] = torch.nan
        y = inner.form.grouped(inner.run(x, context.weight(_WIDTH, dtype)))
        if not bool(y[2, 1].isnan().all()):
            return failed(f"NaN swallowed in {short(dtype)}", "a NaN does not make its whole group NaN")
        y[2, 1] = 0
        if not bool(y.isfinite().all()):
            return failed("other groups suffer", "a NaN in one group shows in others")
    return passed("a NaN stays in its group")


def no_divisor(context: CheckContext) -> Outcome:
    """A group's size that does not divide the row has no meaning: an error, whatever it says."""
    inner = _with(context, _NO_DIVISOR)
    try:
        inner.run(context.rows(4, _WIDTH, context.dtypes[0], seed=102), context.weight(_WIDTH, context.dtypes[0]))
    except Raised as error:
        return passed(f"raises: {str(error)[:60]}")
    said = f"groups of {_NO_DIVISOR} in rows of {_WIDTH} are accepted, though they do not divide them"
    return failed("accepted", said)


def _asked(function: Callable[[CheckContext], Outcome], context: CheckContext) -> Outcome:
    if context.form.group:
        return not_applicable(f"its own: groups of {context.form.group}")
    return function(context)


def checks() -> Iterator[Check]:
    found: list[tuple[str, str, Callable[[CheckContext], Outcome]]] = [
        (f"groups-{short(dtype)}", "Each group is normalised by itself.", partial(result, dtype)) for dtype in DTYPES
    ]
    found += [
        (f"groups-gradients-{short(dtype)}", "Gradients of groups are the formula's.", partial(of_gradients, dtype))
        for dtype in DTYPES
    ]
    found += [
        ("groups-nan", "A NaN makes its group NaN, and no other.", not_numbers),
        ("groups-divide", "A size that does not divide the row raises.", no_divisor),
    ]
    for name, meaning, function in found:
        yield Check(name, meaning, partial(_asked, function), about="groups")
