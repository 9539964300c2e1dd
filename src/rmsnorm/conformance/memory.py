"""Whose memory results are: their own, now and after the next call; and what a call keeps or changes besides."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rmsnorm.conformance.context import CheckContext, far_off, same_bits
from rmsnorm.conformance.graph import Forward
from rmsnorm.conformance.implementation import BackwardRaised, NoGradient, Norm, Raised
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short


def own(context: CheckContext) -> Outcome:
    """Results stay as they are, and writing into one changes nothing else."""
    width = context.width
    for dtype in context.dtypes:
        weight = context.weight(width, dtype)
        for trained in (False, True) if not context.untrained else (False,):
            norm, other = context.norm(weight, width), context.norm(weight, width)
            with torch.set_grad_enabled(trained):
                for norms in ((norm, norm), (norm, other)):
                    if said := _overwritten(context, norms, dtype, trained):
                        return failed("overwritten", f"{said} is overwritten by the next call in {short(dtype)}")
        norm = context.norm(weight, width)
        with torch.no_grad():
            if said := _shared(context, norm, weight, dtype):
                return failed("shared", f"in {short(dtype)} {said}")
        if not context.untrained:
            try:
                said = _gradients_overwritten(context, norm, weight, dtype)
            except (NoGradient, BackwardRaised):
                continue  # the checks of gradients say so
            if said:
                return failed(f"{said} overwritten", f"{said} is overwritten by the next backward in {short(dtype)}")
    return passed("nothing is overwritten by a later call, nor shared")


def _overwritten(context: CheckContext, norms: tuple[Norm, Norm], dtype: torch.dtype, trained: bool) -> str:
    first, second = (context.rows(5, context.width, dtype, seed=50 + i).to(context.device) for i in (0, 1))
    y = norms[0](first.requires_grad_(trained))
    before = y.detach().clone()
    norms[1](second.requires_grad_(trained))
    return "" if same_bits(y.detach().cpu(), before.cpu()) else "a result"


def _shared(context: CheckContext, norm: Norm, weight: Tensor | None, dtype: torch.dtype) -> str:
    width = context.width
    rows = context.rows(5, width, dtype, seed=52)
    for name, x in (("ordinary rows", rows), ("rows of zeros", rows * 0), ("expanded rows", rows[:1].expand(5, width))):
        there = x.to(context.device) if 0 in x.stride() else x.to(context.device, copy=True)
        try:
            y = norm(there)
        except Raised:
            continue  # the checks of inputs say so
        for what, tensor in (("its input", there), ("the weight", norm.weight)):
            if tensor is not None and y.numel() and _memory(y) & _memory(tensor):
                return f"the result for {name} lies in the memory of {what}"
        if any(step == 0 and size > 1 for step, size in zip(y.stride(), y.shape, strict=True)):
            return f"the rows of the result for {name} lie in one another's memory"
        if far_off(y, context.exact(x, weight)):
            continue  # the checks of inputs say so
        y.fill_(torch.nan)
        if far_off(norm(there), context.exact(x, weight)):
            return f"writing into a result for {name} changes the next one: results are kept and handed out again"
    return ""


def _memory(t: Tensor) -> set[int]:
    """The address of its memory."""
    return {t.untyped_storage().data_ptr()}


def _gradients_overwritten(context: CheckContext, norm: Norm, weight: Tensor | None, dtype: torch.dtype) -> str:
    rows = [context.rows(5, context.width, dtype, seed=53 + i, scale=2.0**i) for i in (0, 1)]
    first, second = (Forward(context, norm, x, weight) for x in rows)
    found = first.backward()
    before = [None if t is None else t.clone() for t in found]
    second.backward()
    for name, t, kept in zip(("dx", "dweight"), found, before, strict=True):
        if t is not None and kept is not None and not same_bits(t.cpu(), kept.cpu()):
            return name
    return ""


class _Memory(bytearray):
    """Memory of an input, which can be watched: a tensor made of it keeps it alive."""


def kept(context: CheckContext) -> Outcome:
    """Inputs of calls that are over are let go of; one may be kept, as a cache of the last call does."""
    if context.device.type != "cpu":
        return not_applicable("not on the CPU")
    width, alive = context.width, []
    for dtype in context.dtypes:
        weight = context.weight(width, dtype)
        norm = context.norm(weight, width)
        for index in range(8):
            values = context.rows(3 + index, width, dtype, seed=55)
            memory = _Memory(values.numel() * values.element_size())
            alive.append(weakref.ref(memory))
            x = torch.frombuffer(memory, dtype=dtype).view(values.shape).copy_(values)
            del memory
            if not context.untrained and index % 2:
                y = norm(x.requires_grad_())
                with contextlib.suppress(RuntimeError):  # the checks of gradients say so
                    y.backward(torch.ones_like(y))
                del y
            else:
                with torch.no_grad():
                    norm(x)
            del x
        count = sum(memory() is not None for memory in alive)
        if count > 2:
            gc.collect()  # what a cycle holds is let go of too; it takes longer than all calls
            count = sum(memory() is not None for memory in alive)
        if count > 2:
            said = f"after {len(alive)} calls {count} inputs are still in memory: it keeps them, call after call"
            return failed(f"{count} of {len(alive)} inputs kept", said)
    return passed("inputs are let go of")


_SETTINGS: dict[str, Callable[[], Any]] = {
    "whether gradients are recorded": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "the default dtype": torch.get_default_dtype,
    "the number of threads": torch.get_num_threads,
    "PyTorch's random state": lambda: torch.get_rng_state().tolist(),
    "Python's random state": random.getstate,
    "whether only deterministic algorithms are used": torch.are_deterministic_algorithms_enabled,
    "the precision of float32 products": torch.get_float32_matmul_precision,
    "whether subnormal numbers are zero": lambda: bool(torch.full((16,), 2.0**-140).mul(1.0).eq(0).any()),
}


def settings(context: CheckContext) -> Outcome:
    """What belongs to the process is as before a call, forward and backward."""
    threads, changed = torch.get_num_threads(), []
    for count in (1, 2):  # a number that a norm sets is another than one of these
        torch.set_grad_enabled(True)
        torch.set_flush_denormal(False)  # an earlier call may have set it
        torch.set_num_threads(count)
        before = {name: read() for name, read in _SETTINGS.items()}
        with contextlib.suppress(RuntimeError):  # the checks of gradients say so
            _call_each_way(context)
        changed += [name for name, read in _SETTINGS.items() if read() != before[name]]
        torch.set_default_dtype(before["the default dtype"])
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    if changed:
        told = list(dict.fromkeys(changed))
        return failed(f"{len(told)} changed", f"a call changes {', '.join(told)}, for the whole process")
    return passed("as before the call")


def _call_each_way(context: CheckContext) -> None:
    width = context.width
    for dtype in context.dtypes:
        x, weight = context.rows(5, width, dtype, seed=56), context.weight(width, dtype)
        norm = context.norm(weight, width)
        with torch.no_grad():
            norm(x.to(context.device))
        # Not under no_grad, whose end would put back what the norm has changed.
        norm(x.to(context.device))
        if not context.untrained:
            y = norm(x.to(context.device, copy=True).requires_grad_())
            if y.requires_grad:
                y.sum().backward()


def checks() -> Iterator[Check]:
    yield Check("own-memory", "Results and gradients stay as they are, whatever is called or written later.", own)
    yield Check("memory-kept", "Inputs of calls that are over are let go of.", kept)
    yield Check(
        "process-settings", "Grad mode, threads, random state and default dtype are as before a call.", settings
    )
