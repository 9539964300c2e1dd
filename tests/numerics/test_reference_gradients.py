"""Level 1: the reference's gradients, against float64 autograd of the textbook formula, and the formula's own."""

import math

import pytest
import torch

import rmsnorm
from rmsnorm.numerics import fixed_sum
from tests.support import reference
from tests.support.exact import ROUNDOFF, SUBNORMAL_STEP, exponent, quantum
from tests.support.rows import DTYPES, random_rows


def textbook(x, weight, eps, offset):
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


def gradients_in_float64(dy, x, weight, eps, offset, dh=None):
    """dx and dweight by autograd, on the same values."""
    x = x.double().requires_grad_()
    if weight is None:  # whose gradient is that of a gain of one
        weight, offset = torch.ones(x.shape[-1]), 0.0
    weight = weight.double().requires_grad_()
    outputs, grads = [textbook(x, weight, eps, offset)], [dy.double()]
    if dh is not None:
        outputs, grads = [*outputs, x * 1.0], [*grads, dh.double()]
    return torch.autograd.grad(outputs, (x, weight), grads)


def bound_of_dx(dy, x, weight, eps, offset, expected, dh=None):
    """What the roundings of `reference.backward` can amount to, element by element.

    dx = R (U - H K) with R = rstd, U = dy * gain, H = x R, K = mean(U H). In float32, with roundoff e:

    - U carries the roundings of gain (if there is an offset) and of its product;
    - H those of rstd and of its product; K that of rstd, of U in each term, and its own;
    - H K one, the difference one, the product with rstd one, and rstd's own once more: 3 that act on all of dx.

    So U comes with 5 e at most and H K with 10 e, where for K stands the mean of |U H|, which bounds the effect of U's
    roundings on the sum. 11 e for both covers the products of errors (below 10^2 e^2) and float64's (n 2^-53) as well.
    To that comes the floor of the fixed-point sum, d q of sum(u x), and the roundings of dx to its dtype and after dh.
    """
    e = ROUNDOFF[torch.float32]
    wide, u = x.double(), dy.double()
    if weight is not None:
        u = u * (weight.double() + offset)
    rstd = 1 / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    x_hat = wide * rstd
    bound = 11 * e * rstd * (u.abs() + x_hat.abs() * (u * x_hat).abs().mean(-1, keepdim=True))
    for row in range(len(x)):
        largest = [t[row].abs().max().item() for t in (u, wide)]
        # One more in the exponent: the float32 u may round up to the next power of two.
        q = quantum(sum(map(exponent, largest)) + 1, x.shape[-1])
        bound[row] += rstd[row] * x_hat[row].abs() * rstd[row] * q
    if dh is not None:
        bound += e * expected.abs() * 2
    if x.dtype != torch.float32:
        bound += ROUNDOFF[x.dtype] * (expected.abs() + bound)
    return bound + SUBNORMAL_STEP[x.dtype]  # below the smallest normal number errors are no longer relative


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("w_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 17, 1000, 4096, 16385])
def test_dx_is_within_its_roundings_of_float64_autograd(width, dtype, w_dtype, offset):
    for scale in (1.0, 1e-3) if dtype == torch.float16 else (1.0, 1e-15, 1e15):
        x, dy = random_rows(5, width, dtype, 1, scale), random_rows(5, width, dtype, 2)
        weight = None if w_dtype is None else random_rows(1, width, w_dtype, 3)[0]
        eps = 1e-6 if scale == 1.0 else 0.0
        _, rstd = reference.forward(x, weight, eps, offset, "once")
        for dh in (None, random_rows(5, width, dtype, 4)):
            dx, _ = reference.backward(dy, x, rstd, weight, offset, dh)
            expected, _ = gradients_in_float64(dy, x, weight, eps, offset, dh)
            representable = expected.abs() < torch.finfo(dtype).max
            error = (dx.double() - expected).abs()
            assert (error <= bound_of_dx(dy, x, weight, eps, offset, expected, dh))[representable].all()


@pytest.mark.parametrize("w_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 64, 65, 257, 8223])
def test_dweight_is_within_its_roundings_of_float64_autograd(rows, dtype, w_dtype):
    """Each term has three roundings (rstd, x_hat, product); the sum one for each term of a leaf and each level above.

    16-bit weights get the one rounding of their dtype on top, because the sum is in float32 for them as well.
    """
    x, dy = random_rows(rows, 33, dtype, 1), random_rows(rows, 33, dtype, 2)
    weight = None if w_dtype is None else random_rows(1, 33, w_dtype, 3)[0]
    _, rstd = reference.forward(x, weight, 1e-6, 0.0, "once")
    _, dweight = reference.backward(dy, x, rstd, weight, 0.0)
    _, expected = gradients_in_float64(dy, x, weight, 1e-6, 0.0)
    leaves = fixed_sum.leaves(rows)
    additions = math.ceil(rows / leaves) + math.log2(leaves)
    magnitudes = (dy.double() * textbook(x.double(), None, 1e-6, 0.0)).abs().sum(0)
    bound = ((1 + ROUNDOFF[torch.float32]) ** (3 + additions) - 1 + rows * 2.0**-50) * magnitudes
    if w_dtype not in (None, torch.float32):
        bound += ROUNDOFF[w_dtype] * (expected.abs() + bound) + SUBNORMAL_STEP[w_dtype]
    assert dweight.dtype == (w_dtype or torch.float32)
    assert ((dweight.double() - expected).abs() <= bound).all()


def sum_of_halves(terms):
    """The order of dweight once more: halves are summed by themselves down to leaves of at most 64 rows."""
    rows = len(terms)
    depth = max(0, math.ceil(math.log2(max(rows, 1) / 64)))
    if depth == 0:
        total = torch.zeros(terms.shape[1])
        for term in terms:
            total = total + term
        return total
    # Not rows // 2: the leaves of all halves lie at one depth, and their edges are those of equal shares.
    edges = [rows * i >> depth for i in range((1 << depth) + 1)]

    def node(begin, end):
        if end - begin == 1:
            return sum_of_halves(terms[edges[begin] : edges[end]])
        middle = (begin + end) // 2
        return node(begin, middle) + node(middle, end)

    return node(0, 1 << depth)


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 127, 128, 129, 200, 257, 1000])
def test_rows_are_summed_in_order_within_leaves_and_then_in_pairs(rows):
    terms = random_rows(rows, 7, torch.float32, 1)
    assert torch.equal(fixed_sum.sum_rows(terms), sum_of_halves(terms))
    assert torch.equal(fixed_sum.sum_rows(terms.view(-1, 1, 7)), sum_of_halves(terms))


def test_dweight_is_summed_in_row_order_within_leaves():
    """1 + 2^-24 + 2^-24 … is 1 in that order, in float32, and more in any order that adds small terms first."""
    rows, small = 256, 2.0**-24
    dy = torch.full((rows, 1), small)
    dy[0] = 1.0
    x, rstd = torch.ones(rows, 1), torch.ones(rows, 1)  # x_hat = 1
    _, dweight = reference.backward(dy, x, rstd, None, 0.0)
    assert fixed_sum.leaves(rows) == 4
    # First leaf: 1 swallows 63 terms, each half a unit, to even. The others sum to 64 * 2^-24 = 2^-18 each.
    assert dweight.item() == 1 + 3 * 2.0**-18


@pytest.mark.parametrize("shares", [2, 4, 8])
@pytest.mark.parametrize("rows", [33, 64, 100, 500])
def test_the_sum_of_equal_shares_of_the_rows_is_the_sum_of_all(shares, rows):
    """What makes dweight the same on ranks with equal shares: each has a node of one process's tree."""
    terms = random_rows(shares * rows, 7, torch.float32, 1)
    nodes = torch.stack([fixed_sum.sum_rows(share) for share in terms.split(rows)])
    assert torch.equal(fixed_sum.add_in_pairs(nodes), fixed_sum.sum_rows(terms))


def test_rebuilding_undoes_forward_to_within_the_rounding_of_y():
    """x = y / gain / rstd: the roundings of x_hat, y and both divisions, and rstd is the same number both times."""
    for dtype in DTYPES:
        x, weight = random_rows(20, 1000, dtype, 1), 1 + random_rows(1, 1000, dtype, 2).abs()[0]
        y, rstd = reference.forward(x, weight, 1e-6, 0.0, "once")
        rebuilt = reference.rebuild(y, rstd, weight, 0.0, dtype)
        bound = (1 + ROUNDOFF[torch.float32]) ** 4 * (1 + ROUNDOFF[dtype]) ** 2 - 1
        normal = y.abs() >= torch.finfo(dtype).smallest_normal
        assert ((rebuilt.double() - x.double()).abs() <= bound * x.double().abs())[normal].all()


# ---------------------------------------------------------------- derivatives of the public functions, in float64


def inputs(*shape, weight=True):
    x = random_rows(6, 5, torch.float64, 1).view(*shape).requires_grad_()
    return (x, random_rows(1, shape[-1], torch.float64, 2)[0].requires_grad_()) if weight else (x,)


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight", [True, False])
def test_rms_norm_has_right_derivatives(check, offset, weight):
    def call(x, weight=None):
        return rmsnorm.rms_norm(x, weight, 1e-2, weight_offset=offset)

    assert check(call, inputs(2, 3, 5, weight=weight))


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_add_rms_norm_has_right_derivatives_in_both_outputs(check):
    x, weight = inputs(6, 5)
    residual = random_rows(6, 5, torch.float64, 3).requires_grad_()
    assert check(lambda *given: rmsnorm.add_rms_norm(*given, 1e-2), (x, residual, weight))


def test_float64_gradients_agree_with_autograd():
    x, weight = inputs(6, 5)
    dy = random_rows(6, 5, torch.float64, 4)
    ours = torch.autograd.grad(rmsnorm.rms_norm(x, weight), (x, weight), dy)
    expected = torch.autograd.grad(textbook(x, weight, 1e-6, 0.0), (x, weight), dy)
    for o, e in zip(ours, expected, strict=True):
        # Some 30 roundings of terms of order 10 at most (x_hat <= sqrt(5), |dy|, |weight|, rstd of order 1).
        assert ((o - e).abs() <= 30 * ROUNDOFF[torch.float64] * 10).all()
