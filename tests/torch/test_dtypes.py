"""Dtypes of x and weight, and where the value is rounded, to the bit."""

import warnings
from itertools import product

import pytest
import torch

from rmsnorm import add_rms_norm, rms_norm
from rmsnorm.spec import ROUNDINGS
from tests.support.bits import same
from tests.support.expected import DTYPES, exact, normalized, tensor, within, y_bound


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
