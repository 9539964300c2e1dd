"""Shapes, strides and memory: what comes in, and what must stay as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rmsnorm.conformance.context import CheckContext, same_bits
from rmsnorm.conformance.implementation import BackwardRaised, NoGradient, Raised, Refused
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed, refused
from rmsnorm.patching.convention import short

_WIDTHS = (1, 2, 3, 5, 7, 8, 15, 17, 31, 33, 63, 65, 100, 127, 129, 255, 257, 513, 768, 1000, 1023, 1025, 2049, 4093)
# In limits of accuracy, which is judged elsewhere: what a shape or a stride spoils is far beyond.
_GROSS = 2.0
_ROWS = (1, 2, 3, 5, 8, 33, 130, 1025)


def widths(context: CheckContext) -> Outcome:
    if context.implementation.width is not None:
        return not_applicable(f"it has width {context.implementation.width} only")
    wrong, untaken, why = [], [], ""
    for width in _WIDTHS:
        for dtype in context.dtypes:
            x, weight = context.rows(5, width, dtype, seed=width), context.weight(width, dtype)
            try:
                if not context.worst(x, weight) <= _GROSS:
                    wrong.append(width)
                    why = why or _other_mean(context, x, weight)
            except Refused as error:
                untaken.append((width, str(error)))
    if wrong:
        said = f"wrong for rows of {_list(wrong)}"
        return failed(said, f"{said}{why}")
    if untaken:
        return refused(f"refuses rows of {_list([width for width, _ in untaken])}")
    return passed(f"{len(_WIDTHS)} widths from {_WIDTHS[0]} to {_WIDTHS[-1]}")


def _other_mean(context: CheckContext, x: Tensor, weight: Tensor | None) -> str:
    """Whether the rows are as if the mean were taken over another number of elements."""
    y, correct = context.run(x, weight), context.exact(x, weight)
    ratio = (y.double() * correct).sum(-1) / correct.square().sum(-1)
    counts = (ratio.square() * x.shape[-1]).tolist()
    count = round(counts[0])
    if count != x.shape[-1] and all(abs(c - count) < 0.1 for c in counts):
        return f": at {x.shape[-1]} as if the mean were taken over {count} elements"
    return ""


def _list(numbers: list[int]) -> str:
    known = list(dict.fromkeys(numbers))
    return ", ".join(map(str, known[:6])) + (f" and {len(known) - 6} more" if len(known) > 6 else "")


def shapes(context: CheckContext) -> Outcome:
    width = context.width
    wrong, untaken = [], []
    for shape in ((width,), (1, width), (2, 3, width), (2, 1, 3, width), *((n, width) for n in _ROWS)):
        for dtype in context.dtypes:
            x = context.rows(max(1, torch.Size(shape[:-1]).numel()), width, dtype, seed=8).view(shape)
            try:
                if not context.worst(x, context.weight(width, dtype)) <= _GROSS:
                    wrong.append("x".join(map(str, shape)))
            except Refused:
                untaken.append("x".join(map(str, shape)))
    if wrong:
        said = f"wrong for {', '.join(dict.fromkeys(wrong))}"
        return failed(said, said)
    if untaken:
        return refused(f"refuses {', '.join(dict.fromkeys(untaken))}")
    return passed("one to four dimensions, 1 to 1025 rows")


def empty(context: CheckContext) -> Outcome:
    width = context.width
    for shape in ((0, width), (2, 0, width)):
        x, weight = torch.zeros(shape, dtype=context.dtypes[0]), context.weight(width, context.dtypes[0])
        try:
            y = context.run(x, weight)
            if context.implementation.trains:
                dweight = context.gradients(x, weight, y).dweight
                if dweight is not None and bool((dweight != 0).any()):
                    return failed("dweight is not 0", "the dweight of no rows is not zero: memory that nobody wrote")
        except NoGradient:
            pass  # the checks of gradients say so
        except Raised as error:
            return failed("raises", f"an input of no rows raises {error}")
    return passed("forward and backward" if context.implementation.trains else "forward")


def _strided(width: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    base = torch.randn(6, 4 * width, generator=torch.Generator().manual_seed(9)).to(dtype)
    yield "transposed", base[:, :width].t().contiguous().t()
    yield "a slice of a row", base[:, width : 2 * width]
    yield "every second element", base[:, : 2 * width : 2]
    yield "expanded", base[:1, :width].expand(5, width)
    yield "heads first", base.view(2, 3, 4, width).transpose(1, 2)
    yield "every second row", base[::2, :width]


def strides(context: CheckContext) -> Outcome:
    width = context.width
    wrong, untaken = [], []
    for dtype in context.dtypes:
        weight = context.weight(width, dtype)
        for name, x in _strided(width, dtype):
            try:
                error = _error(context, x, weight)
            except Refused:
                untaken.append(name)
                continue
            if not error <= _GROSS:
                wrong.append(name)
    if context.implementation.trains and not wrong:
        with contextlib.suppress(NoGradient, BackwardRaised):  # the checks of gradients say so
            wrong += _strided_gradients(context)
    if wrong:
        said = f"wrong for inputs that are {', '.join(dict.fromkeys(wrong))}"
        return failed(said, f"{said}: strides are ignored")
    if untaken:
        return refused(f"refuses {', '.join(dict.fromkeys(untaken))}")
    return passed("six layouts of x, two of dy" if context.implementation.trains else "six layouts of x")


def _error(context: CheckContext, x: Tensor, weight: Tensor | None) -> float:
    """As `CheckContext.worst`, for x as it lies in memory."""
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=context.device)
    there = there.copy_(x) if 0 not in x.stride() else x[:1].to(context.device).expand(x.shape)
    with torch.no_grad():
        y = context.norm(weight, x.shape[-1])(there).cpu()
    error = context.errors(y, context.exact(x, weight), x.dtype, None if weight is None else weight.dtype)
    return float(error.max()) / context.limit(x.dtype)


def _strided_gradients(context: CheckContext) -> list[str]:
    """Gradients for a dy of other strides are those of the same dy laid out plainly, but for the order of sums."""
    width = context.width
    dtype = context.dtypes[0]
    x, weight, base = (
        context.rows(6, width, dtype, seed=10),
        context.weight(width, dtype),
        context.rows(6, width, dtype, seed=11),
    )
    near = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    wrong = []
    for name, dy in (("expanded (dy)", base[:1, :1].expand(6, width)), ("transposed (dy)", base.t().contiguous().t())):
        plain = context.gradients(x, weight, dy.contiguous()).dx
        try:
            got = context.gradients(x, weight, dy).dx
        except BackwardRaised:
            wrong.append(f"{name}, where backward raises")
            continue
        if not bool(((got - plain).abs() <= near * plain.abs().max()).all()):
            wrong.append(name)
    return wrong


def surroundings(context: CheckContext) -> Outcome:
    """NaN before and after x and the weight in memory: they must stay, and must not show."""
    width = context.widths(100)[0]
    try:
        context.run(context.rows(7, width, context.dtypes[0]), context.weight(width, context.dtypes[0]))
    except Raised:
        width = context.width  # one that leaves nothing over, then
    for dtype in context.dtypes:
        x, weight = context.rows(7, width, dtype, seed=12), context.weight(width, dtype)
        memory = torch.full((x.numel() + 130,), torch.nan, dtype=dtype, device=context.device)
        memory[65:-65] = x.flatten().to(context.device)
        inside = memory[65:-65].view(x.shape)
        with torch.no_grad():
            y = context.norm(weight, width)(inside).cpu()
        if not bool(memory[:65].isnan().all() and memory[-65:].isnan().all()):
            return failed("writes outside", "it writes to memory before or after its input")
        # Another alignment may mean another order of the sum, and nothing else.
        apart = context.errors(y, context.run(x, weight).double(), dtype, weight.dtype if weight is not None else None)
        if float(apart.max()) > context.limit(dtype):
            return failed("reads outside", "what lies before or after its input in memory shows in the result")
    return passed("neither read nor written outside x")


def unchanged(context: CheckContext) -> Outcome:
    width = context.width
    for dtype in context.dtypes:
        x, weight = context.rows(9, width, dtype, seed=13), context.weight(width, dtype)
        there = x.to(context.device, copy=True)
        norm = context.norm(weight, width)
        with torch.no_grad():
            norm(there)
        if not same_bits(there.cpu(), x):
            return failed(f"x changes in {short(dtype)}", f"it overwrites its input in {short(dtype)}")
        if (
            weight is not None
            and norm.weight is not None
            and not same_bits(norm.weight.detach().cpu().flatten(), weight)
        ):
            return failed("the weight changes", f"it overwrites its weight in {short(dtype)}")
        if context.implementation.trains and (said := _unchanged_by_backward(context, x, weight)):
            return failed(f"{said} changes in {short(dtype)}", f"its backward overwrites {said} in {short(dtype)}")
    return passed("x, weight and dy" if context.implementation.trains else "x and weight")


def _unchanged_by_backward(context: CheckContext, x: Tensor, weight: Tensor | None) -> str:
    norm = context.norm(weight, x.shape[-1])
    leaf = x.to(context.device, copy=True).requires_grad_()
    between = leaf.clone()  # may be overwritten without an error, as an activation may
    try:
        y = norm(between)
        dy = torch.ones_like(y).mul_(0.5)
        y.backward(dy)
    except (Raised, RuntimeError):
        return ""  # the checks of gradients say so
    if not same_bits(between.detach().cpu(), x):
        return "x"
    return "" if bool((dy == 0.5).all()) else "dy"


def checks() -> Iterator[Check]:
    found: tuple[tuple[str, str, Callable[[CheckContext], Outcome]], ...] = (
        ("widths", "Any width is right, odd ones, primes and one element among them.", widths),
        ("shapes", "Any number of dimensions and of rows is right.", shapes),
        ("empty", "An input of no rows gives a result of no rows, and a dweight of zeros.", empty),
        ("strides", "Inputs that are slices, transposed or expanded are right.", strides),
        ("surroundings", "Nothing is read or written before or after the input.", surroundings),
        ("inputs-unchanged", "x, weight and dy are as before after forward and backward.", unchanged),
    )
    for name, meaning, function in found:
        yield Check(name, meaning, function)
