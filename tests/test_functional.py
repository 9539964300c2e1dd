"""`rms_norm` and `add_rms_norm`: what every option gives, to the bit. Bad input has its own file."""

import math
import warnings
from itertools import product

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, functional, reference, rms_norm
from rmsnorm._ops import operators, status
from tests.bits import difference
from tests.expected import DTYPES, exact, gradients, normalized, tensor, within, y_bound

ROUNDINGS = reference.ROUNDINGS
SHAPES = ((16,), (3, 16), (2, 3, 16), (2, 1, 3, 16), (1, 2, 2, 3, 16))


def same(actual, expected):
    assert (found := difference(actual, expected)) is None, found


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


# ---------------------------------------------------------------- dtypes and roundings


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(DTYPES, DTYPES)))
def test_every_pair_of_dtypes(x_dtype, w_dtype, rounding):
    x, residual = tensor(5, 33, dtype=x_dtype), tensor(5, 33, dtype=x_dtype, seed=2)
    weight = tensor(33, dtype=w_dtype, seed=1)
    expected_dtype = {
        "once": x_dtype,
        "before_scale": torch.promote_types(x_dtype, w_dtype),
        "weight_dtype": w_dtype,
    }[rounding]
    for offset in (0.0, 1.0):
        options = {"weight_offset": offset, "rounding": rounding}
        y = rms_norm(x, weight, **options)
        assert y.dtype == expected_dtype
        same(y, normalized(x, weight, **options))
        assert within(y, exact(x, weight, weight_offset=offset), y_bound(y, x, weight, **options))
        y, h = add_rms_norm(x, residual, weight, **options)
        assert (y.dtype, h.dtype) == (expected_dtype, x_dtype)
        same(h, x + residual)
        same(y, normalized(h, weight, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_weight_every_rounding_gives_xs_dtype(dtype):
    x = tensor(5, 33, dtype=dtype)
    for rounding in ROUNDINGS:
        same(rms_norm(x, rounding=rounding), normalized(x))


def test_in_float32_all_roundings_agree():
    x, weight = tensor(9, 100), tensor(100, seed=1)
    for rounding in ROUNDINGS:
        same(rms_norm(x, weight, rounding=rounding), rms_norm(x, weight))


def test_before_scale_is_the_code_of_the_llama_family():
    x = tensor(64, 256, dtype=torch.bfloat16)
    for weight in (tensor(256, dtype=torch.bfloat16, seed=1), tensor(256, seed=1)):
        normed = rms_norm(x.float()).to(x.dtype)  # float32 inside, rounded to the input's dtype
        same(rms_norm(x, weight, rounding="before_scale"), weight * normed)


def test_weight_dtype_is_the_code_of_the_t5_family():
    for x_dtype, w_dtype in product(DTYPES[:3], DTYPES[:3]):
        x, weight = tensor(64, 256, dtype=x_dtype), tensor(256, dtype=w_dtype, seed=1)
        normed = rms_norm(x.float())
        if w_dtype in (torch.float16, torch.bfloat16):
            normed = normed.to(w_dtype)
        same(rms_norm(x, weight, rounding="weight_dtype"), weight * normed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_once_rounds_once(dtype):
    x, weight = tensor(64, 512, dtype=dtype), tensor(512, dtype=dtype, seed=1)
    y = rms_norm(x, weight)
    value = exact(x, weight)
    # Half a unit in the last place, and what three float32 roundings can add to it.
    spacing = torch.exp2(torch.floor(torch.log2(value.abs().clamp_min(torch.finfo(dtype).smallest_normal))))
    spacing *= torch.finfo(dtype).eps
    assert within(y, value, spacing / 2 + 3 * 2**-24 * 1.001 * value.abs())


@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(DTYPES, DTYPES)))
def test_mixed_dtypes_do_not_warn_and_give_each_its_own_gradient_dtype(x_dtype, w_dtype):
    x = tensor(4, 16, dtype=x_dtype).requires_grad_()
    weight = tensor(16, dtype=w_dtype, seed=1).requires_grad_()
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # PyTorch warns once per process otherwise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for rounding in ROUNDINGS:
                y = rms_norm(x, weight, rounding=rounding)
                z, h = add_rms_norm(x, x.detach(), weight, rounding=rounding)
                (y.double().sum() + z.double().sum() + h.double().sum()).backward()
    finally:
        torch.set_warn_always(always)
    assert (x.grad.dtype, weight.grad.dtype) == (x_dtype, w_dtype)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(x_dtype, amp_dtype):
    x, weight = tensor(4, 16, dtype=x_dtype), tensor(16, seed=1)
    plain = rms_norm(x, weight), *add_rms_norm(x, x, weight)
    with torch.autocast("cpu", dtype=amp_dtype):
        under = rms_norm(x, weight), *add_rms_norm(x, x, weight)
    for a, b in zip(under, plain, strict=True):
        same(a, b)


def test_float64_is_computed_in_float64():
    x, weight = tensor(20, 33, dtype=torch.float64), tensor(33, dtype=torch.float64, seed=1)
    y = rms_norm(x, weight)
    assert within(y, exact(x, weight), y_bound(y, x, weight))
    assert torch.autograd.gradcheck(rms_norm, (x[:2].requires_grad_(), weight.requires_grad_()))


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


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_of_a_row_does_not_matter(dtype):
    x = tensor(4, 1000, dtype=dtype).clamp(-4, 4)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal * 2**10
    if dtype == torch.float64:
        smallest = 2.0**-390  # below 2^-400 float64's sums leave float64
    for scale in (largest / 8, largest**0.5, 1.0, smallest):
        scale = 2.0 ** math.floor(math.log2(scale))  # exact, but for what becomes subnormal
        scaled = x * scale
        y = rms_norm(scaled, eps=0.0)
        assert y.isfinite().all()
        assert within(y, exact(scaled / scale, eps=0.0), y_bound(y, scaled / scale, eps=0.0))


def test_rows_of_zero_stay_zero_with_finite_gradients():
    for dtype in DTYPES:
        for eps in (1e-12, 1e-6, 0.1):
            x = tensor(5, 64, dtype=dtype)
            x[1], x[4] = 0, -0.0
            x.requires_grad_()
            weight = tensor(64, dtype=dtype, seed=1).requires_grad_()
            y = rms_norm(x, weight, eps)
            assert (y[1] == 0).all()
            assert (y[4] == 0).all()
            dy = tensor(5, 64, dtype=dtype, seed=2)
            dx, dweight = torch.autograd.grad(y, (x, weight), dy)
            # In float16, 1 / sqrt(1e-12) is more than there is.
            assert dx.isfinite().all() or (dtype == torch.float16 and eps == 1e-12)
            expected = gradients(dy, x.detach(), weight.detach(), eps)
            same(dx, expected[0])
            same(dweight, expected[1])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row(dtype, value):
    clean = tensor(7, 40, dtype=dtype)
    x, weight = clean.clone(), tensor(40, dtype=dtype, seed=1)
    x[3, 17] = value
    others = [0, 1, 2, 4, 5, 6]
    y = rms_norm(x, weight)
    same(y[others], rms_norm(clean, weight)[others])
    if math.isnan(value):
        assert y[3].isnan().all()
    else:
        assert y[3, 17].isnan()
        assert torch.equal(y[3].nan_to_num(0.0), torch.zeros_like(y[3]))

    z, _ = add_rms_norm(clean, x, weight)
    same(z[others], add_rms_norm(clean, clean, weight)[0][others])
    dx = {}
    for name, given in (("clean", clean), ("hurt", x)):
        leaf = given.clone().requires_grad_()
        rms_norm(leaf, weight).backward(tensor(7, 40, dtype=dtype, seed=2))
        dx[name] = leaf.grad
    same(dx["hurt"][others], dx["clean"][others])
    assert dx["hurt"][3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 1000])
def test_a_row_gives_the_same_bits_in_every_batch(dtype, width):
    x, residual, dy = (tensor(257, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = tensor(width, dtype=dtype, seed=3)

    def run(rows):
        leaf = x[rows].clone().requires_grad_()
        y = rms_norm(leaf, weight)
        y.backward(dy[rows])
        return y.detach(), leaf.grad, *add_rms_norm(x[rows], residual[rows], weight)

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(256, 257), slice(3, 5), slice(0, 100), slice(0, 257, 16)):
        for part, all_of_it in zip(run(rows), whole, strict=True):
            same(part, all_of_it[rows])
    order = torch.randperm(257, generator=torch.Generator().manual_seed(4))
    for part, all_of_it in zip(run(order), whole, strict=True):
        same(part, all_of_it[order])


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_permuting_the_columns_permutes_the_bits(dtype):
    x, weight, dy = tensor(9, 1000, dtype=dtype), tensor(1000, seed=1), tensor(9, 1000, dtype=dtype, seed=2)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    results = []
    for columns in (torch.arange(1000), order):
        a, b = x[:, columns].requires_grad_(), weight[columns].requires_grad_()
        y = rms_norm(a, b)
        y.backward(dy[:, columns])
        results.append((y.detach(), a.grad, b.grad))
    for plain, permuted in zip(*results, strict=True):
        same(permuted, plain[..., order])


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


# ---------------------------------------------------------------- memory of inputs and results


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_not_written_and_results_are_fresh(dtype):
    x, residual, weight = (tensor(*s, dtype=dtype, seed=i) for i, s in enumerate(((6, 32), (6, 32), (32,))))
    before = [t.clone() for t in (x, residual, weight)]
    versions = [t._version for t in (x, residual, weight)]
    y = rms_norm(x, weight)
    z, h = add_rms_norm(x, residual, weight)
    kept = h.clone()
    y.add_(1)
    z.add_(1)
    same(h, kept)
    h.add_(1)
    for t, b, v in zip((x, residual, weight), before, versions, strict=True):
        same(t, b)
        assert t._version == v


def test_incoming_gradients_are_not_written():
    for dtype in DTYPES:
        x, weight = tensor(6, 32, dtype=dtype).requires_grad_(), tensor(32, dtype=dtype, seed=1).requires_grad_()
        dy, dh = tensor(6, 32, dtype=dtype, seed=2), tensor(6, 32, dtype=dtype, seed=3)
        kept = dy.clone(), dh.clone()
        torch.autograd.backward(add_rms_norm(x, x.detach(), weight), [dy, dh])
        rms_norm(x, weight).backward(dy)
        same(dy, kept[0])
        same(dh, kept[1])


def test_result_is_laid_out_as_x_where_x_is_dense_with_adjacent_columns():
    weight = tensor(8, seed=1)
    for x in (tensor(4, 6, 8), tensor(6, 4, 8).transpose(0, 1), tensor(3, 2, 5, 8).permute(2, 0, 1, 3)):
        for y in (rms_norm(x, weight), *add_rms_norm(x, x, weight)):
            assert y.stride() == x.stride()


@pytest.mark.skipif(not status().compiled, reason="the reference leaves other layouts to PyTorch")
def test_result_is_contiguous_where_x_is_not_dense():
    weight = tensor(8, seed=1)
    for x in (tensor(4, 12)[:, :8], tensor(1, 8).expand(4, 8), tensor(8, 4).t(), tensor(4, 16)[:, ::2]):
        for y in (rms_norm(x, weight), *add_rms_norm(x, x, weight)):
            assert y.is_contiguous()


def test_views_with_a_pending_negation_are_read_as_what_they_show():
    x, weight = tensor(4, 8), tensor(8, seed=1)
    negated = torch.view_as_complex(tensor(4, 8, 2, seed=2)).conj().imag
    assert negated.is_neg()
    same(rms_norm(negated, weight), rms_norm(negated.clone(), weight))
    same(rms_norm(x, x[0]._neg_view()), rms_norm(x, -x[0]))
    same(add_rms_norm(negated, x, weight)[0], rms_norm(negated.clone() + x, weight))
    same(rms_norm(torch._efficientzerotensor(4, 8), weight), rms_norm(torch.zeros(4, 8), weight))


def test_slices_of_a_fused_projection():
    for dtype in DTYPES:
        projected = tensor(10, 16 * 32 + 2 * 4 * 32, dtype=dtype)
        weight = tensor(32, dtype=dtype, seed=1)
        q, k, v = projected.split([16 * 32, 4 * 32, 4 * 32], dim=-1)
        for part in (q, k, v):
            heads = part.unflatten(-1, (-1, 32))
            same(rms_norm(heads, weight), normalized(heads, weight))
            same(rms_norm(heads.transpose(0, 1), weight), normalized(heads.transpose(0, 1), weight))


def test_what_surrounds_a_row_is_not_read():
    for width in (1, 7, 31, 33, 127, 1000):
        for dtype in DTYPES:
            padded = torch.full((5, width + 13), math.nan, dtype=dtype)
            padded[:, 3 : width + 3] = tensor(5, width, dtype=dtype)
            weight = torch.full((width + 9,), math.nan, dtype=dtype)
            weight[4 : width + 4] = 1
            x = padded[:, 3 : width + 3]
            same(rms_norm(x, weight[4 : width + 4]), normalized(x.clone()))


def test_offsets_beyond_32_bits():
    # Two rows 2^31 elements apart in a buffer of which the system provides the touched pages alone.
    buffer = torch.empty(2**31 + 1024, dtype=torch.bfloat16)
    x = buffer.as_strided((2, 256), (2**31 + 256, 1))
    x.copy_(tensor(2, 256, dtype=torch.bfloat16))
    same(rms_norm(x), rms_norm(x.clone()))


# ---------------------------------------------------------------- out


def outs(shape, dtype):
    """Every kind of layout that an `out` may have."""
    *lead, d = shape
    yield "fresh", torch.full(shape, math.nan, dtype=dtype)
    yield "slice of columns", torch.full((*lead, d + 3), math.nan, dtype=dtype)[..., 1 : d + 1]
    yield "strided columns", torch.full((*lead, 2 * d), math.nan, dtype=dtype)[..., ::2]
    yield "every second row", torch.full((2 * lead[0], *lead[1:], d), math.nan, dtype=dtype)[::2]
    yield "transposed", torch.full(shape[::-1], math.nan, dtype=dtype).permute(*reversed(range(len(shape))))
    yield "negated view", torch.full(shape, math.nan, dtype=dtype)._neg_view()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16), (1, 1), (6, 1)])
def test_out_receives_the_result_whatever_its_layout(shape, dtype):
    x, weight = tensor(*shape, dtype=dtype), tensor(shape[-1], seed=1)
    expected = normalized(x, weight, 1e-5, weight_offset=1.0)
    for name, out in outs(shape, dtype):
        returned = rms_norm(x, weight, 1e-5, weight_offset=1.0, out=out)
        assert returned is out, name
        same(out.clone(), expected)


def test_out_leaves_alone_what_lies_between_its_elements():
    buffer = torch.full((8, 40), 7.0)
    x = tensor(4, 16)
    rms_norm(x, out=buffer[::2, 3:19])
    same(buffer[::2, 3:19].clone(), normalized(x))
    buffer[::2, 3:19] = 7.0
    assert torch.equal(buffer, torch.full((8, 40), 7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_may_be_x(dtype):
    weight = tensor(16, seed=1)
    makers = (
        lambda: tensor(6, 16, dtype=dtype),
        lambda: tensor(16, dtype=dtype),
        lambda: tensor(6, 32, dtype=dtype)[:, ::2],
        lambda: tensor(6, 40, dtype=dtype)[:, 5:21],
        lambda: tensor(16, 6, dtype=dtype).t(),
        lambda: tensor(6, 2, 16, dtype=dtype).transpose(0, 1),
        lambda: tensor(0, 16, dtype=dtype),
    )
    for make in makers:
        expected = normalized(make(), weight)
        x = make()
        assert rms_norm(x, weight, out=x) is x
        same(x.clone(), expected)
        x = make()
        rms_norm(x, weight, out=x.view_as(x))  # another tensor of the same elements
        same(x.clone(), expected)


def test_out_may_be_x_read_by_a_residual_free_chain():
    x = tensor(300, 512)
    y = x.clone()
    for step in range(3):
        x = rms_norm(x, tensor(512, seed=step))
        rms_norm(y, tensor(512, seed=step), out=y)
    same(y, x)


def test_out_over_several_dimensions():
    x, weight = tensor(5, 3, 4), tensor(3, 4, seed=1)
    for out in (torch.empty(5, 3, 4), torch.empty(4, 3, 5).permute(2, 1, 0), x):
        expected = normalized(x, weight, dims=2)
        assert rms_norm(x, weight, out=out) is out
        same(out.clone(), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(DTYPES, DTYPES)))
def test_out_has_the_dtype_that_the_rounding_gives(x_dtype, w_dtype, rounding):
    x, weight = tensor(4, 16, dtype=x_dtype), tensor(16, dtype=w_dtype, seed=1)
    expected = normalized(x, weight, rounding=rounding)
    same(rms_norm(x, weight, rounding=rounding, out=torch.empty_like(expected)), expected)


def test_out_may_lie_between_the_elements_of_x():
    buffer = tensor(6, 32)
    expected = normalized(buffer[:, ::2])
    rms_norm(buffer[:, ::2], out=buffer[:, 1::2])
    same(buffer[:, 1::2].clone(), expected)
    buffer = tensor(6, 32)
    expected = normalized(buffer[:, :16])
    rms_norm(buffer[:, :16], out=buffer[:, 16:])
    same(buffer[:, 16:].clone(), expected)


def test_out_is_counted_as_changed_in_place():
    weight = tensor(8, seed=1)
    for make in (lambda: torch.empty(4, 8), lambda: torch.empty(4, 16)[:, ::2], lambda: torch.empty(4, 8).double()):
        out = make()
        version = out._version
        rms_norm(tensor(4, 8, dtype=out.dtype), weight, out=out)
        assert out._version > version
    # So that autograd notices: here exp's backward needs the values that are gone.
    leaf = tensor(4, 8).requires_grad_()
    values = leaf.exp()
    with torch.no_grad():
        rms_norm(values, weight, out=values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_out_works_in_inference_mode():
    with torch.inference_mode():
        x = tensor(4, 8)
        expected = normalized(x)
        assert rms_norm(x, out=x) is x
        same(x, expected)


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
    y, h = functional.normalize(x, x, weight, 1e-6, 0.0, rounding, None)
    assert h is not None
    monkeypatch.setattr(functional, "normalize", None)
    for residual in (x, x.clone().requires_grad_()):
        for found, expected in zip(add_rms_norm(x, residual, weight, rounding=rounding), (y, h), strict=True):
            same(found.detach(), expected)
        same(rms_norm(x + residual, weight, rounding=rounding).detach(), y)
        rms_norm(residual, None, 1e-5, weight_offset=1.0, rounding=rounding)
        add_rms_norm(x, residual, None, 1e-5, weight_offset=1.0, rounding=rounding)
        module(residual)
        module(x, residual)


@pytest.mark.parametrize("residual", [torch.ones(4, 9), torch.ones(8), torch.ones(4, 8).half(), torch.ones(4, 8, 1)])
def test_every_implementation_of_the_operator_refuses_what_would_be_broadcast(residual):
    x = tensor(4, 8)
    for operator in (operators.direct, operators.reference):
        with pytest.raises((RuntimeError, ValueError), match="residual must have x's"):
            operator.add_forward(x, residual, None, 1e-6)
    with pytest.raises(ValueError, match="residual must have x's"):
        operators.direct.add_forward(x.to("meta"), residual.to("meta"), None, 1e-6)
