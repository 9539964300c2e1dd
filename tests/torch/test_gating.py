"""Gated and grouped norms: the definition against float64, and what every option gives."""

from itertools import product

import pytest
import torch

from rmsnorm import GatedRMSNorm, RMSNorm, gated_rms_norm, rms_norm
from rmsnorm.numerics import stages
from tests.support.bits import same
from tests.wild.exact import norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDINGS = ("once", "before_scale", "weight_dtype")
FORMS = list(product(("silu", "sigmoid"), (True, False), (None, 16)))


def tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, z, weight, activation, norm_before_gate, group, eps=1e-6, offset=0.0):
    x, z = x.double(), z.double()
    act = torch.sigmoid(z) * (z if activation == "silu" else 1.0)
    gain = weight.double() + offset
    return norm(x, gain, eps, group) * act if norm_before_gate else norm(x * act, gain, eps, group)


# Eight roundings of float32 at most: x * act, rstd, two products, the product with act, act itself (two), the last. In
# 16 bits one to the dtype comes on top, and with a rounding before the weight and one before the gate two more.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "first", "group"), FORMS)
def test_results_are_within_their_roundings_of_float64(dtype, activation, first, group):
    x, z, weight = (tensor(7, 48, dtype=dtype, seed=i) for i in range(3))
    weight = weight[0]
    wanted = exact(x, z, weight, activation, first, group)
    for rounding in ROUNDINGS:
        y = gated_rms_norm(
            *(x, z, weight), activation=activation, norm_before_gate=first, group_size=group, rounding=rounding
        )
        half = torch.finfo(dtype).eps / 2
        bound = 8 * 2.0**-24 + (0 if dtype == torch.float32 else (1 if rounding == "once" else 3) * half)
        tiny = torch.finfo(dtype).smallest_normal
        assert float(((y.double() - wanted).abs() / wanted.abs().clamp_min(tiny)).max()) <= bound * (1 + 2.0**-7)


def test_sigmoid_is_the_rounded_exact_one_but_for_ties():
    z = torch.cat([torch.linspace(-110, 110, 100_001), torch.tensor([0.0, -0.0, 1e-30, 87.5, -87.5])])
    got, wanted = stages.sigmoid(z), torch.sigmoid(z.double())
    # The exponential is right to 2^-38, so the last bit is wrong only where the exact value is that close to a tie.
    assert float(
        ((got.double() - wanted).abs() / wanted.clamp_min(torch.finfo(torch.float32).tiny)).max()
    ) <= 2.0**-24 * (1 + 2.0**-12)


def test_sigmoid_of_what_is_not_finite():
    z = torch.tensor([torch.inf, -torch.inf, torch.nan])
    got = stages.sigmoid(z)
    assert got[0] == 1
    assert got[1] == 0
    assert got[2].isnan()


def test_sigmoid_does_not_depend_on_where_an_element_stands():
    z = tensor(1001)
    same(stages.sigmoid(z)[1:], stages.sigmoid(z[1:].clone()))
    same(stages.sigmoid(z)[17:18], stages.sigmoid(z[17:18].clone()))


@pytest.mark.parametrize(("activation", "first", "group"), FORMS)
def test_gradients_in_float64(activation, first, group):
    x, z = (tensor(3, 16 if group is None else 32, dtype=torch.float64, seed=i).requires_grad_() for i in range(2))
    weight = tensor(x.shape[-1], dtype=torch.float64, seed=2).requires_grad_()

    def function(x, z, weight):
        return gated_rms_norm(x, z, weight, activation=activation, norm_before_gate=first, group_size=group)

    assert torch.autograd.gradcheck(function, (x, z, weight))
    assert torch.autograd.gradgradcheck(function, (x, z, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "first", "group"), FORMS)
def test_gradients_against_float64(dtype, activation, first, group):
    x, z, weight = tensor(7, 48, dtype=dtype), tensor(7, 48, dtype=dtype, seed=1), tensor(48, dtype=dtype, seed=2)
    dy = tensor(7, 48, dtype=dtype, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, z, weight)]
    y = gated_rms_norm(*leaves, activation=activation, norm_before_gate=first, group_size=group)
    got = torch.autograd.grad(y, leaves, dy)
    wide = [t.double().requires_grad_() for t in (x, z, weight)]
    wanted = torch.autograd.grad(exact(*wide, activation, first, group), wide, dy.double())
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == dtype
        # A few float32 roundings of terms no larger than the largest gradient of the row's kind, and the last one.
        bound = 64 * 2.0**-24 + torch.finfo(dtype).eps / 2
        assert float((g.double() - w).abs().max() / w.abs().max()) <= bound


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_groups_are_the_norm_of_each_group(rounding):
    for x_dtype, weight_dtype in product(DTYPES, DTYPES):
        x, weight = tensor(5, 48, dtype=x_dtype), tensor(48, dtype=weight_dtype, seed=1)
        groups = [rms_norm(x[:, i : i + 12], weight[i : i + 12], rounding=rounding) for i in range(0, 48, 12)]
        same(rms_norm(x, weight, group_size=12, rounding=rounding), torch.cat(groups, -1))
        same(rms_norm(x, weight, group_size=48, rounding=rounding), rms_norm(x, weight, rounding=rounding))


def test_gradients_of_groups_are_those_of_each_group():
    x, weight, dy = tensor(5, 48), tensor(48, seed=1), tensor(5, 48, seed=2)
    whole = [t.clone().requires_grad_() for t in (x, weight)]
    parts = [t.clone().requires_grad_() for t in (x, weight)]
    rms_norm(*whole, group_size=12).backward(dy)
    torch.cat([rms_norm(parts[0][:, i : i + 12], parts[1][i : i + 12]) for i in range(0, 48, 12)], -1).backward(dy)
    same(whole[0].grad, parts[0].grad)
    same(whole[1].grad, parts[1].grad)


def test_an_open_gate_is_no_gate():
    x, weight = tensor(5, 48), tensor(48, seed=1)
    open_gate = torch.full_like(x, torch.inf)
    for first in (True, False):
        same(gated_rms_norm(x, open_gate, weight, activation="sigmoid", norm_before_gate=first), rms_norm(x, weight))


def test_a_row_does_not_depend_on_its_batch():
    x, z, weight = tensor(257, 48), tensor(257, 48, seed=1), tensor(48, seed=2)
    for first in (True, False):
        batch = gated_rms_norm(x, z, weight, norm_before_gate=first)
        same(gated_rms_norm(x[100:101], z[100:101], weight, norm_before_gate=first), batch[100:101])


def test_modules_call_the_functions():
    x, z = tensor(5, 48), tensor(5, 48, seed=1)
    module = GatedRMSNorm(48, 1e-5, activation="sigmoid", norm_before_gate=False, group_size=12, weight_offset=1.0)
    assert not module.weight.any()
    options = {"activation": "sigmoid", "norm_before_gate": False, "group_size": 12, "weight_offset": 1.0}
    same(module(x, z).detach(), gated_rms_norm(x, z, module.weight.detach(), 1e-5, **options))
    said = "48, eps=1e-05, activation='sigmoid', norm_before_gate=False, group_size=12, weight_offset=1.0"
    assert repr(module) == f"GatedRMSNorm({said})"
    grouped = RMSNorm(48, group_size=12)
    same(grouped(x).detach(), rms_norm(x, group_size=12))
    y, h = grouped(x, z)
    same(y.detach(), rms_norm(x + z, group_size=12))
    same(h, x + z)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": tensor(5, 47)}, "gate must have x's shape"),
        ({"gate": tensor(5, 48, dtype=torch.float64)}, "gate must be float32, bfloat16 or float16 where x is float32"),
        ({"weight": tensor(5, 47)}, "weight must have shape"),
        ({"activation": "gelu"}, "activation must be one of 'silu', 'sigmoid', got 'gelu'"),
        ({"group_size": 7}, "group_size must be a positive integer that divides the last dimension 48, got 7"),
        ({"group_size": True}, "group_size must be a positive integer"),
        ({"rounding": "twice"}, "rounding must be one of"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"x": tensor(5, 48), "gate": tensor(5, 48), "weight": tensor(48)} | change
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**arguments)
