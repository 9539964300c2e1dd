"""What the suite holds for right: exact arithmetic, units in the last place, the place of eps."""

from fractions import Fraction

import pytest
import torch

from rmsnorm.conformance import exact
from rmsnorm.conformance.calling import understand
from rmsnorm.conformance.form import find
from rmsnorm.conformance.rows import hard_rows
from tests.conformance.suite import CPU
from tests.support import exact as rational


def test_float64_is_exact_enough():
    """exact.py's own bound, 2^-22 of a unit in the last place of float32, against rational arithmetic."""
    for x in hard_rows(1000, torch.float32)[::2]:
        weight = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        y = exact.normalized(x, weight.double(), 1e-5)
        r = rational.inverse_rms(x, 1e-5)
        correct = [Fraction(a) * Fraction(b) * r for a, b in zip(x.tolist(), weight.tolist(), strict=True)]
        units = exact.unit(y, torch.float32).tolist()
        worst = max(abs(Fraction(a) - b) / Fraction(u) for a, b, u in zip(y.tolist(), correct, units, strict=True))
        assert worst < 2.0**-22


def test_units_in_the_last_place():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        numbers = torch.tensor([1.0, 1.5, 2.0, 3.999, 0.1, -7.0]).to(dtype)
        beside = torch.nextafter(numbers, torch.full_like(numbers, torch.inf))
        assert torch.equal(exact.unit(numbers.double().abs(), dtype)[:5], (beside.double() - numbers.double())[:5])
        assert exact.errors(beside, numbers.double()).tolist()[:5] == [1.0] * 5
    big = torch.tensor([1e39], dtype=torch.float64)
    assert exact.errors(torch.tensor([torch.inf]), big).tolist() == [0.0]
    assert exact.errors(torch.tensor([3e38]), big).tolist() == [torch.inf]


def test_float64_errors_are_those_of_rational_arithmetic():
    x = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = exact.normalized(x, None, 1e-5)
    assert exact.float64_errors(y, x, None, 1e-5, "inside").max() < 3
    # One number more or less is one unit.
    up = torch.nextafter(y, y.sign() * torch.inf)
    moved = exact.float64_errors(up, x, None, 1e-5, "inside") - exact.float64_errors(y, x, None, 1e-5, "inside")
    assert moved.abs().max() <= 1 + 1e-9  # the difference of two rounded numbers


@pytest.mark.parametrize("place", list(exact.PLACES))
def test_every_place_of_eps_is_recognised(place):
    def norm(x, weight, eps=1e-6):
        return (x.double() * exact.reciprocal(x, eps, place) * weight.double()).to(x.dtype)

    assert find(understand(norm, "it"), CPU).place == place
