"""`RMSNorm`: its forward, and how it is made."""

import copy
import math
import pickle
import re

import pytest
import torch
from torch import nn

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from tests.support.bits import same
from tests.support.expected import DTYPES, gradients, normalized, tensor
from tests.support.modules import OPTIONS, filled

# ---------------------------------------------------------------- forward


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_functions_with_its_options(options, dtype):
    norm = RMSNorm(33, **options, dtype=torch.bfloat16)
    if norm.weight is not None:
        filled(norm)
    weight = None if norm.weight is None else norm.weight.detach()
    passed = {name: value for name, value in options.items() if name in ("weight_offset", "rounding")}
    eps = options.get("eps", 1e-6)
    x, residual, dy = (tensor(70, 33, dtype=dtype, seed=seed) for seed in range(3))

    same(norm(x).detach(), rms_norm(x, weight, eps, **passed))
    y, h = norm(x, residual)
    expected, total = add_rms_norm(x, residual, weight, eps, **passed)
    same(y.detach(), expected)
    same(h.detach(), total)
    y, h = norm(x, residual=residual)
    same(y.detach(), expected)
    with torch.no_grad():
        same(norm(x), rms_norm(x, weight, eps, **passed))

    leaf = x.clone().requires_grad_()
    y, h = norm(leaf, residual)
    norm.zero_grad()
    torch.autograd.backward([y, h], [dy.to(y.dtype), dy])
    number = (2.0**-52 if dtype == torch.float64 else 2.0**-23) if eps is None else eps
    dx, dweight = gradients(
        dy.to(y.dtype), x + residual, weight, number, weight_offset=options.get("weight_offset", 0.0), dh=dy
    )
    same(leaf.grad, dx)
    if weight is not None:
        same(norm.weight.grad, dweight)


@pytest.mark.parametrize("dim", [(3, 4), [3, 4], torch.Size([5, 3, 4])])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("memory_efficient", [True, False])
def test_over_several_dimensions(dim, affine, memory_efficient):
    norm = RMSNorm(dim, elementwise_affine=affine, memory_efficient=memory_efficient)
    assert norm.normalized_shape == tuple(dim)
    x = tensor(2, 5, 3, 4)
    weight = filled(norm).weight.detach() if affine else None
    assert not affine or weight.shape == tuple(dim)
    same(norm(x).detach(), normalized(x, weight, dims=len(dim)))
    y, h = norm(x, x)
    same(y.detach(), normalized(2 * x, weight, dims=len(dim)))
    same(h.detach(), 2 * x)


def test_computes_in_float32_whatever_the_input():
    for dtype in (torch.float16, torch.bfloat16):
        norm = RMSNorm(4096, dtype=dtype)
        x = tensor(4, 4096, scale=2000.0).to(dtype)  # squares beyond float16
        y = norm(x).detach()
        assert y.dtype == dtype
        same(y, norm.float()(x.float()).detach().to(dtype))
        small = torch.full((2, 64), 1e-4, dtype=dtype)  # squares below float16
        same(RMSNorm(64, 1e-10)(small).detach(), RMSNorm(64, 1e-10)(small.float()).detach().to(dtype))


def test_fresh_modules_have_a_gain_of_one():
    x = tensor(4, 64)
    for options in ({}, {"weight_offset": 1.0}, {"elementwise_affine": False}, {"rounding": "before_scale"}):
        same(RMSNorm(64, **options)(x).detach(), rms_norm(x))


# ---------------------------------------------------------------- construction


def test_starts_at_ones_or_with_offset_one_at_zeros():
    assert torch.equal(RMSNorm(8).weight, torch.ones(8))
    assert torch.equal(RMSNorm(8, weight_offset=1.0).weight, torch.zeros(8))
    assert torch.equal(RMSNorm(8, weight_offset=1).weight, torch.zeros(8))
    norm = filled(RMSNorm(8, weight_offset=1.0))
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.zeros(8))
    RMSNorm(8, elementwise_affine=False).reset_parameters()


@pytest.mark.parametrize("dim", [0, -1, (), (8, 0)])
def test_a_dim_that_is_not_positive_is_a_value_error(dim):
    with pytest.raises(ValueError, match="dim must be a positive integer"):
        RMSNorm(dim)


@pytest.mark.parametrize("eps", [0, 0.0, -1e-6, math.nan, math.inf, -math.inf, "0", "-1", "nan", "inf"])
def test_an_eps_that_is_not_positive_and_finite_is_a_value_error(eps):
    with pytest.raises(ValueError, match=r"eps must be (positive|finite), got " + re.escape(repr(eps))):
        RMSNorm(8, eps)


def configuration(text):
    """Reads `name: value` lines as YAML 1.1 does, for which a float needs a dot: 1e-6 is text."""
    number = re.compile(r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]\d+)?")
    pairs = (line.split(":", 1) for line in text.strip().splitlines())
    values = {name.strip(): value.strip() for name, value in pairs}
    constants = {"true": True, "false": False, "null": None}
    return {
        name: constants[value]
        if value in constants
        else int(value)
        if value.isdigit()
        else float(value)
        if number.fullmatch(value)
        else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "1.0e-6", "0.000001", "1e-06"])
def test_eps_out_of_yaml_is_converted_once_at_construction(written):
    options = configuration(f"dim: 8\neps: {written}\nelementwise_affine: true\nweight_offset: 1.0")
    assert isinstance(options["eps"], str) == ("." not in written)
    norm = RMSNorm(**options)
    assert type(norm.eps) is float
    assert norm.eps == 1e-6
    same(norm(tensor(3, 8)).detach(), rms_norm(tensor(3, 8)))


def test_eps_none_is_finfos_of_the_computation():
    norm = RMSNorm(8, None)
    assert norm.eps is None
    x = tensor(3, 8, scale=1e-3)
    same(norm(x).detach(), rms_norm(x, None, torch.finfo(torch.float32).eps))
    same(norm.double()(x.double()).detach(), rms_norm(x.double(), None, torch.finfo(torch.float64).eps))
    # With float32 it is what torch.nn.RMSNorm means by None, to three roundings of each of the two.
    theirs = nn.RMSNorm(8)(x)
    assert (norm.float()(x) - theirs).abs().max() <= 2 * 8 * 2.0**-24 * theirs.abs().max()


def test_options_can_be_read():
    norm = RMSNorm(8, 3e-4, weight_offset=1, rounding="before_scale", memory_efficient=True)
    assert norm.eps == 3e-4
    assert copy.deepcopy(norm).eps == 3e-4
    assert norm.normalized_shape == (8,)
    assert (norm.weight_offset, norm.rounding, norm.memory_efficient) == (1.0, "before_scale", True)
    assert norm.elementwise_affine


def test_repr_shows_size_eps_and_what_is_not_default():
    assert repr(RMSNorm(123)) == "RMSNorm(123, eps=1e-06)"
    assert repr(RMSNorm((2, 3), None)) == "RMSNorm((2, 3), eps=None)"
    assert repr(RMSNorm(8, "1e-5", weight_offset=1.0, rounding="before_scale")) == (
        "RMSNorm(8, eps=1e-05, weight_offset=1.0, rounding='before_scale')"
    )
    assert repr(RMSNorm(8, elementwise_affine=False, memory_efficient=True, sequence_parallel=True)) == (
        "RMSNorm(8, eps=1e-06, elementwise_affine=False, memory_efficient=True, sequence_parallel=True)"
    )


def test_repr_rebuilds_the_module():
    for options in OPTIONS:
        norm = RMSNorm(8, **options)
        again = eval(repr(norm), {"RMSNorm": RMSNorm})  # noqa: S307
        assert repr(again) == repr(norm)


def test_sequence_parallel_marks_the_parameter():
    assert RMSNorm(8, sequence_parallel=True).weight.sequence_parallel is True
    assert RMSNorm(8).weight.sequence_parallel is False
    RMSNorm(8, sequence_parallel=True, elementwise_affine=False)


def test_the_mark_stays_on_every_new_parameter():
    norm = RMSNorm(8, sequence_parallel=True)
    assert copy.deepcopy(norm).weight.sequence_parallel is True
    assert pickle.loads(pickle.dumps(norm)).weight.sequence_parallel is True  # noqa: S301
    assert copy.deepcopy(nn.Sequential(norm)).to("meta").to_empty(device="cpu")[0].weight.sequence_parallel is True
    norm.load_state_dict({"weight": tensor(8)}, assign=True)
    assert norm.weight.sequence_parallel is True
    norm.weight = nn.Parameter(tensor(8))
    assert norm.weight.sequence_parallel is True
    assert norm.double().weight.sequence_parallel is True


def test_factory_arguments_and_contexts():
    assert RMSNorm(8, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert RMSNorm(8, device="meta").weight.is_meta
    with torch.device("meta"):
        assert RMSNorm(8).weight.is_meta
    torch.set_default_dtype(torch.float64)
    try:
        norm = RMSNorm(8)
        assert norm.weight.dtype == torch.float64
        x = tensor(3, 8)
        same(norm(x).detach(), rms_norm(x))
        same(rms_norm(x.bfloat16(), x[0]), normalized(x.bfloat16(), x[0]))
    finally:
        torch.set_default_dtype(torch.float32)


def test_meta_device_then_storage_then_reset():
    for offset in (0.0, 1.0):
        with torch.device("meta"):
            norm = RMSNorm(64, weight_offset=offset, sequence_parallel=True)
        assert norm(torch.empty(3, 64, device="meta")).shape == (3, 64)
        norm = norm.to_empty(device="cpu")
        with torch.no_grad():
            norm.weight.fill_(math.nan)
        norm.reset_parameters()
        same(norm(tensor(4, 64)).detach(), rms_norm(tensor(4, 64)))
