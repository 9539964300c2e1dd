"""Level 1: the three rounding conventions, each written out once more.

Bits can be compared where rstd is the same number in any correct computation: `rows_of_known_rms`. What is left are the
places where the convention rounds. tests/wild/test_roundings.py asks the same of the classes of transformers.
"""

import pytest
import torch

import rmsnorm
from rmsnorm.spec import ROUNDINGS
from tests.support import reference
from tests.support.rows import DTYPES, random_rows, rows_of_known_rms

WIDTH = 64


def once(x_hat, weight, x_dtype):
    return (x_hat * weight.float()).to(x_dtype)


def once_with_unit_offset(x_hat, weight, x_dtype):
    return (x_hat * (weight.float() + 1.0)).to(x_dtype)


def before_scale(x_hat, weight, x_dtype):
    return x_hat.to(x_dtype) * weight


def weight_dtype(x_hat, weight, x_dtype):
    return x_hat.to(weight.dtype) * weight


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(
    ("scale", "options"),
    [
        (once, {"rounding": "once"}),
        (once_with_unit_offset, {"rounding": "once", "weight_offset": 1.0}),
        (before_scale, {"rounding": "before_scale"}),
        (weight_dtype, {"rounding": "weight_dtype"}),
    ],
)
def test_a_convention_rounds_where_it_says(scale, options, x_dtype, w_dtype, assert_bits_equal):
    x, eps, rstd = rows_of_known_rms(WIDTH)
    x = x.to(x_dtype)
    weight = random_rows(1, WIDTH, w_dtype, 2)[0]
    expected = scale(x.float() * rstd, weight, x_dtype)
    y = rmsnorm.rms_norm(x, weight, eps, **options)
    assert_bits_equal(y, expected)
    by_reference, _ = reference.forward(x, weight, eps, options.get("weight_offset", 0.0), options["rounding"])
    assert_bits_equal(by_reference, expected)


def test_conventions_differ_where_there_are_16_bits(assert_bits_equal):
    """Otherwise the test above would show nothing; with float32 everywhere the three agree."""
    x, eps, _ = rows_of_known_rms(WIDTH)
    weight = random_rows(1, WIDTH, torch.bfloat16, 2)[0]
    once, before = (rmsnorm.rms_norm(x.bfloat16(), weight, eps, rounding=r) for r in ("once", "before_scale"))
    assert not torch.equal(once, before)
    assert not torch.equal(
        rmsnorm.rms_norm(x.half(), weight, eps, rounding="weight_dtype"),
        rmsnorm.rms_norm(x.half(), weight, eps, rounding="before_scale").to(torch.bfloat16),
    )
    results = [rmsnorm.rms_norm(x, weight.float(), eps, rounding=r) for r in ROUNDINGS]
    assert_bits_equal(results[1], results[0])
    assert_bits_equal(results[2], results[0])


@pytest.mark.parametrize("w_dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("x_dtype", [*DTYPES, torch.float64])
def test_result_dtypes(x_dtype, w_dtype):
    x, weight = torch.ones(2, 4, dtype=x_dtype), torch.ones(4, dtype=w_dtype)
    expected = {"once": x_dtype, "before_scale": torch.promote_types(x_dtype, w_dtype), "weight_dtype": w_dtype}
    for rounding, dtype in expected.items():
        assert rmsnorm.rms_norm(x, weight, rounding=rounding).dtype == dtype
        assert reference.result_dtype(x, weight, rounding) == dtype
        assert reference.result_dtype(x, None, rounding) == x_dtype
        assert rmsnorm.rms_norm(x, rounding=rounding).dtype == x_dtype
