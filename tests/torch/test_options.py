"""rms_norm and RMSNorm with a bias, with statistics of a part of the row, and over another dimension than the last."""

import itertools
import math

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, gated_rms_norm, rms_norm
from rmsnorm.numerics import reference
from rmsnorm.numerics.fixed_sum import sum_rows
from rmsnorm.spec import ROUNDINGS, NormSpec
from tests.support.bits import bits_equal
from tests.support.rows import DTYPES, all_rows

WEIGHTS = (None, *DTYPES)


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(function, tensors, **options):
    """y, and the gradients of what there is."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves, **options)
    dy = made(*y.shape, dtype=y.dtype, seed=9)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)]


def same(found, expected):
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert bits_equal(a, b), index


# ---------------------------------------------------------------- the bias


def with_bias(x, weight, bias, **options):
    return rms_norm(x, weight, bias=bias, **options)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_in_float32_before_the_last_rounding(dtype, rounding):
    for weight_dtype, bias_dtype in itertools.product(WEIGHTS, DTYPES):
        x, bias = made(3, 70, 40, dtype=dtype), made(40, dtype=bias_dtype, seed=2)
        weight = None if weight_dtype is None else made(40, dtype=weight_dtype, seed=1)
        options = {"weight_offset": 0.5, "rounding": rounding}

        def apart(x, weight, bias, options=options):
            n = rms_norm(x.float() if options["rounding"] == "once" else x, weight, **options)
            result = x.dtype if options["rounding"] == "once" else n.dtype
            return (n.float() + bias.float().expand(x.shape)).to(result)

        y, *gradients, _ = results(apart, [x, weight, bias])
        found = results(with_bias, [x, weight, bias], **options)
        same(found[:-1], [y, *gradients])
        assert bits_equal(found[-1], sum_rows(made(*y.shape, dtype=y.dtype, seed=9).float()).to(bias_dtype))


def test_a_bias_with_every_other_option():
    x, weight, bias = made(2, 3, 4, 6), made(4, 6, seed=1), made(4, 6, seed=2)
    assert bits_equal(rms_norm(x, weight, bias=bias), rms_norm(x, weight) + bias)
    assert bits_equal(rms_norm(x, bias=bias, normalized_shape=(4, 6)), rms_norm(x, normalized_shape=(4, 6)) + bias)
    for options in ({"group_size": 3}, {"partial": 4}, {"weight_offset": 1.0}):
        assert bits_equal(rms_norm(x, weight[0], bias=bias[0], **options), rms_norm(x, weight[0], **options) + bias[0])


# ---------------------------------------------------------------- partial statistics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "counted"), [(1, 1), (7, 3), (33, 32), (64, 1), (127, 100), (1000, 250), (4093, 4092)]
)
def test_partial_statistics_have_the_bits_of_the_reference(width, counted, dtype):
    x = all_rows(width, dtype, seed=width)
    dy, partial = made(*x.shape, dtype=dtype, seed=9), 0 if counted == width else counted
    for index, (rounding, weight_dtype) in enumerate(itertools.product(range(3), WEIGHTS)):
        weight = None if weight_dtype is None else made(width, dtype=weight_dtype, seed=1)
        spec = NormSpec(1e-6, (0.0, 1.0)[index % 2], rounding, partial=partial)
        options = {"weight_offset": spec.weight_offset, "rounding": ROUNDINGS[rounding], "partial": counted}
        y, rstd = reference.forward(x, None, weight, spec)
        dx, _, dweight = reference.backward(dy.to(y.dtype), x, None, rstd, weight, None, spec)
        found = results(rms_norm, [x, weight], **options)
        same(found[:1], [y])
        incoming = made(*y.shape, dtype=y.dtype, seed=9)
        dx, _, dweight = reference.backward(incoming, x, None, rstd, weight, None, spec)
        same(found[1:], [dx] if weight is None else [dx, dweight])


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_statistics_are_those_of_the_first_elements(dtype):
    x = made(50, 96, dtype=dtype)
    head, tail = x[:, :32], x[:, 32:]
    y = rms_norm(x, partial=32)
    assert bits_equal(y[:, :32].contiguous(), rms_norm(head))
    assert bits_equal(rms_norm(x, partial=1 / 3), y)
    assert bits_equal(rms_norm(x, partial=0.33), y)  # 31.68, up to the next integer
    changed = torch.cat((head, tail * 3), -1)
    assert bits_equal(rms_norm(changed, partial=32)[:, :32].contiguous(), rms_norm(head))
    assert bits_equal(rms_norm(x, partial=96), rms_norm(x))
    assert bits_equal(rms_norm(x, partial=1.0), rms_norm(x))


def test_partial_statistics_lie_within_the_roundings_of_vllms_formula():
    """variance_size of vLLM's RMSNorm, here in float64: rstd, x_hat and the gain are rounded, 2^-24 each."""
    x, weight = made(50, 96), made(96, seed=1)
    wide = x.double()
    variance = wide[:, :40].square().mean(-1, keepdim=True)
    expected = wide * torch.rsqrt(variance + 1e-6) * weight.double()
    assert ((rms_norm(x, weight, partial=40).double() - expected).abs() <= 3.01 * 2.0**-24 * expected.abs()).all()


def test_derivatives_of_partial_statistics():
    tensors = [t.double().requires_grad_() for t in (made(3, 7), made(7, seed=1), made(7, seed=2))]
    assert torch.autograd.gradcheck(
        lambda *t: with_bias(*t, partial=3), tensors, check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(lambda *t: with_bias(*t, partial=3), tensors, check_batched_grad=True)
    # In float32 too: tangents and gradients of gradients come from the decomposition there.
    x, direction = made(3, 7), made(3, 7, seed=3)
    tangent = torch.func.jvp(lambda x: rms_norm(x, partial=3), (x,), (direction,))[1]
    exact = torch.func.jvp(lambda x: rms_norm(x, partial=3), (x.double(),), (direction.double(),))[1]
    torch.testing.assert_close(tangent.double(), exact, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- another dimension


def over_axis(x, weight, bias=None, axis=1, **options):
    """The axis moved to the end, and back."""
    return rms_norm(x.movedim(axis, -1).contiguous(), weight, bias=bias, **options).movedim(-1, axis)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_axis_has_the_bits_of_moving_it(dtype, rounding):
    shapes = [
        ((2, 5, 3, 7), 1),
        ((3, 64, 16, 16), 1),
        ((1, 200, 130), -2),
        ((40, 6), 0),
        ((2, 3, 4, 5, 6), 1),
        ((2, 0), 0),
    ]
    for index, (shape, axis) in enumerate(shapes[:5]):
        x, cols = made(*shape, dtype=dtype), shape[axis]
        weight_dtype = WEIGHTS[index % 4]
        weight = None if weight_dtype is None else made(cols, dtype=weight_dtype, seed=1)
        bias = made(cols, seed=2) if index % 2 else None
        for view in (x, x.transpose(0, -1).contiguous().transpose(0, -1), x.flip(0)):
            options = {"axis": axis, "rounding": rounding, "partial": 3 if index == 2 else None}
            found = results(rms_norm, [view, weight], bias=bias, **options)
            same(found, results(over_axis, [view, weight], bias=bias, **options))
            assert found[0].stride() == view.stride()


def test_an_axis_is_read_where_it_is():
    """Nothing of the input's size is made beside y, and y lies as x does."""
    x = made(2, 64, 32, 32)
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        y = rms_norm(x, axis=1)
    made_there = [e.cpu_memory_usage for e in profile.events() if e.cpu_memory_usage > 0]
    assert y.is_contiguous()
    assert max(made_there) < 1.1 * x.nbytes
    assert sum(made_there) < 1.5 * x.nbytes


def test_strided_columns_of_every_function_and_derivative():
    x, residual = made(64, 300).t(), made(64, 300, seed=1).t()
    weight = made(64, seed=2)
    plain = [x.contiguous(), residual.contiguous(), weight]
    same(*(results(lambda *t: sum(add_rms_norm(*t)), tensors) for tensors in ([x, residual, weight], plain)))
    same(*(results(lambda *t: gated_rms_norm(*t), tensors) for tensors in ([x, residual, weight], plain)))


def test_an_axis_in_compiled_code_and_under_transforms():
    x, weight = made(2, 24, 5, 5), made(24, seed=1)
    expected = results(over_axis, [x, weight])
    same(results(torch.compile(rms_norm, fullgraph=True), [x, weight], axis=1), expected)
    assert bits_equal(torch.vmap(lambda x: rms_norm(x, weight, axis=0))(x), expected[0])
    out = torch.empty_like(x)
    assert rms_norm(x, weight, axis=1, out=out) is out
    assert bits_equal(out, expected[0])


# ---------------------------------------------------------------- modules and refusals


def test_the_module():
    x = made(2, 24, 5, 5)
    layer = RMSNorm(24, bias=True, axis=1, partial=0.5)
    torch.nn.init.normal_(layer.bias)
    assert list(layer.state_dict()) == ["bias", "weight"]
    assert repr(layer) == "RMSNorm(24, eps=1e-06, partial=0.5, axis=1, bias=True)"
    expected = rms_norm(x, layer.weight, bias=layer.bias, axis=1, partial=math.ceil(0.5 * 24))
    assert bits_equal(layer(x).detach(), expected.detach())
    with pytest.raises(ValueError, match="a residual is not offered"):
        layer(x, x)
    assert list(RMSNorm(24).state_dict()) == ["weight"]
    assert bits_equal(RMSNorm(24, elementwise_affine=False, axis=1)(x), rms_norm(x, axis=1))
    for option in ({"bias": True}, {"partial": 3}, {"axis": 1}):
        with pytest.raises(ValueError, match=f"memory_efficient=True is not offered with {next(iter(option))}"):
            RMSNorm(24, memory_efficient=True, **option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial": 0}, r"partial must be an integer from 1 to the last dimension 8, or a float in \(0, 1\], got 0"),
        ({"partial": 9}, "partial must be"),
        ({"partial": 1.5}, "partial must be"),
        ({"partial": True}, "partial must be"),
        ({"partial": 4, "group_size": 4}, "partial is not offered with group_size"),
        ({"bias": torch.ones(7)}, r"bias must end in \(8,\)"),
        ({"bias": torch.ones(4, 8)}, r"bias must have shape \(8,\), got \(4, 8\)"),
        ({"bias": torch.ones(8), "out": torch.ones(4, 8)}, "out is not offered with bias"),
        ({"axis": 2}, "axis must be an integer from -2 to 1, got 2"),
        ({"axis": "channels"}, "axis must be an integer"),
        ({"axis": 0, "normalized_shape": 4}, "axis is one dimension"),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(made(4, 8), **options)
