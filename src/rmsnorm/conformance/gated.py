"""With a gate: which activation, before the norm or after it; results, gradients, and gates of every magnitude."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from rmsnorm.conformance import exact
from rmsnorm.conformance.context import CheckContext, far_off
from rmsnorm.conformance.form import DTYPES
from rmsnorm.conformance.gradients import DWEIGHT_ROUNDINGS, DX_ROUNDINGS, sum_limit, terms
from rmsnorm.conformance.implementation import BackwardRaised, NoGradient, described
from rmsnorm.conformance.outcome import Check, Outcome, failed, not_applicable, passed
from rmsnorm.patching.convention import short

_ROWS = 24
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu of a tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
    "no activation": lambda gate: gate,
}
_PLACES = ("after", "before")
# Roundings besides those of the norm. After it: of the activation and of the norm's result, both to 16 bits. Before it:
# of the activation and of x * act, which also move the mean; each by less than one unit. In float32 an activation has
# its exponential, within two units, a sum, a quotient and a product.
_MORE = {2: {"after": 2.0, "before": 3.0}, 4: {"after": 6.0, "before": 8.0}}
# A share of the largest result: forms are further apart, and one that is meant may have faults.
_NEAR = 2.0**-5
# Beyond some of these exp(gate) or exp(-gate) leaves float32; the largest is a number of float16.
_GATES = (0.0, 1e-7, 5.0, 20.0, 30.0, 90.0, 110.0, 800.0, 1000.0)


@dataclass(frozen=True)
class _Gate:
    """The form of a gate."""

    activation: str
    place: str

    def act(self, gate: Tensor) -> Tensor:
        return _ACTIVATIONS[self.activation](gate.double())

    def normalized(self, context: CheckContext, x: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        """y in float64."""
        if self.place == "before":
            return context.exact(x.double() * self.act(gate), weight)
        return context.exact(x, weight) * self.act(gate)

    def __str__(self) -> str:
        return f"{self.activation}, {self.place} the norm"


def _sample(context: CheckContext, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
    x = context.rows(_ROWS, width, dtype, seed=95)
    return x, context.rows(_ROWS, width, dtype, seed=96, scale=2.0), context.weight(width, dtype)


def _run(context: CheckContext, x: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
    with torch.no_grad():
        norm = context.norm(weight, x.shape[-1])
        return norm(x.to(context.device, copy=True), gate=gate.to(context.device, copy=True)).detach().cpu()


def _find(context: CheckContext) -> _Gate | None:
    """The gate that explains ordinary results in the first dtype that it takes; None if none does."""
    dtype = context.dtypes[0]
    x, gate, weight = _sample(context, dtype, context.width)
    y = _run(context, x, gate, weight).double()
    apart = {
        form: float((y - correct).abs().max() / correct.abs().max())
        for activation, place in product(_ACTIVATIONS, _PLACES)
        for form in [_Gate(activation, place)]
        for correct in [form.normalized(context, x, gate, weight)]
    }
    nearest = min(apart, key=lambda form: apart[form])
    return nearest if apart[nearest] <= _NEAR else None


def result(dtype: torch.dtype, context: CheckContext, form: _Gate) -> Outcome:
    worst, limit = 0.0, context.limit(dtype) + _MORE[dtype.itemsize][form.place]
    for width in context.widths(64, 1024):
        x, gate, weight = _sample(context, dtype, width)
        correct = form.normalized(context, x, gate, weight)
        y = _run(context, x, gate, weight)
        error = exact.errors(y, correct, context.form.precision(dtype, None if weight is None else dtype, y.dtype))
        worst = max(worst, float(error.max()))
    measured = f"{worst:.3g} ulp (limit {limit:g})"
    if worst <= limit:
        return passed(f"{form}, {measured}", max=worst, limit=limit)
    return failed(measured, f"with a gate {short(dtype)} results are up to {worst:.3g} units in the last place off")


def magnitudes(context: CheckContext, form: _Gate) -> Outcome:
    """Gates for which an exponential is infinite or nothing."""
    if form.activation not in ("silu", "sigmoid"):
        return not_applicable(str(form))
    values = torch.tensor([sign * value for value in _GATES for sign in (1.0, -1.0)])
    for dtype in context.dtypes:
        width = context.width
        x, gate, weight = _sample(context, dtype, width)
        gate = values.repeat(_ROWS * width // len(values) + 1)[: _ROWS * width].view(_ROWS, width).to(dtype)
        y = _run(context, x, gate, weight)
        if not bool(y.isfinite().all()):
            at = gate[~y.isfinite()].abs().min().item()
            return failed("not finite", f"a gate of {at:g} makes results in {short(dtype)} infinite or NaN")
        if far_off(y, form.normalized(context, x, gate, weight)):
            return failed("wrong", f"gates up to {_GATES[-1]:g} give wrong results in {short(dtype)}")
    return passed(f"gates up to {_GATES[-1]:g}, of both signs")


def not_numbers(context: CheckContext, form: _Gate) -> Outcome:
    for dtype in context.dtypes:
        x, gate, weight = _sample(context, dtype, context.width)
        gate[2, 5] = torch.nan
        y = _run(context, x, gate, weight)
        reached = context.form.grouped(y[2])[5 // (context.form.group or context.width)]
        if not bool(y[2, 5].isnan()) or (form.place == "before" and not bool(reached.isnan().all())):
            return failed(f"NaN swallowed in {short(dtype)}", "a NaN in the gate does not show in its result")
        others = torch.ones(_ROWS, dtype=torch.bool)
        others[2] = False
        if not bool(y[others].isfinite().all()):
            return failed("other rows suffer", "a NaN in one row's gate shows in others")
    return passed("a NaN in the gate shows, in its row")


def strides(context: CheckContext, form: _Gate) -> Outcome:
    """x and the gate as the two halves of one projection, as they are in models."""
    width = context.width
    for dtype in context.dtypes:
        x, gate, weight = _sample(context, dtype, width)
        both = torch.cat([x, gate], -1).to(context.device)
        with torch.no_grad():
            y = context.norm(weight, width)(both[:, :width], gate=both[:, width:]).cpu()
        if far_off(y, form.normalized(context, x, gate, weight)):
            return failed("wrong", "wrong for x and a gate that are halves of one tensor: strides are ignored")
    return passed("halves of one tensor")


def gradients(dtype: torch.dtype, context: CheckContext, form: _Gate) -> Outcome:
    if not context.implementation.trains:
        return not_applicable("for inference only")
    width = context.widths(64)[0]
    x, gate, weight = _sample(context, dtype, width)
    dy = context.rows(_ROWS, width, dtype, seed=97)
    norm = context.norm(weight, width)
    leaves = [t.to(context.device, copy=True).requires_grad_() for t in (x, gate)]
    y = norm(leaves[0], gate=leaves[1])
    if not y.requires_grad:
        raise NoGradient("with a gate the result has no gradient")
    try:
        y.backward(dy.to(y.device, y.dtype, copy=True))
    except Exception as error:  # a stranger's backward may raise anything
        raise BackwardRaised(f"backward raises {described(error)}") from error
    correct, sizes, dweight, parts = _exact_gradients(context, form, x, gate, weight, dy)
    rounding = torch.finfo(dtype).eps / 2
    # Those of dx, and of the activation, its derivative, the gate's products and the norm, each once.
    limit, worst = DX_ROUNDINGS[dtype] + 5.0, 0.0
    for name, leaf, right, size in zip(("x", "the gate"), leaves, correct, sizes, strict=True):
        if leaf.grad is None:
            raise NoGradient(f"{name} gets no gradient")
        off = float(((leaf.grad.cpu().double() - right).abs() / size).nan_to_num(nan=torch.inf).max()) / rounding
        if not off <= limit:
            said = f"the gradient of {name} in {short(dtype)} is {off:.3g} roundings off"
            return failed(f"{off:.3g} roundings (limit {limit:g})", said)
        worst = max(worst, off)
    if dweight is not None:
        if norm.weight is None or norm.weight.grad is None:
            return failed("missing", "with a gate the weight gets no gradient")
        off = float(((norm.weight.grad.cpu().double().flatten() - dweight).abs() / parts).max()) / rounding
        most = DWEIGHT_ROUNDINGS + 3.0 + sum_limit(_ROWS, rounding)
        if not off <= most:
            said = f"dweight with a gate is {off:.3g} roundings off"
            return failed(f"{off:.3g} roundings (limit {most:.3g})", said)
    return passed(f"{worst:.3g} roundings of their terms (limit {limit:g})", max=worst, limit=limit)


def _exact_gradients(
    context: CheckContext, form: _Gate, x: Tensor, gate: Tensor, weight: Tensor | None, dy: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor | None, Tensor]:
    """Gradients of x, the gate and the weight in float64, and the sizes of the terms that they are made of."""
    u, z = x.double().requires_grad_(), gate.double().requires_grad_()
    leaf = None if weight is None else weight.double().requires_grad_()
    y = form.normalized(context, u, z, leaf)
    y.backward(dy.double())
    assert u.grad is not None and z.grad is not None  # noqa: S101, PT018 - they are leaves
    act, wide = form.act(gate), dy.double()
    # An activation's derivative is made of terms up to its own size and one.
    steep = act.abs() + 1.0
    if form.place == "before":
        inner = x.double() * act
        of_u = terms(context, inner, weight, wide)
        sizes = (of_u * steep, of_u * x.double().abs() * steep)
        parts = (wide * context.form.normalized(inner, None, context.eps)).abs().sum(0)
    else:
        sizes = (terms(context, x, weight, wide * act.abs()), wide.abs() * context.exact(x, weight).abs() * steep)
        parts = (wide * act * context.form.normalized(x, None, context.eps)).abs().sum(0)
    tiny = torch.finfo(torch.float32).tiny
    return (
        (u.grad, z.grad),
        (sizes[0].clamp_min(tiny), sizes[1].clamp_min(tiny)),
        None if leaf is None else leaf.grad,
        parts.clamp_min(tiny),
    )


def _asked(function: Callable[[CheckContext, _Gate], Outcome], context: CheckContext) -> Outcome:
    form = _find(context)
    if form is None:
        return failed("not recognised", "with a gate it is no norm times an activation, before or after")
    try:
        return function(context, form)
    except (NoGradient, BackwardRaised) as error:
        return failed("missing", str(error))


def checks() -> Iterator[Check]:
    found: list[tuple[str, str, Callable[[CheckContext, _Gate], Outcome]]] = [
        (f"gate-{short(dtype)}", "The gate's activation multiplies x or the result.", partial(result, dtype))
        for dtype in DTYPES
    ]
    found += [
        ("gate-range", "Gates for which an exponential overflows are right.", magnitudes),
        ("gate-nan", "A NaN in the gate shows, in its row.", not_numbers),
        ("gate-strides", "x and the gate may be halves of one tensor.", strides),
    ]
    found += [
        (
            f"gate-gradients-{short(dtype)}",
            "x, the gate and the weight get the formula's gradients.",
            partial(gradients, dtype),
        )
        for dtype in DTYPES
    ]
    for name, meaning, function in found:
        yield Check(name, meaning, partial(_asked, function), about="gate")
