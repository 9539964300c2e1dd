"""What is an RMSNorm only under some condition is refused; and what used to be refused without a reason is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rmsnorm import identify, patch
from rmsnorm.patching.identifying import examine
from rmsnorm.patching.specimen import NotRMSNorm
from tests.wild.adversaries import WIDTH, Base, norm
from tests.wild.conditional import BEHIND, REFUSED


def reason(module):
    with pytest.raises(NotRMSNorm) as refused:
        examine(module)
    return str(refused.value)


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_an_rms_norm_under_a_condition_is_refused(cls):
    assert REFUSED[cls] in reason(cls())
    assert not patch(cls()).replaced


@pytest.mark.parametrize("name", BEHIND)
def test_a_tensor_behind_a_threshold_is_noticed(name):
    cls, *arguments = BEHIND[name]
    assert reason(cls(*arguments)) == "its result depends on more, which is no weight of a row"


class FollowsAutocast(Base):
    def forward(self, x):
        y = norm(x, self.eps) * self.weight
        return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y


class SquaresByProduct(Base):
    """Autocast on any device computes a product of matrices in 16 bits."""

    def forward(self, x):
        wide = x.float()
        square = (wide.unsqueeze(-2) @ wide.unsqueeze(-1)).squeeze(-1) / x.shape[-1]
        return (wide * torch.rsqrt(square + self.eps)).to(x.dtype) * self.weight


class InFloat32(Base):
    def forward(self, x):
        return (norm(x.float(), self.eps) * self.weight.float()).to(x.dtype)


def test_what_autocast_changes_is_known_device_by_device():
    assert identify(FollowsAutocast()).autocast == frozenset()
    assert identify(SquaresByProduct()).autocast == frozenset()
    assert identify(InFloat32()).autocast == {"cpu", "cuda"}
    # Its rsqrt of 16 bits would give float32 under CUDA's autocast; here the CPU's is seen to leave it alone.
    assert identify(nn.RMSNorm(WIDTH)).autocast == {"cpu"}


@pytest.mark.parametrize("width", [2, 3, 16, 47, 48, 49, 50, 64, 66, 100])
def test_a_norm_without_a_weight_has_any_width(width):
    convention = identify(nn.RMSNorm(width, eps=1e-5, elementwise_affine=False))
    assert convention is not None
    assert convention.shape == (width,)


@pytest.mark.parametrize("name", ["_width", "head_dim", "heads_and_size", "n_channels"])
def test_the_width_of_a_norm_without_a_weight_has_any_name(name):
    class Named(nn.Module):
        layer = 3

        def __init__(self):
            super().__init__()
            self.heads = 12
            setattr(self, name, (5, 40))

        def forward(self, x):
            return F.rms_norm(x, getattr(self, name)[-1:], eps=1e-6)

    assert identify(Named()).shape == (40,)


class GatedOverHeads(nn.Module):
    """A gain for each head, statistics over all of them or over each."""

    def __init__(self, each):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))
        self.over = -1 if each else (-2, -1)

    def forward(self, x, gate):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(self.over, keepdim=True) + 1e-6)
        return (y * self.weight.float() * F.silu(gate.float())).to(x.dtype)


@pytest.mark.parametrize("each", [True, False])
def test_gated_gains_of_two_dimensions(each):
    module = GatedOverHeads(each)
    x, gate = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4, 16)
    own = module(x, gate)
    assert len(patch(module).replaced) == 1
    torch.testing.assert_close(module(x, gate), own)


class AnyNumberOfInputs(Base):
    def forward(self, *args):
        return norm(args[0]) * self.weight


def test_inputs_without_names_are_taken():
    module = AnyNumberOfInputs()
    x = torch.randn(3, WIDTH)
    own = module(x)
    (entry,) = patch(module).replaced
    assert "before_scale" in str(entry.convention)
    torch.testing.assert_close(module(x), own)
