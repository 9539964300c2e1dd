"""One call of an operator and what the reference gives for it."""

from dataclasses import dataclass

import torch

from rmsnorm.spec import ACTIVATIONS, ROUNDINGS
from tests.support import reference
from tests.support.rows import generator, random_rows

NORMALIZE, ADD, BACKWARD, REBUILD = "normalize", "add", "backward", "rebuild"
GATED, GATED_BACKWARD, RESIDUAL, NORM_ADD = "gated", "gated_backward", "residual", "norm_add"
MODULATED, MODULATED_BACKWARD = "modulated", "modulated_backward"
ROTATED, ROTATED_BACKWARD = "rotated", "rotated_backward"


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


def residual_case(name, x, residual, weight, rounding=0, group_size=0, exact=False, alpha=1.0, offset=0.0, eps=1e-6):
    """The residual modes of docs/numerics.md step by step, in plain PyTorch and a float32 norm without weight."""
    branch = x if alpha == 1 else x * alpha
    total = branch.float() + residual.float()
    h = total.to(residual.dtype)
    u, size = total if exact else h, group_size or x.shape[-1]
    # Without weight and roundings, and of float32, the result is x_hat.
    x_hat, rstd = reference.gated_forward(u.float(), None, None, eps, 0.0, "once", size, "silu", True)
    convention = ROUNDINGS[rounding]
    y = x_hat.to(x_hat_type(x, weight, rounding)).float()
    if weight is not None:
        y = y * (weight.float() + offset if offset else weight.float())
    y = y.to(reference.result_dtype(x, weight, convention))
    name = f"{name} {describe(x, weight, offset, rounding)} residual={short(residual.dtype)} groups of {size}"
    arguments = (x, residual, weight, eps, offset, rounding, group_size, exact, alpha)
    return Case(f"{name} exact={exact} alpha={alpha}", RESIDUAL, arguments, (y, h, rstd))


def norm_add_case(name, x, residual, weight, eps=1e-6, offset=0.0, rounding=0):
    """The norm's result, rounded, and then the sum of the two in float32."""
    n, rstd = reference.forward(x, weight, eps, offset, ROUNDINGS[rounding])
    h = (n.float() + residual.float()).to(residual.dtype)
    name = f"{name} {describe(x, weight, offset, rounding)} residual={short(residual.dtype)}"
    return Case(name, NORM_ADD, (x, residual, weight, eps, offset, rounding), (h, rstd))


def x_hat_type(x, weight, rounding):
    """The type that x_hat is rounded to: the kernels' x_hat_dtype."""
    name = ROUNDINGS[rounding]
    if name == "before_scale":
        return x.dtype
    return weight.dtype if name == "weight_dtype" and weight is not None else torch.float32


def gated_backward_case(name, dy, x, gate, weight, form, group_size, offset=0.0, eps=1e-6, dh=None):
    activation, norm_first = ACTIVATIONS[form[0]], not form[1]
    rstd = reference.gated_forward(x, gate, weight, eps, offset, "once", group_size, activation, norm_first)[1]
    expected = reference.gated_backward(dy, x, gate, rstd, weight, offset, group_size, activation, norm_first, dh)
    name = f"{name} {describe_gate(gate, form, group_size)} {describe(x, weight, offset)} dy={short(dy.dtype)}"
    name += f" dh={dh is not None}"
    arguments = (dy, x, gate, rstd, weight, dh, offset, group_size, *form)
    return Case(name, GATED_BACKWARD, arguments, tuple(t for t in expected if t is not None))


def describe_gate(gate, form, group_size):
    kind = (
        "no gate" if gate is None else f"{short(gate.dtype)} {ACTIVATIONS[form[0]]} {'before' if form[1] else 'after'}"
    )
    return f"{kind}, groups of {group_size},"


def short(dtype):
    return str(dtype).removeprefix("torch.")


def describe(x, weight, offset, rounding=0):
    kind = "none" if weight is None else short(weight.dtype)
    return f"{tuple(x.shape)} x={short(x.dtype)} weight={kind} offset={offset} {ROUNDINGS[rounding]}"


def plain_weight(width, dtype, seed=3):
    """Around 1, so that gains neither vanish nor hide what is multiplied by them."""
    return None if dtype is None else (1 + 0.3 * torch.randn(width, generator=generator(seed))).to(dtype)
