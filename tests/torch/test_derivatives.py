"""Derivatives of higher order, by functorch, and in forward mode."""

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from rmsnorm.spec import ROUNDINGS
from tests.support.bits import same
from tests.support.expected import (
    exact,
    gradients,
    higher_order_bound,
    leaves,
    near,
    tensor,
    within,
)

# PyTorch's own, when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


# ---------------------------------------------------------------- derivatives of higher order


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_first_and_second_derivatives_by_finite_differences(offset, rounding):
    # gradcheck's own tolerances, for its finite differences in float64.
    inputs = leaves(tensor(3, 5, dtype=torch.float64), tensor(5, dtype=torch.float64, seed=1))

    def norm(x, weight):
        return rms_norm(x, weight, 1e-5, weight_offset=offset, rounding=rounding)

    assert torch.autograd.gradcheck(norm, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(norm, inputs, check_fwd_over_rev=True)


def test_derivatives_of_the_fused_add_by_finite_differences():
    double = torch.float64
    inputs = leaves(tensor(3, 5, dtype=double), tensor(3, 5, dtype=double, seed=1), tensor(5, dtype=double, seed=2))
    for function in (add_rms_norm, lambda *t: add_rms_norm(*t)[0], lambda *t: add_rms_norm(*t)[1] ** 2):
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_third_derivatives_by_finite_differences():
    inputs = leaves(tensor(2, 4, dtype=torch.float64), tensor(4, dtype=torch.float64, seed=1))

    def gradient(x, weight):
        return torch.autograd.grad(rms_norm(x, weight).pow(3).sum(), (x, weight), create_graph=True)

    assert torch.autograd.gradgradcheck(gradient, inputs)


@pytest.mark.parametrize("with_weight", [True, False])
def test_gradient_penalty_in_float32(with_weight):
    x, weight, direction = tensor(3, 16), tensor(16, seed=1), tensor(3, 16, seed=2)

    def penalty(norm, direction, *inputs):
        (dx,) = torch.autograd.grad((norm(*inputs) * direction).sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), inputs)

    given = (x, weight) if with_weight else (x,)
    found = penalty(rms_norm, direction, *leaves(*given))
    expected = penalty(exact, direction.double(), *leaves(*(t.double() for t in given)))
    for a, b in zip(found, expected, strict=True):
        assert within(a, b, higher_order_bound(b, 16))


def test_second_derivative_with_respect_to_the_incoming_gradient():
    x, weight, dy = leaves(
        tensor(3, 16, dtype=torch.float64), tensor(16, dtype=torch.float64), tensor(3, 16, dtype=torch.float64)
    )

    def both(norm):
        dx, dweight = torch.autograd.grad(norm(x, weight), (x, weight), dy, create_graph=True)
        return torch.autograd.grad(dx.sum() + dweight.sum(), (dy, x, weight))

    for a, b in zip(both(rms_norm), both(exact), strict=True):
        # As above, in float64, and the judge has as much.
        assert within(a, b, 2 * 2.0**-29 * higher_order_bound(b, 16))


def test_second_derivative_of_frozen_parts():
    x, weight, dy = tensor(3, 16), tensor(16, seed=1), tensor(3, 16, seed=2)
    for frozen in ("weight", "x"):
        given = leaves(x)[0] if frozen == "weight" else leaves(weight)[0]
        y = rms_norm(given, weight) if frozen == "weight" else rms_norm(x, given)
        (first,) = torch.autograd.grad((y**2 * dy).sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        wide = leaves(given.double())[0]
        z = exact(wide, weight) if frozen == "weight" else exact(x, wide)
        (first,) = torch.autograd.grad((z**2 * dy).sum(), wide, create_graph=True)
        (expected,) = torch.autograd.grad(first.square().sum(), wide)
        assert within(second, expected, higher_order_bound(expected, 16))


# ---------------------------------------------------------------- functorch and forward mode

DOUBLE = {"dtype": torch.float64}


def test_vmap_over_x_and_over_weight():
    x, weight = tensor(5, 3, 16, **DOUBLE), tensor(16, seed=1, **DOUBLE)
    near(torch.func.vmap(lambda t: rms_norm(t, weight))(x), exact(x, weight))
    weights = torch.stack([weight, 2 * weight, weight - 1])
    near(torch.func.vmap(lambda v: rms_norm(x[0], v))(weights), exact(x[0], weights[:, None]))
    near(torch.func.vmap(rms_norm, in_dims=(0, None))(x, weight), exact(x, weight))
    y, h = torch.func.vmap(lambda t: add_rms_norm(t, t, weight))(x)
    near(y, exact(2 * x, weight))
    near(h, 2 * x)


def test_gradients_per_sample():
    x, weight = tensor(5, 3, 16, **DOUBLE), tensor(16, seed=1, **DOUBLE)

    def loss(norm):
        return lambda v, t: norm(t, v).pow(3).sum()

    found = torch.func.vmap(torch.func.grad(loss(rms_norm)), in_dims=(None, 0))(weight, x)
    for i in range(5):
        near(found[i], torch.func.grad(loss(exact))(weight, x[i]))


def test_jacobians_and_hessians():
    x, weight = tensor(6, **DOUBLE), tensor(6, seed=1, **DOUBLE)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        for argnum in (0, 1):
            near(transform(rms_norm, argnums=argnum)(x, weight), transform(exact, argnums=argnum)(x, weight))

    def loss(norm):
        return lambda t: norm(t, weight).pow(3).sum()

    near(torch.func.hessian(loss(rms_norm))(x), torch.func.hessian(loss(exact))(x))
    near(torch.autograd.functional.hessian(loss(rms_norm), x), torch.func.hessian(loss(exact))(x))
    near(
        torch.autograd.functional.jacobian(lambda t: rms_norm(t, weight), x, vectorize=True),
        torch.func.jacrev(exact)(x, weight),
    )


def test_forward_mode():
    x, weight, tangent = tensor(3, 6, **DOUBLE), tensor(6, seed=1, **DOUBLE), tensor(3, 6, seed=2, **DOUBLE)
    for found, expected in zip(
        torch.func.jvp(lambda t: rms_norm(t, weight), (x,), (tangent,)),
        torch.func.jvp(lambda t: exact(t, weight), (x,), (tangent,)),
        strict=True,
    ):
        near(found, expected)
    tangent_of_sum = torch.func.jvp(lambda t: exact(2 * t, weight), (x,), (tangent,))[1]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        y, h = add_rms_norm(dual, dual, weight)
        near(torch.autograd.forward_ad.unpack_dual(h).tangent, 2 * tangent)
        near(torch.autograd.forward_ad.unpack_dual(y).tangent, tangent_of_sum)


def test_vjp_of_the_module():
    norm = RMSNorm(6, **DOUBLE)
    x, dy = tensor(3, 6, **DOUBLE), tensor(3, 6, seed=1, **DOUBLE)
    y, pull = torch.func.vjp(
        lambda parameters, t: torch.func.functional_call(norm, parameters, t), dict(norm.named_parameters()), x
    )
    expected, expected_pull = torch.func.vjp(exact, x, norm.weight)
    near(y, expected)
    dparameters, dx = pull(dy)
    near(dx, expected_pull(dy)[0])
    near(dparameters["weight"], expected_pull(dy)[1])


def test_batched_gradients():
    x, weight = leaves(tensor(3, 6, **DOUBLE), tensor(6, seed=1, **DOUBLE))
    dys = tensor(4, 3, 6, seed=2, **DOUBLE)
    found = torch.autograd.grad(rms_norm(x, weight), (x, weight), dys, is_grads_batched=True)
    for i in range(4):
        for a, b in zip(found, torch.autograd.grad(exact(x, weight), (x, weight), dys[i]), strict=True):
            near(a[i], b)
    # In float32 each is what it is alone.
    x, weight = leaves(x.float(), weight.float())
    found = torch.autograd.grad(rms_norm(x, weight), (x, weight), dys.float(), is_grads_batched=True)
    for i in range(4):
        for a, b in zip(found, gradients(dys[i].float(), x.detach(), weight.detach()), strict=True):
            same(a[i], b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batched_gradients_are_differentiable(dtype):
    x, weight, dys = tensor(3, 6), tensor(6, seed=1), tensor(4, 3, 6, seed=2)

    def second(norm, *inputs):
        first = torch.autograd.grad(
            norm(*inputs), inputs, dys.to(inputs[0].dtype), is_grads_batched=True, create_graph=True
        )
        return torch.autograd.grad([t.square().sum() for t in first], inputs)

    expected = second(exact, *leaves(x.double(), weight.double()))
    for a, b in zip(second(rms_norm, *leaves(x.to(dtype), weight.to(dtype))), expected, strict=True):
        assert within(a, b, 4 * higher_order_bound(b, 6))  # four gradients are summed
