"""Whether the same row gets the same answer: run to run, compiled, and, for those who promise it, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rmsnorm.conformance.context import CheckContext, same_bits
from rmsnorm.conformance.implementation import Raised, described
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short


def repeatable(context: CheckContext) -> Outcome:
    width = context.widths(1000)[0]
    for dtype in context.dtypes:
        x, weight = context.rows(130, width, dtype, seed=20), context.weight(width, dtype)
        first = _everything(context, x, weight)
        for _ in range(2):
            for name, a, b in zip(("y", "dx", "dweight"), first, _everything(context, x, weight), strict=False):
                if not same_bits(a, b):
                    return failed(f"{name} differs", f"{name} of the same {short(dtype)} input differs from run to run")
    return passed("y, dx and dweight, three times" if context.implementation.trains else "y, three times")


def _everything(context: CheckContext, x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
    """y, and dx and dweight if it can be trained; a backward that raises is for the checks of gradients."""
    y = context.run(x, weight)
    if context.implementation.trains:
        try:
            got = context.gradients(x, weight, context.rows(len(x), x.shape[-1], x.dtype, seed=21))
        except Raised:
            return (y,)
        return y, got.dx, *(() if got.dweight is None else (got.dweight,))
    return (y,)


def compiled(context: CheckContext) -> Outcome:
    if context.implementation.compiled:
        return not_applicable("it is compiled")
    worst = 0.0
    try:
        found = context.compiled
    except Raised as error:
        return _not_compiled(context, error)
    for dtype, (x, eager, quick) in found.items():
        if quick.dtype != eager.dtype:
            said = f"compiled it returns {short(quick.dtype)}, not {short(eager.dtype)}"
            return failed(short(quick.dtype), said)
        weight = context.weight(x.shape[-1], dtype)
        apart = context.errors(quick, context.exact(x, weight), dtype, dtype if weight is not None else None)
        worst = max(worst, float(apart.max()) / context.limit(dtype))
    measured = f"{worst:.2f} of the limit of accuracy"
    if worst <= 1:
        return passed(measured, max=worst)
    return failed(measured, f"compiled by torch.compile its results are {worst:.2g} times as far off as they may be")


def _not_compiled(context: CheckContext, error: Raised) -> Outcome:
    """It does not compile; or nothing does, for want of a compiler."""
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(8, device=context.device))
    except Exception as reason:
        return not_applicable(f"torch.compile does not work here: {described(reason)}")
    return failed("raises", f"torch.compile: {error}")


def same_compiled(context: CheckContext) -> Outcome:
    if context.implementation.compiled:
        return not_applicable("it is compiled")
    try:
        found = context.compiled.values()
    except Raised as error:
        return _not_compiled(context, error)
    same = [eager.dtype == quick.dtype for _, eager, quick in found]
    shares = [float((eager != quick).double().mean()) for _, eager, quick in found] if all(same) else [1.0]
    if max(shares) == 0:
        return passed("the bits of eager code")
    return failed(f"{max(shares):.2g} of results differ", "compiled and eager results differ in their last bits")


def batches(context: CheckContext) -> Outcome:
    for width in context.widths(64, 1000):
        for dtype in context.dtypes:
            x, weight = context.rows(165, width, dtype, seed=22), context.weight(width, dtype)
            whole = _everything(context, x, weight)[:2]
            for rows in (slice(0, 1), slice(3, 5), slice(0, 33), slice(100, 165)):
                part = _rows_of(context, x, weight, rows)
                for name, a, b in zip(("y", "dx"), whole, part, strict=False):
                    if not same_bits(a[rows], b):
                        count = rows.stop - rows.start
                        measured = f"{name} differs: {count} rows, 165"
                        said = f"{name} of a {short(dtype)} row of {width} differs between batches of {count} and 165"
                        return failed(measured, said)
    return passed("a row has one answer in any batch")


def _rows_of(context: CheckContext, x: Tensor, weight: Tensor | None, rows: slice) -> tuple[Tensor, ...]:
    y = context.run(x[rows], weight)
    if not context.implementation.trains:
        return (y,)
    dy = context.rows(len(x), x.shape[-1], x.dtype, seed=21)[rows]
    try:
        return y, context.gradients(x[rows], weight, dy).dx
    except Raised:
        return (y,)


def threads(context: CheckContext) -> Outcome:
    if context.device.type != "cpu":
        return not_applicable("not on the CPU")
    before = torch.get_num_threads()
    width = context.widths(1024)[0]
    try:
        for dtype in context.dtypes:
            x, weight = context.rows(130, width, dtype, seed=23), context.weight(width, dtype)
            torch.set_num_threads(1)
            alone = _everything(context, x, weight)
            for number in (2, 3):
                torch.set_num_threads(number)
                together = _everything(context, x, weight)
                for name, a, b in zip(("y", "dx", "dweight"), alone, together, strict=False):
                    if not same_bits(a, b):
                        said = f"{name} in {short(dtype)} differs between 1 and {number} threads"
                        return failed(f"{name} differs: 1, {number} threads", said)
    finally:
        torch.set_num_threads(before)
    return passed("1, 2 and 3 threads")


def orders(context: CheckContext) -> Outcome:
    if context.form.group:
        return not_applicable(str(context.form))
    for width in context.widths(1000, 4096):
        for dtype in context.dtypes:
            x, weight = context.rows(32, width, dtype, seed=24), context.weight(width, dtype)
            order = torch.randperm(width, generator=torch.Generator().manual_seed(25))
            y = context.run(x, weight)
            other = context.run(x[:, order].contiguous(), None if weight is None else weight[order].contiguous())
            if not same_bits(y[:, order], other):
                rows = int((y[:, order] != other).any(-1).sum())
                said = f"the bits of a {short(dtype)} row of {width} depend on the order of its elements"
                return failed(f"{rows} of 32 rows differ", said)
    return passed("permuted rows, permuted results")


def checks() -> Iterator[Check]:
    yield Check("repeatable", "The same call gives the same bits, forward and backward.", repeatable)
    yield Check("compile", "Compiled by torch.compile it is as exact as it should be.", compiled)


def extras() -> Iterator[Check]:
    found: tuple[tuple[str, str, Callable[[CheckContext], Outcome]], ...] = (
        ("batch-invariance", "The bits of a row do not depend on the batch around it.", batches),
        ("thread-invariance", "Bits do not depend on the number of threads.", threads),
        ("compile-bits", "Compiled by torch.compile it has the bits of eager code.", same_compiled),
        ("order-invariance", "Permuting a row's elements permutes the bits of its result.", orders),
    )
    for name, meaning, function in found:
        yield Check(name, meaning, function, extra=True)
