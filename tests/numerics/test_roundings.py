"""Level 1: the three rounding conventions are those of the modules that model families ship.

Their bits can be compared where rstd is the same number in any correct computation: rows whose mean square, with eps,
is 9 * 4^k, and which float32 sums exactly. Then rstd is 1/3 * 2^-k, rounded once, and all that is left are the places
where the convention rounds.
"""

import pytest
import torch
from torch import nn

import rmsnorm
from rmsnorm.numerics import reference
from tests.support.rows import DTYPES, generator, random_rows

WIDTH = 64


class Llama(nn.Module):
    """As in Llama, Mistral, Qwen: normalises in float32, returns to the input's dtype, then scales."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Gemma(Llama):
    """As in Gemma: the weight is an offset from one, and everything is in float32 until the end."""

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class T5(Llama):
    """As in T5: the input's dtype is left for the weight's, if that has 16 bits, before scaling."""

    def forward(self, x):
        variance = x.float().square().mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)  # float32 by promotion
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        # Of a 16-bit input and a float32 weight T5 makes float32, the weight's dtype here too.
        return self.weight * x


def rows_of_known_rms():
    """Rows of small integers, permutations of one row, and the eps that makes their mean square 9 * 4^k."""
    g = generator(1)
    base = torch.randint(-120, 121, (WIDTH,), generator=g).float()
    x = torch.stack([base[torch.randperm(WIDTH, generator=g)] for _ in range(50)])
    x *= torch.where(torch.rand(x.shape, generator=g) < 0.5, -1.0, 1.0)
    variance = base.square().mean().item()
    assert variance < 9 * 4**5
    return x, 9.0 * 4**5 - variance  # both are multiples of 1/64 below 2^24 / 64: exact in float32


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Llama, {"rounding": "before_scale"}),
        (Gemma, {"rounding": "once", "weight_offset": 1.0}),
        (T5, {"rounding": "weight_dtype"}),
    ],
)
def test_conventions_give_the_bits_of_the_families(module, options, x_dtype, w_dtype, assert_bits_equal):
    x, eps = rows_of_known_rms()
    x = x.to(x_dtype)
    assert x.abs().max() <= 120  # integers that even bfloat16 holds
    weight = random_rows(1, WIDTH, w_dtype, 2)[0]
    expected = module(weight, eps)(x)
    y = rmsnorm.rms_norm(x, weight, eps, **options)
    assert_bits_equal(y, expected)
    by_reference, _ = reference.forward(x, weight, eps, options.get("weight_offset", 0.0), options["rounding"])
    assert_bits_equal(by_reference, expected)


def test_conventions_differ_where_there_are_16_bits(assert_bits_equal):
    """Otherwise the test above would show nothing; with float32 everywhere the three agree."""
    x, eps = rows_of_known_rms()
    weight = random_rows(1, WIDTH, torch.bfloat16, 2)[0]
    once, before = (rmsnorm.rms_norm(x.bfloat16(), weight, eps, rounding=r) for r in ("once", "before_scale"))
    assert not torch.equal(once, before)
    assert not torch.equal(
        rmsnorm.rms_norm(x.half(), weight, eps, rounding="weight_dtype"),
        rmsnorm.rms_norm(x.half(), weight, eps, rounding="before_scale").to(torch.bfloat16),
    )
    results = [rmsnorm.rms_norm(x, weight.float(), eps, rounding=r) for r in reference.ROUNDINGS]
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
