"""What one call must not leave for the next: weights, sizes, dtypes, statistics; nor for one at the same time."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from rmsnorm.conformance.context import CheckContext, far_off, wrong_gradient
from rmsnorm.conformance.implementation import NoGradient, Norm, Raised
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short

_THREADS, _ROUNDS = 4, 20


def weights(context: CheckContext) -> Outcome:
    """The weight of a call is what it is then: an optimizer, a checkpoint or another layer has changed it since."""
    width = context.width
    if not context.form.weighted:
        return not_applicable("no weight")
    for dtype in context.dtypes:
        x = context.rows(6, width, dtype, seed=60)
        for trained in (False, True) if not context.untrained else (False,):
            norm = context.norm(context.weight(width, dtype), width)
            for how, change in _CHANGES.items():
                new = context.weight(width, dtype, seed=61 + list(_CHANGES).index(how))
                assert norm.weight is not None and new is not None  # noqa: S101, PT018 - there is a weight
                norm.weight.requires_grad_(trained)
                _everything_wrong(context, norm, x, None, trained)  # whatever there is to keep is kept now
                norm = change(context, norm, new.to(context.device))
                if what := _everything_wrong(context, norm, x, new, trained):
                    said = f"{what} in {short(dtype)} is that of an earlier weight, after the weight {how}"
                    return failed(f"{what} is stale", said)
    return passed("each call sees the weight as it is")


def _in_place(context: CheckContext, norm: Norm, new: Tensor) -> Norm:
    with torch.no_grad():
        _leaf(norm).copy_(new.view_as(_leaf(norm)))
    return norm


def _through_data(context: CheckContext, norm: Norm, new: Tensor) -> Norm:
    _leaf(norm).data.copy_(new.view_as(_leaf(norm)))
    return norm


def _other_memory(context: CheckContext, norm: Norm, new: Tensor) -> Norm:
    _leaf(norm).data = new.clone().view_as(_leaf(norm))
    return norm


def _same_address(context: CheckContext, norm: Norm, new: Tensor) -> Norm:
    """Another norm, whose weight lies where that of the first one lay."""
    other = context.norm(new, new.numel())
    memory = _leaf(norm).data
    memory.copy_(new.view_as(memory))
    _leaf(other).data = memory.view_as(_leaf(other))
    return other


def _another_norm(context: CheckContext, norm: Norm, new: Tensor) -> Norm:
    return context.norm(new, new.numel())


def _copied(context: CheckContext, norm: Norm, new: Tensor) -> Norm:
    """A deep copy of a module with a weight of its own; of what is no module, another one."""
    if not isinstance(norm.call, nn.Module):
        return _another_norm(context, norm, new)
    module = copy.deepcopy(norm.call)
    own = next(t for t in (*module.parameters(), *module.buffers()) if t.numel() == new.numel())
    with torch.no_grad():
        own.copy_(new.view_as(own))
    return Norm(module, own)


def _leaf(norm: Norm) -> Tensor:
    assert norm.weight is not None  # noqa: S101 - there is a weight
    return norm.weight


_CHANGES: dict[str, Callable[[CheckContext, Norm, Tensor], Norm]] = {
    "was changed in place": _in_place,
    "was changed through .data": _through_data,
    "was given other memory": _other_memory,
    "gave its address to another one": _same_address,
    "of another norm was used": _another_norm,
    "was copied with its module and changed": _copied,
}


def _everything_wrong(context: CheckContext, norm: Norm, x: Tensor, weight: Tensor | None, trained: bool) -> str:
    """What is not as it should be of a call with this weight: y, dx or dweight; None: whatever it is."""
    with torch.no_grad():
        y = norm(x.to(context.device, copy=True))
    dy = context.rows(len(x), x.shape[-1], x.dtype, seed=68) + x
    got = None
    if trained:
        with contextlib.suppress(Raised):  # the checks of gradients say so
            got = context.gradients_of(norm, x, dy)
    if weight is None:
        return ""
    if far_off(y, context.exact(x, weight)):
        return "y"
    return "" if got is None else wrong_gradient(got, context.exact_gradients(x, weight, dy))


def sequence(context: CheckContext) -> Outcome:
    """Two norms called in turn, with other sizes, dtypes, magnitudes and gradients every time."""
    eps = (1e-5, 1e-2) if context.takes_eps else (None, None)
    widths = context.widths(64, 256)
    for dtype in (*context.dtypes, *context.dtypes[:1]):
        pairs, ordinary = [], context.run(context.rows(2, widths[0], dtype), context.weight(widths[0], dtype)).dtype
        for index in (0, 1):
            for width in widths:
                weight = context.weight(width, dtype, seed=70 + index)
                pairs.append((context.norm(weight, width, eps[index]), weight, width, eps[index]))
        # Rows of 64 and of 256 with equal numbers of elements, few rows before many and after them.
        for step, count in enumerate((4, 1, 300, 2, 8)):
            for norm, weight, width, used in pairs:
                rows = count * (max(widths) // width)
                where = f"{rows} rows of {width} in {short(dtype)} after other calls"
                x = context.rows(rows, width, dtype, seed=72 + step, scale=2.0 ** (3 * (step % 3) - 5))
                said = _step_wrong(context, norm, x, weight, used, ordinary, trained=step % 2 == 1)
                if said:
                    return failed(f"{said} depends on earlier calls", f"{said} is wrong for {where}")
    if said := _same_memory(context):
        return failed("stale statistics", said)
    return passed("sizes, dtypes and gradients in turn, two norms at a time")


def _step_wrong(
    context: CheckContext,
    norm: Norm,
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    ordinary: torch.dtype,
    trained: bool,
) -> str:
    """What is not as it should be of one call."""
    if not trained or context.untrained:
        with torch.no_grad():
            y = norm(x.to(context.device, copy=True))
        if y.dtype != ordinary:
            return "its dtype"
        return "y" if far_off(y, context.exact(x, weight, eps)) else ""
    dy = context.rows(len(x), x.shape[-1], x.dtype, seed=79) + x
    try:
        got = context.gradients_of(norm, x, dy)
    except NoGradient:
        return "its gradient"
    except Raised:
        return ""  # the checks of gradients say so
    return wrong_gradient(got, context.exact_gradients(x, weight, dy, eps))


def _same_memory(context: CheckContext) -> str:
    """An x that is written anew where the last one lay, as the buffers of a captured graph are."""
    width = context.width
    for dtype in context.dtypes:
        weight = context.weight(width, dtype)
        norm = context.norm(weight, width)
        buffer = torch.empty(6, width, dtype=dtype, device=context.device)
        for index in range(3):
            x = context.rows(6, width, dtype, seed=80 + index, scale=4.0**index)
            buffer.data.copy_(x)
            with torch.no_grad():
                y = norm(buffer)
            if far_off(y, context.exact(x, weight)):
                return f"y in {short(dtype)} is that of an earlier x at the same address"
    return ""


def at_once(context: CheckContext) -> Outcome:
    """Several Python threads call one norm, each with rows of its own."""
    if context.device.type != "cpu":
        return not_applicable("not on the CPU")
    width, dtype = context.width, context.dtypes[0]
    weight = context.weight(width, dtype)
    norm = context.norm(weight, width)
    rows = [context.rows(33, width, dtype, seed=85 + i, scale=4.0**i) for i in range(_THREADS)]
    correct = [context.exact(x, weight) for x in rows]
    wrong, begin = [], threading.Barrier(_THREADS)

    def work(index: int) -> None:
        begin.wait()
        with torch.no_grad():
            for _ in range(_ROUNDS):
                try:
                    if far_off(norm(rows[index].to(context.device, copy=True)), correct[index]):
                        wrong.append("is wrong")
                except Raised as error:
                    wrong.append(f"raises {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        said = f"called from {_THREADS} Python threads at once its result {wrong[0]}"
        return failed(f"{len(wrong)} of {_THREADS * _ROUNDS} calls", said)
    return passed(f"{_THREADS} Python threads")


def checks() -> Iterator[Check]:
    yield Check("weight-updates", "A call uses the weight as it is then.", weights)
    yield Check("call-sequence", "A call has its own answer, whatever was called before.", sequence)
    yield Check("calls-at-once", "Calls from several Python threads do not disturb each other.", at_once)
