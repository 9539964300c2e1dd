"""Gradients of the public functions: to the bit by the reference, and the reference's own against float64 autograd."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm import add_rms_norm, rms_norm
from rmsnorm.numerics import blocks
from rmsnorm.numerics import reference as definition
from rmsnorm.ops import fallback
from rmsnorm.spec import ROUNDINGS
from tests.support import reference
from tests.support.bits import same
from tests.support.expected import DTYPES, exact, gradient_bounds, gradients, leaves, tensor, within


def judged(dy, x, weight=None, eps=1e-6, weight_offset=0.0, dh=None):
    """Gradients by PyTorch's autograd of the formula in float64."""
    inputs = leaves(x.double()) if weight is None else leaves(x.double(), weight.double())
    y = exact(*inputs, eps=eps, weight_offset=weight_offset)
    found = torch.autograd.grad(y, inputs, dy.double())
    dx = found[0] if dh is None else found[0] + dh.double()
    return dx, (found[1] if weight is not None else None)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(DTYPES, (None, *DTYPES))))
def test_gradients_are_the_references_and_near_those_of_float64(x_dtype, w_dtype, offset, rounding):
    # 300 rows are eight leaves of dweight. Gains of 0.5 to 2, of both signs, and a few of zero.
    x = tensor(300, 33, dtype=x_dtype, scale=3.0)
    weight = None if w_dtype is None else tensor(33, seed=1).sign() * torch.linspace(0, 2, 33)
    weight = None if weight is None else weight.to(w_dtype)
    result = reference.result_dtype(x, weight, rounding)
    dy = tensor(300, 33, dtype=result, seed=2)
    inputs = leaves(x) if weight is None else leaves(x, weight)
    y = rms_norm(*inputs, weight_offset=offset, rounding=rounding)
    found = torch.autograd.grad(y, inputs, dy)

    kernel_dy = dy.float() if x_dtype != torch.float64 == result else dy
    narrow = weight.float() if weight is not None and x_dtype != torch.float64 == w_dtype else weight
    dx, dweight = gradients(kernel_dy, x, narrow, weight_offset=offset)
    same(found[0], dx)
    if weight is not None:
        same(found[1], dweight.to(w_dtype))
    # Narrowed to float32, as it is with x of fewer bits, a float64 weight is another weight.
    values = judged(kernel_dy, x, narrow, weight_offset=offset)
    bounds = gradient_bounds(kernel_dy, x, narrow, weight_offset=offset)
    assert within(found[0], values[0], bounds[0])
    if weight is not None:
        assert within(found[1], values[1], bounds[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-2, 3.0, None])
def test_gradients_of_any_eps_and_of_small_rows(eps, dtype):
    x, weight, dy = tensor(6, 64, dtype=dtype, scale=1e-2), tensor(64, seed=1), tensor(6, 64, dtype=dtype, seed=2)
    number = (2.0**-52 if dtype == torch.float64 else 2.0**-23) if eps is None else eps
    inputs = leaves(x, weight)
    found = torch.autograd.grad(rms_norm(*inputs, eps), inputs, dy)
    for actual, value, bound in zip(
        found, judged(dy, x, weight, number), gradient_bounds(dy, x, weight, number), strict=True
    ):
        assert within(actual, value, bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_over_several_dimensions(dtype):
    x, weight, dy = tensor(5, 3, 4, dtype=dtype), tensor(3, 4, seed=1), tensor(5, 3, 4, dtype=dtype, seed=2)
    inputs = leaves(x, weight)
    found = torch.autograd.grad(rms_norm(*inputs), inputs, dy)
    dx, dweight = gradients(dy, x, weight, dims=2)
    same(found[0], dx)
    same(found[1], dweight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_of_the_fused_add(dtype, offset):
    x, residual, weight = tensor(70, 33, dtype=dtype), tensor(70, 33, dtype=dtype, seed=1), tensor(33, seed=2)
    dy, dh = tensor(70, 33, dtype=dtype, seed=3), tensor(70, 33, dtype=dtype, seed=4)
    inputs = leaves(x, residual, weight)
    outputs = add_rms_norm(*inputs, weight_offset=offset)
    for used, given in (((0,), None), ((0, 1), dh)):
        found = torch.autograd.grad([outputs[i] for i in used], inputs, [(dy, dh)[i] for i in used], retain_graph=True)
        dx, dweight = gradients(dy, x + residual, weight, weight_offset=offset, dh=given)
        for actual, expected in zip(found, (dx, dx, dweight), strict=True):
            same(actual, expected)
        values = judged(dy, x + residual, weight, weight_offset=offset, dh=given)
        bounds = gradient_bounds(dy, x + residual, weight, weight_offset=offset, dh=given)
        for actual, value, bound in zip(found[1:], values, bounds, strict=True):
            assert within(actual, value, bound)
    # h alone passes its gradient on as it is, and the weight has no part in it.
    found = torch.autograd.grad(outputs[1], inputs, dh, allow_unused=True)
    same(found[0], dh)
    same(found[1], dh)
    assert found[2] is None


def test_huge_and_tiny_rows_have_the_gradients_of_ordinary_ones():
    # A power of two changes no rounding: dx is divided by it, dweight stays. eps is the only thing with a scale.
    x, weight, dy = tensor(9, 100), tensor(100, seed=1), tensor(9, 100, seed=2)
    plain = leaves(x, weight)
    expected = torch.autograd.grad(rms_norm(*plain, 0.0), plain, dy)
    for scale in (2.0**100, 2.0**-90):
        inputs = leaves(x * scale, weight)
        dx, dweight = torch.autograd.grad(rms_norm(*inputs, 0.0), inputs, dy)
        same(dx * scale, expected[0])
        same(dweight, expected[1])


def test_dweight_of_many_rows_does_not_drift():
    x = (tensor(16384, 32).abs() + 0.5).bfloat16()
    weight = torch.ones(32, dtype=torch.bfloat16)
    dy = (1 + 0.05 * tensor(16384, 32, seed=1)).bfloat16()
    inputs = leaves(x, weight)
    dweight = torch.autograd.grad(rms_norm(*inputs), inputs, dy)[1]
    assert within(dweight, judged(dy, x, weight)[1], gradient_bounds(dy, x, weight)[1])


# ---------------------------------------------------------------- which gradients


class Asked(TorchDispatchMode):
    """Records which gradients the operator is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.rmsnorm.backward.default:
            self.asked.append(args[-2:])
        return function(*args, **(kwargs or {}))


def test_what_is_frozen_costs_nothing():
    x, weight, dy = (tensor(*s, seed=i) for i, s in enumerate(((6, 32), (32,), (6, 32))))
    dx, dweight = gradients(dy, x, weight)

    a = x.clone().requires_grad_()
    rms_norm(a, weight).backward(dy)
    same(a.grad, dx)
    b = weight.clone().requires_grad_()
    rms_norm(x, b).backward(dy)
    same(b.grad, dweight)
    assert weight.grad is None
    assert x.grad is None
    c = x.clone().requires_grad_()

    with Asked() as spy:
        rms_norm(a, weight).backward(dy)
        rms_norm(x, b).backward(dy)
        add_rms_norm(c, x, weight)[0].backward(dy)
        add_rms_norm(x, c, weight)[0].backward(dy)
        add_rms_norm(x, x, b)[0].backward(dy)
        rms_norm(c).backward(dy)
    assert spy.asked == [(True, False), (False, True), (True, False), (True, False), (False, True), (True, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gated", [False, True])
def test_the_fallback_sums_no_rows_for_a_frozen_weight(dtype, gated, monkeypatch):
    x, dy = tensor(6, 32).to(dtype), tensor(6, 32, seed=1).to(dtype)
    gate, weight, rstd = x if gated else None, torch.ones(32, dtype=dtype), torch.ones(6, 1, dtype=dtype)

    def gradients_of(need_dweight):
        if gated:
            options = 0.0, 0, 0, False, True, True, need_dweight
            return fallback.gated_backward(dy, x, gate, rstd, weight, None, *options)
        return fallback.backward(dy, x, rstd, weight, 0.0, None, None, True, need_dweight)

    *expected, _ = gradients_of(True)
    for module in (blocks, definition):
        monkeypatch.setattr(module, "sum_rows", None)  # a call of it fails
    *found, dweight = gradients_of(False)
    assert dweight is None
    for a, b in zip(found, expected, strict=True):
        same(a, b)


def test_weight_alone_gets_its_gradient_while_the_residual_passes():
    x, weight = tensor(6, 32), tensor(32, seed=1)
    y, h = add_rms_norm(x, x, weight.requires_grad_())
    (y.sum() + h.sum()).backward()
    same(weight.grad, gradients(torch.ones(6, 32), 2 * x, weight.detach())[1])


# ---------------------------------------------------------------- incoming gradients of every kind

INCOMING = {
    "one number": lambda: torch.ones(()).expand(3, 8, 64),
    "one row": lambda: tensor(64, seed=2).expand(3, 8, 64),
    "one column": lambda: tensor(3, 8, 1, seed=2).expand(3, 8, 64),
    "every second column": lambda: tensor(3, 8, 128, seed=3)[..., ::2],
    "slice of columns": lambda: tensor(3, 8, 99, seed=3)[..., 5:69],
    "transposed rows": lambda: tensor(8, 3, 64, seed=4).transpose(0, 1),
    "transposed columns": lambda: tensor(3, 64, 8, seed=5).transpose(1, 2),
    "negated view": lambda: tensor(3, 8, 64, seed=6)._neg_view(),
    "zeros that are not there": lambda: torch._efficientzerotensor(3, 8, 64),
    "not finite": lambda: tensor(3, 8, 64, seed=7) / 0.0,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", INCOMING)
def test_any_incoming_gradient(kind, dtype):
    x, weight = tensor(3, 8, 64, dtype=dtype), tensor(64, seed=1)
    dy = INCOMING[kind]()
    dy = dy if dtype == torch.float32 else dy.to(dtype)
    inputs = leaves(x, weight)
    torch.autograd.backward(rms_norm(*inputs), dy)
    dense = torch.zeros(3, 8, 64, dtype=dtype) if kind.startswith("zeros") else dy.clone()
    dx, dweight = gradients(dense, x, weight)
    same(inputs[0].grad, dx)
    same(inputs[1].grad, dweight)
    fused = leaves(x, x, weight)
    torch.autograd.backward(add_rms_norm(*fused), [dy, dy])
    dx, dweight = gradients(dense, x + x, weight, dh=dense)
    same(fused[0].grad, dx)
    same(fused[2].grad, dweight)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows_have_empty_gradients_and_zero_dweight(shape):
    for dtype in DTYPES:
        inputs = leaves(tensor(*shape, dtype=dtype), tensor(*shape, dtype=dtype), tensor(8, dtype=dtype))
        y, h = add_rms_norm(*inputs)
        torch.autograd.backward([y, h], [torch.ones_like(y), torch.ones_like(h)])
        assert inputs[0].grad.shape == inputs[1].grad.shape == torch.Size(shape)
        same(inputs[2].grad, torch.zeros(8, dtype=dtype))


def test_strided_inputs_have_the_gradients_of_dense_ones():
    weight = tensor(16, seed=1)
    for view in (
        lambda t: t.transpose(0, 1),
        lambda t: t[..., ::2],
        lambda t: t[:, 1:3, 3:],
        lambda t: t.expand(4, 5, 6, 32),
    ):
        base = leaves(tensor(5, 6, 32))[0]
        x = view(base)[..., :16]
        dy = tensor(*x.shape, seed=2)
        rms_norm(x, weight).backward(dy)
        other = leaves(base)[0]
        y = view(other)[..., :16]
        y.backward(gradients(dy, y.detach().contiguous(), weight)[0])
        same(base.grad, other.grad)
