"""One call of an operator and what the reference gives for it."""

from dataclasses import dataclass

import torch

from rmsnorm.spec import ACTIVATIONS, ROUNDINGS
from tests.support import reference
from tests.support.rows import generator, random_rows

NORMALIZE, ADD, BACKWARD, REBUILD = "normalize", "add", "backward", "rebuild"
GATED, GATED_BACKWARD = "gated", "gated_backward"


@dataclass(frozen=True)
class Case:
    """One call. `op` says which operators it stands for and what `arguments` are; see kernel_worker.py."""

    name: str
    op: str
    arguments: tuple
    expected: tuple


def normalize_case(name, x, weight, eps=1e-6, offset=0.0, rounding=0):
    expected = reference.forward(x, weight, eps, offset, ROUNDINGS[rounding])
    return Case(
        f"{name} {describe(x, weight, offset, rounding)}", NORMALIZE, (x, weight, eps, offset, rounding), expected
    )


def add_case(name, x, residual, weight, eps=1e-6, offset=0.0, rounding=0):
    expected = reference.add_forward(x, residual, weight, eps, offset, ROUNDINGS[rounding])
    arguments = (x, residual, weight, eps, offset, rounding)
    return Case(f"{name} {describe(x, weight, offset, rounding)}", ADD, arguments, expected)


def backward_case(name, dy, x, weight, offset=0.0, dh=None, eps=1e-6):
    rstd = reference.forward(x, weight, eps, offset, "once")[1]
    expected = reference.backward(dy, x, rstd, weight, offset, dh)
    name = f"{name} {describe(x, weight, offset)} dy={short(dy.dtype)} dh={dh is not None}"
    return Case(name, BACKWARD, (dy, x, rstd, weight, offset, dh), expected)


def rebuild_case(name, x, weight, offset=0.0, rounding=0, eps=1e-6, dh=None):
    y, rstd = reference.forward(x, weight, eps, offset, ROUNDINGS[rounding])
    dy = random_rows(1, x.shape[-1], y.dtype, 1)[0].expand(x.shape)
    rebuilt = reference.rebuild(y, rstd, weight, offset, x.dtype)
    expected = reference.backward(dy, rebuilt, rstd, weight, offset, dh)
    name = f"{name} {describe(x, weight, offset, rounding)} dh={dh is not None}"
    return Case(name, REBUILD, (dy, y, rstd, weight, offset, dh, x.dtype), expected)


def gated_case(name, x, gate, weight, form, group_size, offset=0.0, rounding=0, eps=1e-6):
    """`form` is the activation's index and whether the gate comes first."""
    activation, norm_first = ACTIVATIONS[form[0]], not form[1]
    options = (weight, eps, offset, ROUNDINGS[rounding], group_size, activation, norm_first)
    expected = reference.gated_forward(x, gate, *options)
    name = f"{name} {describe_gate(gate, form, group_size)} {describe(x, weight, offset, rounding)}"
    return Case(name, GATED, (x, gate, weight, eps, offset, rounding, group_size, *form), expected)


def gated_backward_case(name, dy, x, gate, weight, form, group_size, offset=0.0, eps=1e-6):
    activation, norm_first = ACTIVATIONS[form[0]], not form[1]
    rstd = reference.gated_forward(x, gate, weight, eps, offset, "once", group_size, activation, norm_first)[1]
    expected = reference.gated_backward(dy, x, gate, rstd, weight, offset, group_size, activation, norm_first)
    name = f"{name} {describe_gate(gate, form, group_size)} {describe(x, weight, offset)} dy={short(dy.dtype)}"
    arguments = (dy, x, gate, rstd, weight, None, offset, group_size, *form)
    return Case(name, GATED_BACKWARD, arguments, tuple(t for t in expected if t is not None))


def describe_gate(gate, form, group_size):
    kind = "no gate" if gate is None else f"{ACTIVATIONS[form[0]]} {'before' if form[1] else 'after'}"
    return f"{kind}, groups of {group_size},"


def short(dtype):
    return str(dtype).removeprefix("torch.")


def describe(x, weight, offset, rounding=0):
    kind = "none" if weight is None else short(weight.dtype)
    return f"{tuple(x.shape)} x={short(x.dtype)} weight={kind} offset={offset} {ROUNDINGS[rounding]}"


def plain_weight(width, dtype, seed=3):
    """Around 1, so that gains neither vanish nor hide what is multiplied by them."""
    return None if dtype is None else (1 + 0.3 * torch.randn(width, generator=generator(seed))).to(dtype)
