"""memory_efficient=True: training that keeps y and rebuilds x from it."""

from itertools import product

import pytest
import torch

from rmsnorm import checked
from rmsnorm.numerics import fixed_sum
from rmsnorm.ops import autograd
from rmsnorm.spec import ROUNDINGS, make_spec
from tests.support import reference
from tests.support.bits import same
from tests.support.expected import DTYPES, HALF_A_SUBNORMAL, U, gradients, leaves, near, tensor, within


def remembered(x, weight, dy, dh=None, **options):
    """Gradients of a `memory_efficient` norm."""
    inputs = leaves(x) if weight is None else leaves(x, weight)
    y, _ = checked.normalize(inputs[0], None, None, *(inputs[1:] or [None]), make_spec(**options), None, True)
    return y.detach(), torch.autograd.grad(y, inputs, dy)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(DTYPES, (None, *DTYPES[:3]))))
def test_memory_efficient_gradients_are_those_of_the_x_rebuilt_from_y(x_dtype, w_dtype, offset, rounding):
    x = tensor(70, 33, dtype=x_dtype, scale=3.0)
    weight = None if w_dtype is None else (0.3 * tensor(33, seed=1)).exp().to(w_dtype)
    result = reference.result_dtype(x, weight, rounding)
    dy = tensor(70, 33, dtype=result, seed=2)
    y, found = remembered(x, weight, dy, weight_offset=offset, rounding=rounding)
    expected, rstd = reference.forward(x, weight, 1e-6, offset, rounding)
    same(y, expected)
    rebuilt = reference.rebuild(y, rstd, weight, offset, x_dtype)
    dx, dweight = reference.backward(dy, rebuilt, rstd, weight, offset)
    same(found[0], dx)
    if weight is not None:
        same(found[1], dweight)
    # "To within y's own rounding": y is off by 3u (4u with an offset) of the arithmetic and by its roundings to 16 bits
    # (that of x_hat is one more); dividing takes three more u, of the gain and the quotients, and rounds to x's dtype.
    # Where y or x_hat is subnormal its rounding is absolute; the smallest gain here is above 1/4.
    inner = {"once": result, "before_scale": x_dtype, "weight_dtype": result if weight is None else w_dtype}[rounding]
    relative = 7 * U[fixed_sum.compute_dtype(x)] + U[inner] + U[result] + U[x_dtype]
    absolute = 4 * (HALF_A_SUBNORMAL[inner] + HALF_A_SUBNORMAL[result]) / rstd.double() + HALF_A_SUBNORMAL[x_dtype]
    assert within(rebuilt, x.double(), 1.01 * relative * x.double().abs() + absolute)


@pytest.mark.parametrize("gain", [0.0, 2.0**-11, 2.0**11, float("nan"), float("inf")])
def test_memory_efficient_keeps_x_where_a_gain_would_lose_it(gain):
    x, dy = tensor(9, 16), tensor(9, 16, seed=2)
    weight = tensor(16, seed=1).exp()
    weight[3] = gain
    _, found = remembered(x, weight, dy)
    dx, dweight = gradients(dy, x, weight)
    same(found[0], dx)
    same(found[1], dweight)
    # With an offset it is the gain that counts.
    _, found = remembered(x, weight - 1, dy, weight_offset=1.0)
    for actual, expected in zip(found, gradients(dy, x, weight - 1, weight_offset=1.0), strict=True):
        same(actual, expected)


def test_memory_efficient_of_the_largest_and_smallest_gains_it_inverts():
    x, dy = tensor(9, 16), tensor(9, 16, seed=2)
    weight = torch.full((16,), autograd.SMALLEST_GAIN)
    weight[::2] = -autograd.LARGEST_GAIN
    assert autograd.can_rebuild(weight, make_spec())
    y, found = remembered(x, weight, dy)
    rstd = reference.forward(x, weight, 1e-6, 0.0, "once")[1]
    same(found[0], reference.backward(dy, reference.rebuild(y, rstd, weight, 0.0, x.dtype), rstd, weight, 0.0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_efficient_with_batched_incoming_gradients(dtype):
    x, weight, dys = (
        tensor(3, 8, dtype=dtype),
        tensor(8, dtype=dtype, seed=1).exp(),
        tensor(4, 3, 8, dtype=dtype, seed=2),
    )
    inputs = leaves(x, weight)
    y, _ = checked.normalize(inputs[0], None, None, inputs[1], make_spec(), None, True)
    found = torch.autograd.grad(y, inputs, dys, is_grads_batched=True, retain_graph=True)
    for i in range(4):
        for a, b in zip(found, torch.autograd.grad(y, inputs, dys[i], retain_graph=True), strict=True):
            if dtype == torch.float32:
                same(a[i], b)
            else:
                near(a[i], b)


def test_memory_efficient_refuses_a_second_derivative():
    inputs = leaves(tensor(3, 8), tensor(8, seed=1).exp())
    y, _ = checked.normalize(inputs[0], None, None, inputs[1], make_spec(), None, True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(y.sum(), inputs, create_graph=True)


def test_memory_efficient_rows_of_zero_infinity_and_none():
    x = tensor(6, 16)
    x[1], x[2, 3], x[3, 4] = 0.0, float("inf"), float("nan")
    weight, dy = tensor(16, seed=1).exp(), tensor(6, 16, seed=2)
    _, found = remembered(x, weight, dy)
    plain = gradients(dy, x, weight)[0]
    assert found[0][1].isfinite().all()
    same(found[0].isnan(), plain.isnan())
    _, found = remembered(tensor(0, 16), weight, tensor(0, 16))
    same(found[1], torch.zeros(16))
