"""Level 1: the reference is right. Forward and its sum, against exact arithmetic and against PyTorch in float64."""

import math
from fractions import Fraction

import pytest
import torch
from torch.nn import functional

from rmsnorm.numerics import fixed_sum
from tests.support import exact, reference
from tests.support.rows import DTYPES, WIDTHS, all_rows, finite_rows, from_bits, generator, random_rows

# float32 and bfloat16 reach both; float16 ends at 65504 and is scaled within that.
SCALES = {torch.float32: (1e-30, 1.0, 1e30), torch.bfloat16: (1e-30, 1.0, 1e30), torch.float16: (1e-3, 1.0, 1e3)}


def forward(x, weight=None, eps=1e-6, offset=0.0, rounding="once"):
    return reference.forward(x, weight, eps, offset, rounding)


# ---------------------------------------------------------------- accuracy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 17, 127, 1000, 4096, 16385, 65536])
def test_y_is_within_three_roundings_of_exact_arithmetic(width, dtype):
    for scale in SCALES[dtype]:
        # eps matters at scale 1; at 1e-30 it would be all there is.
        eps = 1e-6 if scale >= 1 else 0.0
        for row in random_rows(1 if width > 5000 else 4, width, dtype, seed=width, scale=scale):
            weight = random_rows(1, width, torch.float32, seed=width + 1)[0]
            y, _ = forward(row, weight, eps)
            errors = exact.relative_errors(y, row, [Fraction(w) for w in weight.tolist()], eps)
            assert len(errors) >= 0.9 * width  # the others are subnormal in float16, or zero
            assert max(errors) <= exact.error_bound(row, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_y_with_an_offset_adds_the_rounding_of_the_gain(dtype):
    row, weight = random_rows(2, 1000, dtype, seed=1)
    y, _ = forward(row, weight, offset=1.0)
    errors = exact.relative_errors(y, row, [Fraction(w) + 1 for w in weight.tolist()], 1e-6)
    assert max(errors) <= exact.error_bound(row, dtype, offset=True)


def test_zeros_of_y_have_the_sign_of_x_times_that_of_the_weight():
    # An offset of 0 is not added: that would make a weight of -0 one of +0. Any other offset is.
    x, weight = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.tensor([0.0, 0.0, -0.0, -0.0])
    assert forward(x, weight)[0].signbit().tolist() == [False, True, True, False]
    assert forward(x, weight, offset=1.0)[0].signbit().tolist() == [False, True, False, True]


def test_any_offset_but_zero_is_added_even_if_it_is_zero_in_float32():
    weight = torch.tensor([-0.0])
    for offset, negative in ((0.0, True), (-0.0, True), (1e-300, False), (-1e-300, True)):
        assert forward(torch.ones(1), weight, offset=offset)[0].signbit().item() == negative, offset


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-6, 1e30, 1e60, 1e69, 1e76, 1e150, 1e300])
def test_a_row_of_zeros_leaves_eps(eps):
    for dtype in (*DTYPES, torch.float64):
        _, rstd = forward(torch.zeros(3, 7, dtype=dtype), eps=eps)
        expected = torch.tensor(1 / math.sqrt(eps) if eps else math.inf, dtype=rstd.dtype)
        assert rstd.eq(expected).all(), (dtype, rstd)
        _, rstd = forward(torch.full((1, 7), 2.0**-14, dtype=dtype), eps=eps)
        variance = Fraction(2) ** -28 + Fraction(eps)
        assert abs(Fraction(rstd.item()) ** 2 * variance - 1) <= Fraction(2) ** -22 or rstd.item() < 2.0**-126


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kind_of_finite_row_keeps_the_bound(width, dtype):
    """Subnormals, the largest numbers, 240 binades of spread, one outlier."""
    for row in finite_rows(width, dtype):
        # Outside, rstd is subnormal and loses bits, or infinite: docs/numerics.md, "Very large and very small rows".
        eps = 2.0**-250
        if row.any() and exact.sum_of_squares(row) < Fraction(2**252) * width:
            y, _ = forward(row, eps=eps)
            assert max(exact.relative_errors(y, row, None, eps), default=0.0) <= exact.error_bound(row, dtype)


def test_very_large_rows_lose_the_bits_that_a_subnormal_rstd_lacks():
    """rstd near 2^-128 is a multiple of 2^-149: its rounding is up to 2^-150 / 2^-128 instead of 2^-24."""
    for row in (torch.rand(4, 1000, generator=generator(1)) * 2.0**127).unbind():
        y, rstd = forward(row)
        assert 2.0**-128 < rstd.item() < 2.0**-126
        bound = exact.error_bound(row, torch.float32) + 2.0**-150 / rstd.item()
        assert max(exact.relative_errors(y, row, None, 1e-6)) <= bound


@pytest.mark.parametrize("width", [1024, 4096, 16384, 65536])
def test_a_row_with_one_outlier_reaches_the_bound_of_the_floors_and_keeps_it(width):
    """Not promised: three roundings for a row of one huge element and others near sqrt(q).

    S lacks less than n * q, with q = 2^(E + L - 51), and is at least 2^(E - 2): rstd is too large by n * 2^(L - 50) at
    most. That bound is attained: the floors take all that elements just below sqrt(q) have to give.
    """
    bound = width * 2.0 ** (math.log2(width) - 50)
    row = torch.full((width,), math.sqrt(exact.quantum(2, width)) * (1 - 2.0**-20))  # the outlier's E is 2
    row[width // 3] = 1.0
    _, rstd = forward(row, eps=0.0)
    error = float(Fraction(rstd.item()) / exact.inverse_rms(row, 0.0) - 1)
    rounding = exact.ROUNDOFF[torch.float32] * (1 + bound)
    assert -rounding <= error <= bound + bound**2 + rounding  # of the series of 1 / sqrt(1 - d), as in floor_error
    # Of all n elements one gives nothing, and each of the others almost q.
    assert error >= bound * (1 - 2.0**-10 - 2.0**-18) - bound**2 - rounding


def test_no_finite_row_overflows():
    for scale in (1e30, 3e38):
        y, rstd = forward(torch.tensor([[scale, -scale, scale, scale]]))
        assert y.isfinite().all()
        assert rstd.item() > 0
        # rstd is subnormal at 3e38 and has 22 bits or more.
        assert (y.abs() - 1).abs().max() <= 2.0**-22 + 2.0**-24


@pytest.mark.parametrize("width", [1, 2, 17, 1000, 16385])
def test_float64_agrees_with_pytorch_in_float64(width):
    """PyTorch's sum is off by n roundings at most, ours by less; half of that reaches rstd; then up to 8 operations."""
    x, weight = random_rows(5, width, torch.float64, 1), random_rows(1, width, torch.float64, 2)[0]
    y, rstd = forward(x, weight)
    expected = functional.rms_norm(x, (width,), weight, 1e-6)
    assert rstd.dtype == torch.float64
    assert ((y - expected).abs() <= (width / 2 + 8) * 2.0**-53 * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_pytorch_in_float64_on_the_same_values(dtype):
    x, weight = random_rows(64, 1000, dtype, 1), random_rows(1, 1000, torch.float32, 2)[0]
    expected = functional.rms_norm(x.double(), (1000,), weight.double(), 1e-5)
    y, _ = forward(x, weight, 1e-5)
    bound = max(exact.error_bound(row, dtype) for row in x) * (1 + 2.0**-40)  # PyTorch: (500 + 8) * 2^-53 more
    # Below the smallest normal number an error is half a step of the subnormals.
    step = exact.SUBNORMAL_STEP[dtype] / 2
    assert ((y.double() - expected).abs() <= bound * expected.abs() + step).all()


def test_h_is_the_rounded_sum():
    for dtype in DTYPES:
        x, residual = finite_rows(127, dtype), finite_rows(127, dtype, seed=1).flip(0)
        y, h, rstd = reference.add_forward(x, residual, None, 1e-6, 0.0, "once")
        # float64 holds the sum of two 16-bit numbers exactly when they are within 2^40 of each other.
        near = ((x.double() / residual.double()).abs().log2().abs() < 20) & x.isfinite() & residual.isfinite()
        assert torch.equal(h[near], (x.double() + residual.double()).to(dtype)[near])
        assert torch.equal(y, forward(h)[0])
        assert torch.equal(rstd, forward(h)[1])


# ---------------------------------------------------------------- the sum that has no order


def sum_of(terms):
    return fixed_sum.fixed_sum(terms, two_quanta=False).item()


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 1000, 1024, 1025, 65536])
def test_fixed_sum_is_below_the_exact_sum_by_less_than_n_quanta(terms):
    for seed in range(3):
        t = torch.rand(terms, generator=generator(seed), dtype=torch.float64) * 2 - 1
        t *= 2.0 ** -torch.randint(0, 80, (terms,), generator=generator(seed + 1)).double()
        missing = sum(map(Fraction, t.tolist())) - Fraction(sum_of(t))
        assert 0 <= missing < terms * Fraction(exact.quantum(0, terms))


def test_fixed_sum_is_a_multiple_of_the_quantum_and_exact_where_the_terms_are():
    q = exact.quantum(0, 1000)
    t = torch.randint(-(2**41), 2**41 + 1, (1000,), generator=generator(1)).double() * q
    assert sum_of(t) == sum(map(Fraction, t.tolist()))
    assert t.abs().max() <= 1


def test_a_tiny_negative_term_takes_one_whole_quantum():
    """Floor, not truncation: -1e-300 becomes -q, and nothing flushes it before."""
    q = exact.quantum(0, 2)
    for tiny in (-q / 2, -1e-100, -1e-300, -5e-324):
        assert sum_of(torch.tensor([1.0, tiny], dtype=torch.float64)) == 1 - q
        assert sum_of(torch.tensor([1.0, -tiny], dtype=torch.float64)) == 1


def test_fixed_sum_holds_the_largest_terms_there_are():
    for terms in (1, 3, 1000, 65536, 1_000_000):
        assert sum_of(torch.ones(terms, dtype=torch.float64)) == terms
        assert sum_of(-torch.ones(terms, dtype=torch.float64)) == -terms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 33, 1000, 16385])
def test_permuting_elements_permutes_the_bits_of_every_result(width, dtype, assert_bits_equal):
    x = all_rows(width, dtype)
    dy, weight = random_rows(len(x), width, dtype, 1), random_rows(1, width, torch.float32, 2)[0]
    order = torch.randperm(width, generator=generator(3))
    y, rstd = forward(x, weight)
    y_permuted, rstd_permuted = forward(x[:, order], weight[order])
    assert_bits_equal(rstd_permuted, rstd)
    assert_bits_equal(y_permuted, y[:, order])
    dx, dweight = reference.backward(dy, x, rstd, weight, 0.0)
    dx_permuted, dweight_permuted = reference.backward(dy[:, order], x[:, order], rstd, weight[order], 0.0)
    assert_bits_equal(dx_permuted, dx[:, order])
    assert_bits_equal(dweight_permuted, dweight[order])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_permuting_rows_permutes_everything_but_dweight(dtype, assert_bits_equal):
    x = all_rows(127, torch.float32).to(dtype)
    dy, weight = random_rows(len(x), 127, dtype, 1), random_rows(1, 127, dtype, 2)[0]
    order = torch.randperm(len(x), generator=generator(3))
    results = [*forward(x, weight)]
    results.append(reference.backward(dy, x, results[1], weight, 0.0)[0])
    permuted = [*forward(x[order], weight)]
    permuted.append(reference.backward(dy[order], x[order], permuted[1], weight, 0.0)[0])
    for before, after in zip(results, permuted, strict=True):
        assert_bits_equal(after, before[order])
    for row in range(len(x)):  # and a row alone is the row in the batch
        assert_bits_equal(forward(x[row : row + 1], weight)[0], results[0][row : row + 1])


# ---------------------------------------------------------------- its parts


def test_rsqrt_in_float64_is_the_ieee_root_and_division():
    """Not so torch.sqrt, which in long tensors calls a vector library. math.sqrt is IEEE's."""
    g = generator(1)
    v = torch.rand(200_000, generator=g, dtype=torch.float64) + 1
    v *= 2.0 ** torch.randint(-1000, 1000, (200_000,), generator=g).double()
    special = torch.tensor([0.25, 1.0, 2.0, 3.0, 1e-320, 5e-324, 2.0**-1022, 1.7e308], dtype=torch.float64)
    v = torch.cat([v, special])
    expected = torch.tensor([1 / math.sqrt(value) for value in v.tolist()], dtype=torch.float64)
    assert torch.equal(fixed_sum.ieee_rsqrt(v), expected)
    for short in (1, 2, 3, 5, 9):  # the tails of its vectors
        assert torch.equal(fixed_sum.ieee_rsqrt(v[:short]), expected[:short])
    assert torch.equal(fixed_sum.ieee_rsqrt(v[::3]), expected[::3])  # rstd comes out of reductions, with any stride
    ends = fixed_sum.ieee_rsqrt(torch.tensor([0.0, math.inf, math.nan, -1.0], dtype=torch.float64))
    assert ends[:2].tolist() == [math.inf, 0.0]
    assert ends[2:].isnan().all()


def test_exponent_is_that_of_the_next_power_of_two():
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    for m in (powers, powers * (1 + 2.0**-23), powers * (2 - 2.0**-23)):
        e = fixed_sum.exponent_of(m)
        bound = 2.0 ** e.double()
        assert ((m < bound) & (bound <= 2 * m)).all()
        assert torch.equal(fixed_sum.power_of_two(e), bound)
        assert torch.equal(e, torch.frexp(m).exponent)
    # Of these no sum is taken, but what is computed beside it must not trap or warn.
    ends = torch.tensor([0.0, math.inf, math.nan], dtype=torch.float64)
    assert torch.isfinite(fixed_sum.power_of_two(-fixed_sum.exponent_of(ends))).all()


def test_leaves_of_dweight_depend_on_the_row_count_alone():
    for rows in [*range(2000), 8191, 8192, 8193, 10**5, 10**6, 10**9]:
        leaves = fixed_sum.leaves(rows)
        assert leaves.bit_count() == 1
        assert rows <= 64 * leaves
        assert leaves == 1 or rows > 32 * leaves  # no more of them than that takes


# ---------------------------------------------------------------- infinities and NaN


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_element_is_nan_in_its_place_and_zero_elsewhere(dtype):
    """What the formula gives, and PyTorch: inf * 0 is NaN, anything finite times 0 is 0."""
    x = random_rows(3, 5, dtype, 1)
    x[1, 2] = math.inf
    x[2, 0] = -math.inf
    y, rstd = forward(x)
    expected = functional.rms_norm(x.double(), (5,), None, 1e-6)
    assert torch.equal(y.isnan(), expected.isnan())
    assert y.isnan().sum() == 2
    assert torch.equal(y[1:].nan_to_num(), torch.zeros(2, 5, dtype=dtype))
    assert rstd[1:].tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_makes_its_row_nan_and_no_other(dtype, assert_bits_equal):
    full = {torch.float32: 0x7FFFFFFF, torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF}[dtype]
    clean = random_rows(3, 33, dtype, 1)
    dy, weight = random_rows(3, 33, dtype, 2), random_rows(1, 33, dtype, 3)[0]
    y_clean, rstd_clean = forward(clean, weight)
    dx_clean, _ = reference.backward(dy, clean, rstd_clean, weight, 0.0)
    for column in (0, 17, 32):
        x = clean.clone()
        x[1, column] = from_bits(torch.tensor(full), dtype)  # every bit of the fraction set
        y, rstd = forward(x, weight)
        dx, dweight = reference.backward(dy, x, rstd, weight, 0.0)
        assert y[1].isnan().all()
        assert dx[1].isnan().all()
        assert dweight.isnan().all()
        for row in (0, 2):
            assert_bits_equal(y[row], y_clean[row])
            assert_bits_equal(dx[row], dx_clean[row])


def test_zeros_stay_zeros_and_keep_their_sign(assert_bits_equal):
    x = torch.tensor([[0.0, -0.0, 0.0], [-0.0, -0.0, -0.0]])
    for dtype in DTYPES:
        assert_bits_equal(forward(x.to(dtype))[0], x.to(dtype))
        assert_bits_equal(forward(x.to(dtype), -torch.ones(3, dtype=dtype))[0], -x.to(dtype))


def test_subnormals_are_kept_in_inputs_and_outputs():
    for dtype in DTYPES:
        step = exact.SUBNORMAL_STEP[dtype]
        x = torch.tensor([[step, -step, step, step]], dtype=torch.float64).to(dtype)
        y, rstd = forward(x, eps=2.0**-250)  # the smallest power of four whose rstd is not infinite is 2^-254
        assert torch.equal(y, (x.double() * rstd.double()).to(dtype))
        assert torch.equal(y.sign(), x.sign())
        small_gain = torch.full((4,), step, dtype=torch.float64).to(dtype)
        assert torch.equal(forward(x.sign(), small_gain, eps=0.0)[0], x)


def test_no_rows_give_no_results_and_a_zero_dweight():
    x, weight = torch.empty(0, 8), torch.ones(8)
    y, rstd = forward(x, weight)
    assert (y.shape, rstd.shape) == ((0, 8), (0, 1))
    dx, dweight = reference.backward(x, x, rstd, weight, 0.0)
    assert dx.shape == (0, 8)
    assert torch.equal(dweight, torch.zeros(8))
