"""With a residual: which sum is normalised and where it is rounded, the sum that comes back, gradients of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from rmsnorm.conformance import exact
from rmsnorm.conformance.context import CheckContext, far_off, same_bits
from rmsnorm.conformance.form import DTYPES
from rmsnorm.conformance.gradients import DWEIGHT_ROUNDINGS, DX_ROUNDINGS, sum_limit, terms
from rmsnorm.conformance.implementation import BackwardRaised, NoGradient, described
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short

_ROWS = 24
# The gradient of h is added to that of the norm: one rounding of that and one of the sum; and one of h, from which
# backward starts where an exact sum was normalised.
_ADDED = 3.0


def _sample(context: CheckContext, x: torch.dtype, residual: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """A branch and a residual of other magnitude: their sum has bits that 16-bit numbers do not hold."""
    wide = context.rows(_ROWS, width, torch.float32, seed=90, scale=4.0)
    return context.rows(_ROWS, width, x, seed=91), wide.to(residual)


def _run(context: CheckContext, x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad():
        norm = context.norm(weight, x.shape[-1])
        y, h = norm.with_residual(x.to(context.device, copy=True), residual.to(context.device, copy=True))
    return y.detach().cpu(), None if h is None else h.detach().cpu()


def result(dtype: torch.dtype, context: CheckContext) -> Outcome:
    """The norm of the sum: of x + residual rounded to their dtype, or of the sum before it is rounded."""
    found = []
    for width in context.widths(64, 1024):
        x, residual = _sample(context, dtype, dtype, width)
        weight = context.weight(width, dtype)
        y, _ = _run(context, x, residual, weight)
        errors = {
            sum_: float(context.errors(y, correct, dtype, dtype if weight is not None else None).max())
            for sum_, correct in _right(context, x, residual, weight).items()
        }
        nearest = min(errors, key=lambda name: errors[name])
        found.append((errors[nearest], nearest))
        # The sum's own rounding, where it is one of the results' precision.
        limit = context.limit(dtype) + (1.0 if dtype == torch.float32 else 0.0)
        if not errors[nearest] <= limit:
            return failed(
                f"{errors[nearest]:.3g} ulp (limit {limit:g})",
                _what_it_is(context, y, x, residual, weight),
                limit=limit,
            )
    worst, sum_ = max(found)
    return passed(f"norms the {sum_}, {worst:.2f} ulp (limit {limit:g})", max=worst, limit=limit, sum=sum_)


def _right(context: CheckContext, x: Tensor, residual: Tensor, weight: Tensor | None) -> dict[str, Tensor]:
    """The norms that it may be; in float32 one of them, because it has nothing wider."""
    s = x.double() + residual.double()
    h = s.to(residual.dtype)
    found = {"rounded sum": context.exact(h, weight)}
    if residual.dtype.itemsize == 2:
        found["exact sum"] = context.exact(s, weight)
        gain = context.form.gain(weight)
        mixed = h.double() * context.form.reciprocal(s, context.eps)
        found["rounded sum by the exact one's statistics"] = mixed if gain is None else mixed * gain
    return found


def _what_it_is(context: CheckContext, y: Tensor, x: Tensor, residual: Tensor, weight: Tensor | None) -> str:
    alone = context.exact(x, weight)
    others = {
        "the residual has no effect: it is the norm of x": alone,
        "the residual is added after the norm": alone + residual.double(),
        "it is the norm of the residual": context.exact(residual, weight),
        "it is the norm of their difference": context.exact(x.double() - residual.double(), weight),
    }
    said = next((said for said, other in others.items() if not far_off(y, other)), "")
    return said or f"with a residual in {short(x.dtype)} it is not the norm of x + residual, rounded once or exact"


def returned_sum(context: CheckContext) -> Outcome:
    """One IEEE addition and one rounding: there is nothing else that it may be."""
    width = context.width
    for dtype in context.all_dtypes:
        x, residual = _sample(context, dtype, dtype, width)
        _, h = _run(context, x, residual, context.weight(width, dtype))
        if h is None:
            return not_applicable("it returns no sum")
        correct = (x.double() + residual.double()).to(dtype)
        if h.dtype != dtype:
            return failed(f"{short(h.dtype)}", f"the sum of {short(dtype)} tensors comes back in {short(h.dtype)}")
        if not same_bits(h, correct):
            count = int((h != correct).sum())
            said = f"the sum that comes back is not x + residual rounded once, in {count} of {h.numel()} elements"
            return failed(f"{count / h.numel():.0%} differ in {short(dtype)}", f"{said} of {short(dtype)}")
    return passed("x + residual, rounded once")


def wide_residual(context: CheckContext) -> Outcome:
    """A residual stream in float32 beside 16-bit activations: it is there for its bits."""
    dtype = next((d for d in context.all_dtypes if d.itemsize == 2), None)
    if dtype is None:
        return not_applicable("it takes no 16-bit rows")
    width = context.width
    x, residual = _sample(context, dtype, torch.float32, width)
    weight = context.weight(width, dtype)
    y, h = _run(context, x, residual, weight)
    s = x.double() + residual.double()
    if h is not None and h.dtype != torch.float32:
        return failed(short(h.dtype), f"a float32 residual comes back in {short(h.dtype)}: the stream loses its bits")
    if h is not None and not same_bits(h, s.float()):
        return failed("rounded", "a float32 residual comes back with the bits of a 16-bit one, or none of a sum")
    # The norm of the stream, or of the stream rounded to x's dtype.
    error = min(float(exact.errors(y, context.exact(u, weight), dtype).max()) for u in (s, s.to(dtype)))
    limit = context.limit(dtype)
    if not error <= limit:
        return failed(f"{error:.3g} ulp (limit {limit:g})", "with a float32 residual it is not the norm of the sum")
    return passed(f"float32 beside {short(dtype)}" + ("" if h is None else ", and comes back as it is"))


def unchanged(context: CheckContext) -> Outcome:
    if context.implementation.in_place:
        return not_applicable("it writes over them, as it is called")
    width = context.width
    for dtype in context.dtypes:
        x, residual = (t.to(context.device) for t in _sample(context, dtype, dtype, width))
        before = x.cpu().clone(), residual.cpu().clone()
        with torch.no_grad():
            context.norm(context.weight(width, dtype), width).with_residual(x, residual)
        for name, t, kept in zip(("x", "the residual"), (x, residual), before, strict=True):
            if not same_bits(t.cpu(), kept):
                return failed(f"{name} changes", f"it overwrites {name} in {short(dtype)}")
    return passed("x and the residual")


def strides(context: CheckContext) -> Outcome:
    """A residual that is a slice or transposed, beside an x that is plain."""
    width = context.width
    for dtype in context.dtypes:
        x, residual = _sample(context, dtype, dtype, width)
        weight = context.weight(width, dtype)
        wide = torch.zeros(_ROWS, 3 * width, dtype=dtype)
        wide[:, width : 2 * width] = residual
        layouts = {
            "a slice of a row": wide.to(context.device)[:, width : 2 * width],
            "transposed": residual.t().contiguous().to(context.device).t(),
            "expanded": residual[:1].to(context.device).expand(_ROWS, width),
        }
        for name, other in layouts.items():
            with torch.no_grad():
                y, _ = context.norm(weight, width).with_residual(x.to(context.device, copy=True), other)
            if far_off(y.cpu(), context.exact(x.double() + other.cpu().double(), weight)):
                said = f"wrong for a residual that is {name}"
                return failed(said, f"{said}: its strides are ignored")
    return passed("three layouts of the residual")


def gradients(dtype: torch.dtype, context: CheckContext) -> Outcome:
    """Through y and through the sum: x and the residual get the same gradient, that of the sum."""
    if not context.implementation.trains:
        return not_applicable("for inference only")
    width = context.widths(64)[0]
    x, residual = _sample(context, dtype, dtype, width)
    weight = context.weight(width, dtype)
    s = (x.double() + residual.double()).to(dtype)
    dy = (context.rows(_ROWS, width, torch.float32, seed=92) + 0.5 * context.exact(s, weight).float()).to(dtype)
    dh = context.rows(_ROWS, width, dtype, seed=93)
    norm = context.norm(weight, width)
    leaves = [t.to(context.device, copy=True).requires_grad_() for t in (x, residual)]
    y, h = norm.with_residual(*leaves)
    outputs = [(y, dy)] + ([(h, dh)] if h is not None else [])
    if h is not None and not h.requires_grad:
        return failed("missing", "the sum that comes back has no gradient: the residual stream stops learning")
    try:
        torch.autograd.backward([t for t, _ in outputs], [g.to(t.device, t.dtype, copy=True) for t, g in outputs])
    except Exception as error:  # a stranger's backward may raise anything
        raise BackwardRaised(f"backward raises {described(error)}") from error
    norms = context.exact_gradients(s, weight, dy)
    through = norms.dx + (dh.double() if h is not None else 0.0)
    size = terms(context, s, weight, dy) + (dh.double().abs() if h is not None else 0.0)
    rounding = torch.finfo(dtype).eps / 2
    limit, worst = DX_ROUNDINGS[dtype] + _ADDED, 0.0
    for name, leaf in zip(("x", "the residual"), leaves, strict=True):
        if leaf.grad is None:
            raise NoGradient(f"{name} gets no gradient")
        off = float(((leaf.grad.cpu().double() - through).abs() / size).nan_to_num(nan=torch.inf).max()) / rounding
        if not off <= limit:
            lacks = h is not None and not far_off(leaf.grad.cpu(), norms.dx)
            why = "lacks what comes through the sum" if lacks else f"is {off:.3g} roundings off"
            return failed(f"{off:.3g} roundings (limit {limit:g})", f"the gradient of {name} {why}, in {short(dtype)}")
        worst = max(worst, off)
    if weight is not None and norms.dweight is not None:
        if norm.weight is None or norm.weight.grad is None:
            return failed("missing", "with a residual the weight gets no gradient")
        parts = (dy.double() * context.form.normalized(s, None, context.eps)).abs().sum(0)
        off = float(((norm.weight.grad.cpu().double().flatten() - norms.dweight).abs() / parts).max()) / rounding
        most = DWEIGHT_ROUNDINGS + 1.0 + sum_limit(_ROWS, rounding)
        if not off <= most:
            return failed(
                f"{off:.3g} roundings (limit {most:.3g})", f"dweight with a residual is {off:.3g} roundings off"
            )
    return passed(f"{worst:.3g} roundings of their terms (limit {limit:g})", max=worst, limit=limit)


def _asked(function: Callable[[CheckContext], Outcome], context: CheckContext) -> Outcome:
    try:
        return function(context)
    except (NoGradient, BackwardRaised) as error:
        return failed("missing", str(error))


def checks() -> Iterator[Check]:
    found: list[tuple[str, str, Callable[[CheckContext], Outcome]]] = [
        (f"residual-{short(dtype)}", "It is the norm of x + residual.", partial(result, dtype)) for dtype in DTYPES
    ]
    found += [
        ("residual-sum", "The sum that comes back is x + residual, rounded once.", returned_sum),
        ("residual-dtype", "A float32 residual beside 16-bit rows keeps its dtype and its bits.", wide_residual),
        ("residual-strides", "Residuals that are slices, transposed or expanded are right.", strides),
        ("residual-unchanged", "x and the residual are as before.", unchanged),
    ]
    found += [
        (
            f"residual-gradients-{short(dtype)}",
            "x and the residual get the gradient of the sum, also what comes through it.",
            partial(gradients, dtype),
        )
        for dtype in DTYPES
    ]
    for name, meaning, function in found:
        yield Check(name, meaning, partial(_asked, function), about="residual")
