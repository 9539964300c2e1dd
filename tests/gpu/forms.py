"""What comes around the norm, as calls of the operators, and what they must give: the bits of the CPU's kernels."""

from itertools import product
from typing import NamedTuple

import torch

from rmsnorm.numerics import reference
from rmsnorm.spec import NormSpec

ops = torch.ops.rmsnorm


class Form(NamedTuple):
    """`second` is x's partner: the residual, or the gate."""

    name: str
    residual: bool = False
    exact_sum: bool = False
    alpha: float = 1.0
    activation: int = 0
    gate_first: bool | None = None  # None: no gate

    @property
    def gated(self):
        return self.gate_first is not None

    @property
    def gate_last(self):
        return self.gate_first is False


PLAIN, ADD = Form("plain"), Form("add", residual=True)
GATES = tuple(
    Form(f"{name} {'first' if first else 'last'}", activation=activation, gate_first=first)
    for (activation, name), first in product(enumerate(("silu", "sigmoid")), (False, True))
)
EXACT, SCALED = (
    Form("exact sum", residual=True, exact_sum=True),
    Form("scaled sum", residual=True, exact_sum=True, alpha=0.22),
)
FORMS = PLAIN, ADD, *GATES, EXACT, SCALED, Form("scaled", residual=True, alpha=-1.7)


def normalize(form, x, second, weight, size=0, eps=1e-6, offset=0.0, rounding=0):
    """The forward that a training step calls; a group size of 0 is the whole row, where there is a door without."""
    options = eps, offset, rounding
    if form.residual:
        if not size and second.dtype == x.dtype and form == ADD:
            return "add_forward", (x, second, weight, *options)
        return "residual_forward", (x, second, weight, *options, size, form.exact_sum, form.alpha)
    if form.gated:
        return "gated_forward_train", (x, second, weight, *options, size, form.activation, form.gate_first)
    if size:
        return "gated_forward_train", (x, None, weight, *options, size, 0, False)
    return "forward_train", (x, weight, *options)


def backward(form, dy, x, second, weight, size=0, offset=0.0, eps=1e-6, dh=None, needed=(True, True, True)):
    """Its gradients; with a residual x is the sum h, and dh its gradient from elsewhere."""
    need_dx, need_dgate, need_dweight = needed
    gate = second if form.gated else None
    normed = Form("groups") if gate is None else form
    rstd = expected(*normalize(normed, x, gate, None, size or x.shape[-1], eps))[1]
    if gate is None and not size:
        return "backward", (dy, x, rstd, weight, offset, dh, None, need_dx, need_dweight)
    options = offset, size, form.activation, form.gate_first or False
    dh, need_dgate = (dh, False) if gate is None else (None, need_dgate)
    return "gated_backward", (dy, x, gate, rstd, weight, dh, *options, need_dx, need_dgate, need_dweight)


def rebuilding(dy, y, rstd, weight, offset, dtype):
    return "backward", (dy, y, rstd, weight, offset, None, dtype, True, True)


def dy_dtype(form, x_dtype, other):
    """A gate that comes last makes y x's dtype."""
    return x_dtype if form.gate_last else other


# ---------------------------------------------------------------- what they must give


def expected(op, arguments):
    if op == "residual_forward":
        return _residual_forward(*arguments)
    if op.startswith("gated") and _is_mixed(op, arguments):
        return _widened(op, arguments)
    return getattr(ops, op)(*arguments)


def _residual_forward(x, residual, weight, eps, offset, rounding, size, exact_sum, alpha):
    """The steps, one after another; the statistics from a float32 norm."""
    branch = x if alpha == 1.0 else x * alpha
    total = branch.float() + residual.float()
    h = total.to(residual.dtype)
    normed = total if exact_sum else h.float()
    size = size or x.shape[-1]
    rstd = ops.gated_forward_train(normed, None, None, eps, 0.0, 0, size, 0, False)[1]
    x_hat = (normed.unflatten(-1, (-1, size)) * rstd.unsqueeze(-1)).flatten(-2)
    spec = NormSpec(eps, offset, rounding)
    y = reference.round_x_hat(x_hat, x.dtype, weight, spec)
    if weight is not None:
        y = y * (weight.float() + offset if offset else weight.float())
    y = y.to(reference.result_dtype(x.dtype, weight, spec))
    return *(_laid_out_like(x, t) for t in (y, h)), rstd


def _is_mixed(op, arguments):
    x, gate = arguments[1:3] if op == "gated_backward" else arguments[:2]
    return gate is not None and gate.dtype != x.dtype


def _widened(op, arguments):
    """The same in float32, rounded to the results' dtypes at the end: right where `rounding` is "once"."""
    is_backward = op == "gated_backward"
    x, gate = arguments[1:3] if is_backward else arguments[:2]
    assert is_backward or arguments[5] == 0
    wide = [a.float() if isinstance(a, torch.Tensor) else a for a in arguments]
    weight = arguments[4 if is_backward else 2]
    dtypes = (x.dtype, gate.dtype, torch.float32 if weight is None else weight.dtype)
    found = getattr(ops, op)(*wide)
    if not is_backward:
        return found[0].to(x.dtype), found[1]
    return tuple(None if t is None else t.to(dtype) for t, dtype in zip(found, dtypes, strict=True))


def _laid_out_like(x, t):
    like = torch.empty_like(x, dtype=t.dtype)
    return (like if like.stride() == x.stride() else torch.empty_like(t, memory_format=torch.contiguous_format)).copy_(
        t
    )
