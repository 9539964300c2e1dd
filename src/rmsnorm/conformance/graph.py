"""What autograd keeps between a forward and its backward, and which gradients are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor

from rmsnorm.conformance.context import CheckContext, Gradients, far_off, wrong_gradient
from rmsnorm.conformance.implementation import BackwardRaised, NoGradient, Norm
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short


class Forward:
    """One forward of a norm, whose backward is to come."""

    def __init__(self, context: CheckContext, norm: Norm, x: Tensor, weight: Tensor | None) -> None:
        self.norm = norm
        self.x = x.to(context.device, copy=True).requires_grad_()
        # As an activation: it may be overwritten, and autograd notices.
        self.between = self.x.clone()
        self.dy = (context.rows(len(x), x.shape[-1], torch.float32, seed=41) + x.float()).to(x.dtype)
        self.correct = context.exact_gradients(x, weight, self.dy)
        self.y = norm(self.between)
        if not self.y.requires_grad:
            raise NoGradient("its result has no gradient")

    def backward(self, retain: bool = False) -> tuple[Tensor, Tensor | None]:
        """dx and dweight, as autograd hands them over: its accumulation would copy them."""
        leaves = [self.x] if self.norm.weight is None else [self.x, self.norm.weight]
        dy = self.dy.to(self.y.device, self.y.dtype, copy=True)
        try:
            found = torch.autograd.grad(self.y, leaves, dy, retain_graph=retain, allow_unused=True)
        except Exception as error:  # a stranger's backward may raise anything
            raise BackwardRaised(str(error)) from error
        if found[0] is None:
            raise NoGradient("x gets no gradient")
        return found[0], found[1] if len(found) > 1 else None

    def wrong(self, dx: Tensor, dweight: Tensor | None) -> str:
        """Which gradient is another than its own; nothing if none is."""
        return wrong_gradient(Gradients(self.y, dx, dweight), self.correct)


def order(context: CheckContext) -> Outcome:
    """Three forwards of one norm, their backwards in every order, and calls without a backward in between."""
    if context.untrained:
        return not_applicable(context.untrained)
    width = context.width
    for dtype in context.dtypes:
        weight = context.weight(width, dtype)
        for first in permutations(range(3)):
            norm = context.norm(weight, width)
            counts = (9, 9, 4)
            rows = [context.rows(n, width, dtype, seed=40 + i, scale=4.0**i) for i, n in enumerate(counts)]
            try:
                forwards = [Forward(context, norm, x, weight) for x in rows]
                with torch.no_grad():
                    norm(rows[0].to(context.device) * 16)
                for index in first:
                    for retain in (True, False):
                        if said := forwards[index].wrong(*forwards[index].backward(retain)):
                            told = f"{said} in {short(dtype)} is wrong: backward reads what a later forward left"
                            return failed(f"{said} of another call", told)
            except (NoGradient, BackwardRaised):
                return passed("left to the checks of gradients")
    return passed("three forwards, their backwards in every order")


def saved(context: CheckContext) -> Outcome:
    """x or the weight changed between forward and backward: PyTorch's operations raise, and a copy is right too."""
    if context.untrained:
        return not_applicable(context.untrained)
    width, raises = context.width, False
    for dtype in context.dtypes:
        weight = context.weight(width, dtype)
        for what in ("x", "the weight") if weight is not None else ("x",):
            norm = context.norm(weight, width)
            try:
                forward = Forward(context, norm, context.rows(6, width, dtype, seed=42), weight)
            except NoGradient:
                return passed("left to the checks of gradients")
            changed = forward.between if what == "x" else norm.weight
            assert changed is not None  # noqa: S101 - there is a weight
            with torch.no_grad():
                changed.mul_(-3)
            try:
                said = forward.wrong(*forward.backward())
            except (NoGradient, BackwardRaised):
                raises = True
                continue
            if said:
                told = f"{what} changed in place between forward and backward gives a wrong {said}, and no error"
                return failed(f"wrong {said}", told)
    return passed("raises" if raises else "right all the same")


def frozen(context: CheckContext) -> Outcome:
    """What needs no gradient must not cost another its own; also after calls where it was the other way round."""
    if context.untrained:
        return not_applicable(context.untrained)
    width = context.width
    for dtype in context.dtypes:
        weight = context.weight(width, dtype)
        if weight is None:
            return not_applicable("no weight")
        norm = context.norm(weight, width)
        leaf = norm.weight
        assert leaf is not None  # noqa: S101 - there is a weight
        x = context.rows(9, width, dtype, seed=43)
        dy = (context.rows(9, width, torch.float32, seed=44) + x.float()).to(dtype)
        correct = context.exact_gradients(x, weight, dy)
        for of_x, of_weight in ((True, False), (False, True), (True, True), (True, False), (False, True)):
            leaf.requires_grad_(of_weight)
            leaf.grad = None
            given = x.to(context.device, copy=True).requires_grad_(of_x)
            y = norm(given)
            what = "a frozen weight" if of_x and not of_weight else "a frozen x" if of_weight else "an earlier call"
            if not y.requires_grad:
                return failed("no gradient", f"{what} cuts the graph: the result has no gradient")
            try:
                y.backward(dy.to(y.device, y.dtype, copy=True))
            except Exception as error:  # a stranger's backward may raise anything
                told = str(error).strip().partition("\n")[0]
                return failed("backward raises", f"with {what}, backward raises {type(error).__name__}: {told}")
            for name, asked, tensor, right in (
                ("dx", of_x, given, correct.dx),
                ("dweight", of_weight, leaf, correct.dweight),
            ):
                if not asked or right is None:
                    continue
                if tensor.grad is None:
                    return failed(f"no {name}", f"{what} cuts the graph: {name} is missing")
                if far_off(tensor.grad.view(right.shape), right):
                    return failed(f"wrong {name}", f"with {what}, {name} in {short(dtype)} is wrong")
    return passed("x, the weight, either")


def checks() -> Iterator[Check]:
    yield Check("backward-order", "A backward uses what its own forward left, whatever was called since.", order)
    yield Check("saved-tensors", "What changes between forward and backward raises, or changes nothing.", saved)
    yield Check("frozen", "A frozen weight leaves dx, a frozen x leaves dweight.", frozen)
