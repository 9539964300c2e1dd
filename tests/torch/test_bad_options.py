"""Options that cannot be are refused, by the functions and the module, with what came and what may."""

import math

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from tests.support.refusals import refused, takers


@pytest.mark.parametrize(
    "rounding", ["Once", "", "twice", "before", None, 0, 1, True, ["once"], ("once",), {}, b"once"]
)
def test_unknown_roundings(rounding):
    x = torch.ones(4, 8)
    for call in (
        lambda: rms_norm(x, rounding=rounding),
        lambda: rms_norm(x.double(), torch.ones(8), rounding=rounding),
        lambda: rms_norm(x, out=torch.empty(4, 8), rounding=rounding),
        lambda: add_rms_norm(x, x, rounding=rounding),
        lambda: RMSNorm(8, rounding=rounding),
    ):
        with refused(ValueError, "rounding must be one of 'once', 'before_scale', 'weight_dtype'", repr(rounding)):
            call()


@pytest.mark.parametrize("name", ["eps", "weight_offset"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "one", "", 10**400])
def test_numbers_that_are_not_finite(name, value):
    for call in takers(**{name: value}):
        with refused(ValueError, name, repr(value)):
            call()


@pytest.mark.parametrize("name", ["eps", "weight_offset"])
@pytest.mark.parametrize(
    "value", [True, False, [1e-6], (1e-6,), {}, 1j, b"1e-6", object(), torch.ones(2), torch.tensor(True)]
)
def test_what_is_no_number(name, value):
    for call in [*takers(**{name: value})][:-1]:
        with refused(TypeError, f"{name} must be", repr(value)):
            call()


def test_offset_has_no_none_and_no_text():
    for call in [*takers(weight_offset=None)][:-1]:
        with refused(TypeError, "weight_offset must be a finite number, got None"):
            call()
    for call in [*takers(weight_offset="1.0")][:-1]:
        with refused(ValueError, "weight_offset must be a finite number, got '1.0'"):
            call()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["eps", "weight_offset"])
def test_options_have_no_gradient(name):
    value = torch.tensor(1e-3, requires_grad=True)
    for call in [*takers(**{name: value})][:-1]:
        with refused(TypeError, name):
            call()


@pytest.mark.parametrize("eps", [0, 0.0, -0.0, -1e-6, "0", "-1e-6", -math.inf])
def test_module_wants_a_positive_eps(eps):
    with refused(ValueError, "eps must be", repr(eps)):
        RMSNorm(8, eps)


def test_misspelt_options_are_errors():
    x = torch.ones(4, 8)
    for call in (
        lambda: rms_norm(x, epsilon=1e-6),
        lambda: rms_norm(x, None, 1e-6, 1.0),
        lambda: add_rms_norm(x, x, out=x),
        lambda: RMSNorm(8, biased=True),
    ):
        with pytest.raises(TypeError, match="argument"):
            call()
