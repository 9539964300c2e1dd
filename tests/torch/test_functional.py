"""`rms_norm` and `add_rms_norm`: shapes, eps and offset, and the way a call takes. Bad input has its own file."""

import math
from itertools import product

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, checked, rms_norm
from rmsnorm.ops.library import operators
from rmsnorm.spec import ROUNDINGS, make_spec
from tests.support.bits import same
from tests.support.expected import DTYPES, gradients, normalized, tensor, within

SHAPES = ((16,), (3, 16), (2, 3, 16), (2, 1, 3, 16), (1, 2, 2, 3, 16))


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("shape", SHAPES)
def test_any_rank(shape):
    x, weight = tensor(*shape), tensor(16, seed=1)
    same(rms_norm(x, weight), normalized(x, weight))
    y, h = add_rms_norm(x, 0.5 * x, weight)
    same(y, normalized(h, weight))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_of_several_dimensions_normalises_over_all_of_them(dims, dtype):
    x = tensor(2, 5, 3, 4, dtype=dtype)
    weight = tensor(*x.shape[-dims:], dtype=dtype, seed=1)
    same(rms_norm(x, weight), normalized(x, weight, dims=dims))
    same(rms_norm(x, weight, normalized_shape=weight.shape), normalized(x, weight, dims=dims))
    y, h = add_rms_norm(x, x, weight)
    same(y, normalized(x + x, weight, dims=dims))
    same(h, x + x)


@pytest.mark.parametrize("shape", [4, (4,), [4], (3, 4), torch.Size([5, 3, 4]), (2, 5, 3, 4)])
def test_normalized_shape_says_what_no_weight_does(shape):
    x = tensor(2, 5, 3, 4)
    dims = 1 if isinstance(shape, int) else len(shape)
    same(rms_norm(x, normalized_shape=shape), normalized(x, dims=dims))


def test_integers_of_numpy_are_integers():
    numpy = pytest.importorskip("numpy")
    x = tensor(3, 4)
    same(rms_norm(x, normalized_shape=numpy.int64(4)), normalized(x))


def test_without_weight_the_last_dimension_is_normalised_by_a_gain_of_one():
    for x in (tensor(6, 32), tensor(32), tensor(2, 3, 1)):
        same(rms_norm(x), rms_norm(x, torch.ones(x.shape[-1])))
        same(rms_norm(x), normalized(x))


def test_several_dimensions_whose_rows_lie_apart():
    base = tensor(6, 5, 3, 8)
    for x in (base.transpose(0, 1), base[..., ::2], base[:, 1:, :, 3:7], base.permute(3, 2, 1, 0)):
        weight = tensor(*x.shape[-2:], seed=1)
        same(rms_norm(x, weight), normalized(x, weight, dims=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_may_have_any_strides(dtype):
    x = tensor(5, 8, dtype=dtype)
    square = tensor(8, 8, dtype=dtype, seed=2)
    for weight in (square[0].expand(2, 8).flatten()[::2], square[0, :1].expand(8), square[:, 1]):
        assert weight.stride() != (1,)
        same(rms_norm(x, weight), normalized(x, weight.contiguous()))
    same(rms_norm(tensor(3, 8, 8, dtype=dtype), square.t()), rms_norm(tensor(3, 8, 8, dtype=dtype), square.t().clone()))


def test_more_dimensions_than_the_kernels_hold_in_place():
    x = tensor(*[2] * 12, 3)
    x = x.permute(*reversed(range(12)), 12)
    same(rms_norm(x, tensor(3, seed=1)), normalized(x, tensor(3, seed=1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (0, 2, 64), (2, 3, 0, 8, 8)])
def test_no_rows_give_no_rows_and_zero_dweight(shape, dtype):
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    weight = torch.ones(64 if shape[-1] == 64 else (8, 8), requires_grad=True)
    y = rms_norm(x, weight)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    y, h = add_rms_norm(x, x, weight)
    assert y.shape == h.shape == x.shape


# ---------------------------------------------------------------- eps and offset


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-12, 1e-6, 1e-2, 3.0, 1e30, 1e300, 5e-324, -0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_is_used_as_it_is(eps, dtype):
    x, weight = tensor(6, 32, dtype=dtype, scale=1e-3), tensor(32, seed=1)
    x[1] = 0
    x[2] *= 1000
    weight = weight.double() if dtype == torch.float64 else weight
    same(rms_norm(x, weight, eps), normalized(x, weight, eps))
    y, h = add_rms_norm(x, x, weight, eps)
    same(y, normalized(h, weight, eps))


def test_eps_reads_numbers_and_text():
    numpy = pytest.importorskip("numpy")
    x = tensor(3, 8, scale=1e-2)
    for eps in ("1e-3", " 0.001 ", "1E-3", numpy.float64(1e-3), torch.tensor(1e-3, dtype=torch.float64)):
        same(rms_norm(x, None, eps), rms_norm(x, None, 1e-3))
        same(add_rms_norm(x, x, None, eps)[0], add_rms_norm(x, x, None, 1e-3)[0])
    same(rms_norm(x, None, numpy.float32(1e-3)), rms_norm(x, None, float(numpy.float32(1e-3))))
    same(rms_norm(x, None, 1), rms_norm(x, None, 1.0))
    same(rms_norm(x, None, numpy.int32(1)), rms_norm(x, None, 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_none_is_that_of_the_computation_dtype(dtype):
    x = tensor(8, 64, dtype=dtype, scale=1e-3)
    eps = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    same(rms_norm(x, None, None), rms_norm(x, None, eps))
    same(add_rms_norm(x, x, None, None)[0], rms_norm(x + x, None, eps))


def test_eps_stands_inside_the_root():
    x = torch.full((1, 16), 1e-4, dtype=torch.float64)
    y = rms_norm(x)
    assert within(y, torch.full_like(x, 1e-4 / math.sqrt(1e-8 + 1e-6)), 16 * 2.0**-53 * y.abs())


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_offset_is_added_to_the_weight_in_float32(dtype):
    x = tensor(64, 128, dtype=dtype)
    small = torch.full((128,), 2.0**-12, dtype=dtype)  # 1 + 2^-12 is 1 in 16 bits
    for offset in (1.0, -1.0, 0.1, 3, 1e-30):
        options = {"weight_offset": offset}
        same(rms_norm(x, small, **options), normalized(x, small, **options))
        gain = small.float() + offset
        same(rms_norm(x, small, **options), rms_norm(x, gain))


def test_zero_weight_with_offset_one_is_a_gain_of_one():
    for dtype in DTYPES:
        x, zero = tensor(4, 64, dtype=dtype), torch.zeros(64, dtype=dtype)
        same(rms_norm(x, zero, weight_offset=1.0), rms_norm(x))
        assert torch.equal(rms_norm(x, zero), torch.zeros_like(x))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_without_a_weight_there_is_nothing_to_add_an_offset_to(rounding):
    for dtype in DTYPES:
        x = tensor(4, 64, dtype=dtype)
        same(rms_norm(x, weight_offset=1.0, rounding=rounding), rms_norm(x))
        module = RMSNorm(64, elementwise_affine=False, weight_offset=1.0, rounding=rounding)
        same(module(x), rms_norm(x))


# ---------------------------------------------------------------- fused and unfused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fused_add_is_the_two_steps_to_the_bit(dtype, rounding):
    x, residual = tensor(33, 65, dtype=dtype), tensor(33, 65, dtype=dtype, seed=1, scale=30.0)
    weight = tensor(65, seed=2)
    dy, dh = tensor(33, 65, seed=3), tensor(33, 65, dtype=dtype, seed=4)
    options = {"weight_offset": 1.0, "rounding": rounding}

    def leaves():
        return [t.clone().requires_grad_() for t in (x, residual, weight)]

    fused = leaves()
    y, h = add_rms_norm(*fused, **options)
    dy = dy.to(y.dtype)
    torch.autograd.backward([y, h], [dy, dh])

    same(h.detach(), x + residual)
    same(y.detach(), rms_norm(x + residual, weight, **options))
    # One rounding of dx, after dh is added: the contract's, not that of two separate backward steps.
    dx, dweight = gradients(dy, x + residual, weight, weight_offset=1.0, dh=dh)
    same(fused[0].grad, dx)
    same(fused[1].grad, dx)
    same(fused[2].grad, dweight)

    # Where h goes nowhere else, dx too is what the two steps give.
    alone, apart = leaves(), leaves()
    add_rms_norm(*alone, **options)[0].backward(dy)
    rms_norm(apart[0] + apart[1], apart[2], **options).backward(dy)
    for a, b in zip(alone, apart, strict=True):
        same(a.grad, b.grad)


def test_residual_may_be_x():
    for dtype in DTYPES:
        x = tensor(5, 16, dtype=dtype)
        y, h = add_rms_norm(x, x)
        same(h, x + x)
        same(y, rms_norm(x + x))


# ---------------------------------------------------------------- the graph


def test_only_what_needs_a_gradient_has_one():
    x, weight = tensor(4, 8), tensor(8, seed=1)
    assert not rms_norm(x, weight).requires_grad
    assert not any(t.requires_grad for t in add_rms_norm(x, x, weight))
    assert rms_norm(x.clone().requires_grad_(), weight).requires_grad
    assert rms_norm(x, weight.clone().requires_grad_()).requires_grad
    y, h = add_rms_norm(x, x.clone().requires_grad_(), weight)
    assert y.requires_grad
    assert h.requires_grad
    with torch.no_grad():
        assert not rms_norm(x.clone().requires_grad_(), weight).requires_grad
    with torch.inference_mode():
        assert rms_norm(x, weight).is_inference()


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_and_inference_give_the_same_bits(dtype):
    x, weight = tensor(33, 100, dtype=dtype), tensor(100, seed=1)
    for rounding, offset in product(ROUNDINGS, (0.0, 1.0)):
        options = {"rounding": rounding, "weight_offset": offset}
        trained = rms_norm(x.clone().requires_grad_(), weight, **options)
        same(trained.detach(), rms_norm(x, weight, **options))
        y, h = add_rms_norm(x.clone().requires_grad_(), x, weight, **options)
        z, g = add_rms_norm(x, x, weight, **options)
        same(y.detach(), z)
        same(h.detach(), g)


# ---------------------------------------------------------------- the way a call takes


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_common_calls_go_straight_to_the_operator(dtype, rounding, monkeypatch):
    """At small sizes what `normalize` checks would cost more than the kernel, and no result would tell."""
    x, weight = tensor(4, 8, dtype=dtype), tensor(8, seed=1)
    module = RMSNorm(8, rounding=rounding)
    y, h = checked.normalize(x, x, None, weight, make_spec(rounding=rounding))
    assert h is not None
    monkeypatch.setattr(checked, "normalize", None)
    for residual in (x, x.clone().requires_grad_()):
        for found, expected in zip(add_rms_norm(x, residual, weight, rounding=rounding), (y, h), strict=True):
            same(found.detach(), expected)
        same(rms_norm(x + residual, weight, rounding=rounding).detach(), y)
        rms_norm(residual, None, 1e-5, weight_offset=1.0, rounding=rounding)
        add_rms_norm(x, residual, None, 1e-5, weight_offset=1.0, rounding=rounding)
        module(residual)
        module(x, residual)


@pytest.mark.parametrize("residual", [torch.ones(4, 9), torch.ones(8), torch.ones(4, 8, 1)])
def test_every_implementation_of_the_operator_refuses_what_would_be_broadcast(residual):
    x = tensor(4, 8)
    for operator in (operators.direct, operators.reference):
        with pytest.raises((RuntimeError, ValueError), match="residual must have x's"):
            operator.add_forward(x, residual, None, 1e-6)
    with pytest.raises(ValueError, match="residual must have x's"):
        operators.direct.add_forward(x.to("meta"), residual.to("meta"), None, 1e-6)
