"""What a row holds: any scale, zeros, infinities; and neither its batch nor its order changes a bit."""

import math

import pytest
import torch

from rmsnorm import add_rms_norm, rms_norm
from tests.support.bits import same
from tests.support.expected import DTYPES, exact, gradients, tensor, within, y_bound


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
