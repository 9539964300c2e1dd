"""vLLM and Axolotl in processes of their own; what SGLang and vLLM are given, against their formulas."""

import pytest
import torch

from rmsnorm.integrations import sglang, vllm
from tests.integrations import hosts


@pytest.mark.parametrize("name", hosts.names("servers_checks"))
def test_vllm(name):
    hosts.assert_passes("servers_checks", name)


@pytest.mark.parametrize("name", hosts.names("axolotl_checks"))
def test_axolotl(name):
    hosts.assert_passes("axolotl_checks", name, "axolotl", "addict")


class Norm:
    """The attributes that SGLang's RMSNorm has."""

    variance_size_override = override_orig_dtype = None
    fp32_residual = False
    variance_epsilon, hidden_size = 1e-6, 256

    def __init__(self, dtype, before_scale):
        self.weight = torch.randn(256, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.cast_x_before_out_mul = before_scale

    def formula(self, x, residual=None, more=None, linear=None):
        assert linear is None
        u = x.double() if residual is None else x.double() + residual.double()
        h = u.to(x.dtype)
        u = u if more is None else u + more.double()
        u = u / (u.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
        y = self.weight * u.to(x.dtype) if self.cast_x_before_out_mul else (u * self.weight).to(x.dtype)
        return y if residual is None else (y, h)


def is_the_same(a, b):
    """Equal, but for roundings that fall the other way, one in some thousand, as a product of 16 bits shows them."""
    step = torch.finfo(a.dtype).eps
    assert a.dtype == b.dtype
    assert torch.allclose(a.double(), b.double(), rtol=2 * step, atol=0)
    assert a.dtype == torch.float32 or (a == b).double().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("before_scale", [False, True])
def test_what_sglang_is_given(dtype, before_scale):
    norm = Norm(dtype, before_scale)
    x, residual = torch.randn(2, 32, 256).to(dtype)
    is_the_same(sglang.around(refuse, norm, x), norm.formula(x))
    y, h = sglang.around(refuse, norm, x, residual)
    wanted_y, wanted_h = norm.formula(x, residual)
    is_the_same(y, wanted_y)
    assert torch.equal(h, wanted_h)


def refuse(*_):
    raise AssertionError("the original was called")


def test_what_sglang_alone_can_do_it_does():
    norm = Norm(torch.float32, False)
    x = torch.randn(4, 256)
    assert torch.equal(sglang.around(Norm.formula, norm, x, x, x)[0], norm.formula(x, x, x)[0])
    for name, value in (("variance_size_override", 128), ("override_orig_dtype", torch.float16)):
        norm = Norm(torch.float32, False)
        setattr(norm, name, value)
        assert sglang.around(lambda *_: "original", norm, x) == "original"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_vllm_is_given(dtype):
    norm = Norm(dtype, True)
    x, residual = torch.randn(2, 32, 256).to(dtype)
    is_the_same(vllm.normalize(x, norm.weight, 1e-6), norm.formula(x))
    y, h = vllm.add_and_normalize(x, residual, norm.weight, 1e-6)
    wanted_y, wanted_h = norm.formula(x, residual)
    is_the_same(y, wanted_y)
    assert torch.equal(h, wanted_h)
