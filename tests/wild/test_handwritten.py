"""Norms written in many ways: which are RMSNorms, which are not, and why."""

import pytest
import torch

from rmsnorm import GatedRMSNorm, RMSNorm, identify, patch
from rmsnorm.patching.identifying import examine
from rmsnorm.patching.specimen import NotRMSNorm
from tests.wild.handwritten import OTHERS, RMS_NORMS, NormalizeWithUnitOffset, OneGainPerHead, SigmoidGateInside


@pytest.mark.parametrize("cls", RMS_NORMS, ids=lambda cls: cls.__name__)
def test_every_style_is_recognised_and_replaced(cls):
    module = cls()
    convention = identify(module)
    assert convention is not None
    report = patch(module)
    assert [entry.convention for entry in report.replaced] == [convention]
    shape = (2, 3, *(convention.shape or (20,)))
    inputs = [torch.randn(shape) for _ in range(1 if convention.activation is None else 2)]
    torch.testing.assert_close(module(*inputs), cls.forward(module, *inputs))


@pytest.mark.parametrize(("make", "reason"), OTHERS, ids=[reason for _, reason in OTHERS])
def test_what_is_no_rms_norm_is_refused_with_its_reason(make, reason):
    module = make()
    with pytest.raises(NotRMSNorm, match=reason):
        examine(module)
    assert identify(module) is None


def test_a_convention_gives_the_arguments_of_the_module_that_reproduces_it():
    convention = identify(NormalizeWithUnitOffset())
    assert convention.weight == "gamma"
    assert convention.arguments["weight_offset"] == 1.0
    assert identify(RMSNorm(**convention.arguments)).rounding == convention.rounding
    gated = identify(SigmoidGateInside())
    assert gated.arguments["norm_before_gate"] is False
    assert identify(GatedRMSNorm(**gated.arguments)).arguments == gated.arguments


def test_from_module_computes_the_same_with_the_same_parameter():
    theirs = NormalizeWithUnitOffset()
    torch.nn.init.normal_(theirs.gamma)
    ours = RMSNorm.from_module(theirs)
    assert ours.weight is theirs.gamma
    x = torch.randn(5, 48)
    torch.testing.assert_close(ours(x), theirs(x))
    heads = OneGainPerHead()
    torch.nn.init.normal_(heads.weight)
    x = torch.randn(5, 4, 12)
    made = RMSNorm.from_module(heads)
    assert made.weight is heads.weight
    torch.testing.assert_close(made(x), heads(x))


def test_from_module_says_what_it_cannot_convert():
    with pytest.raises(ValueError, match=r"LayerNorm is no RMSNorm .* subtracts the mean"):
        RMSNorm.from_module(torch.nn.LayerNorm(8))
    with pytest.raises(ValueError, match="is gated: use GatedRMSNorm"):
        RMSNorm.from_module(SigmoidGateInside())
    with pytest.raises(ValueError, match="has no gate: use RMSNorm"):
        GatedRMSNorm.from_module(torch.nn.RMSNorm(8))
