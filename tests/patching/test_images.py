"""Norms of the channels of images and videos: recognised and replaced where they are, without a copy."""

import pytest
import torch
from torch import nn

import rmsnorm
from rmsnorm.module import RMSNorm
from tests.support.bits import bits_equal

CHANNELS = 24


class Norm2d(nn.Module):
    """Its weight is a vector."""

    def __init__(self, channels=CHANNELS, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels) + 0.5)
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        rms = torch.rsqrt(wide.square().mean(1, keepdim=True) + self.eps)
        return (wide * rms * self.weight.float()[:, None, None]).to(x.dtype)


class Norm3d(nn.Module):
    """Of videos; its weight lies as it is multiplied, and is an offset from one."""

    def __init__(self, channels=CHANNELS):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(channels, 1, 1, 1) / 8)

    def forward(self, x):
        assert x.dim() == 5
        wide = x.float()
        return (wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * (1 + self.gamma.float())).to(x.dtype)


class NormOfAll(nn.Module):
    """Its statistics are of the whole image."""

    def __init__(self, channels=CHANNELS):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean((1, 2, 3), keepdim=True) + 1e-6) * self.weight[:, None, None]


def images(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_what_it_computes_is_recognised():
    found = rmsnorm.identify(Norm2d())
    assert str(found) == "width 24, eps 1e-05, weight, once, channels of 4 dimensions"
    assert found.arguments == {"dim": CHANNELS, "eps": 1e-5, "axis": 1}
    assert str(rmsnorm.identify(Norm3d())) == "width 24, eps 1e-06, gamma + 1, once, channels of 5 dimensions"
    ours = RMSNorm.from_module(Norm3d())
    x = images(2, CHANNELS, 3, 4, 5)
    assert ours.axis == 1
    assert ours(x).shape == x.shape


@pytest.mark.parametrize("module", [NormOfAll(), nn.GroupNorm(1, CHANNELS), nn.BatchNorm2d(CHANNELS)])
def test_what_is_none_is_left_alone(module):
    assert rmsnorm.identify(module) is None
    assert not rmsnorm.patch(nn.Sequential(module)).replaced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "shape"), [(Norm2d, (2, CHANNELS, 7, 9)), (Norm3d, (2, CHANNELS, 3, 4, 5))])
def test_patched_it_computes_ours_and_keeps_its_layout(make, shape, dtype):
    own = make().to(dtype)
    model = nn.Sequential(make().to(dtype))
    model[0].load_state_dict(own.state_dict())
    assert len(rmsnorm.patch(model).replaced) == 1
    x = images(*shape, dtype=dtype)
    y, theirs = model(x), own(x)
    weight, offset, eps = (own.weight, 0.0, 1e-5) if make is Norm2d else (own.gamma.flatten(), 1.0, 1e-6)
    assert bits_equal(y.detach(), rmsnorm.rms_norm(x, weight, eps, weight_offset=offset, axis=1).detach())
    # Theirs: 24 squares and their sum, halved by the root, a root of 2 ulp and three products: 16 roundings of 2^-24.
    # In 16 bits that moves the one rounding at the end by a last bit.
    last_bit = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    torch.testing.assert_close(y, theirs, rtol=2.0**-20 + last_bit, atol=0)
    assert y.stride() == theirs.stride()
    last = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    assert bits_equal(model(last).detach(), own(last).detach())  # not covered: its own forward runs
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    assert leaf.grad is not None
    assert model[0].state_dict().keys() == own.state_dict().keys()
    rmsnorm.unpatch(model)
    assert bits_equal(model(x).detach(), theirs.detach())


def test_images_of_other_dimensions_and_widths_run_its_own_forward():
    model, own = nn.Sequential(Norm2d()), Norm2d()
    own.load_state_dict(model[0].state_dict())
    rmsnorm.patch(model)
    for shape in ((CHANNELS, 5, 5), (2, 1, 5, 5), (2, CHANNELS, CHANNELS, CHANNELS)):
        x = images(*shape)
        try:
            expected = own(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                model(x)
        else:
            torch.testing.assert_close(model(x), expected)
