"""Weights between gains and offsets, and modules made from others: what is kept exactly, and what is said where not."""

from fractions import Fraction

import pytest
import torch
from torch import nn

import rmsnorm
from rmsnorm import GatedRMSNorm, RMSNorm, fold_offset, rms_norm, unfold_offset
from tests.wild.handwritten import EpsInABuffer, OneGainPerHead, Scaleless, SigmoidGateInside, WeightInABuffer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weights(dtype, mean, n=4096):
    return torch.empty(n).normal_(mean, 0.3, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1.0, 0.5, -1.0])
def test_a_folded_weight_is_the_gain_that_the_norm_forms(dtype, offset):
    weight = weights(dtype, 0.0)
    folded = fold_offset(weight, offset)
    assert (folded.weight.dtype, folded.changed, folded.largest) == (torch.float32, 0, 0.0)
    assert torch.equal(folded.weight, weight.float() + offset)
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rms_norm(x, folded.weight), rms_norm(x, weight, weight_offset=offset))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_rounding_to_16_bits_changes_is_counted(dtype):
    weight = weights(dtype, 0.0)
    folded = fold_offset(weight, dtype=dtype)
    pairs = zip(folded.weight.tolist(), (weight.float() + 1).tolist(), strict=True)
    changes = [abs(Fraction(new) - Fraction(gain)) / abs(Fraction(gain)) for new, gain in pairs if new != gain]
    assert 0 < folded.changed == len(changes)
    assert folded.largest == pytest.approx(float(max(changes)))
    assert folded.largest <= torch.finfo(dtype).eps / 2
    assert str(folded) == (
        f"{len(changes)} of 4096 gains changed by rounding, by at most {folded.largest:.2g} of their size"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gains_between_half_and_twice_the_offset_go_to_offsets_and_back_exactly(dtype):
    gain = weights(dtype, 1.0).clamp(0.5, 2.0)
    offsets = unfold_offset(gain)
    assert (offsets.weight.dtype, offsets.changed) == (dtype, 0)
    assert torch.equal(fold_offset(offsets.weight, dtype=dtype).weight, gain)
    assert str(offsets) == "all 4096 gains are exactly what they were"


def test_a_gain_far_from_the_offset_loses_bits_and_that_is_said():
    tiny = torch.tensor([2.0**-12, 1.0], dtype=torch.bfloat16)
    found = unfold_offset(tiny)
    assert (found.changed, found.largest) == (1, 1.0)
    assert unfold_offset(tiny, dtype=torch.float32).changed == 0


def test_float64_stays_float64_and_the_argument_as_it_was():
    weight = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    folded = fold_offset(weight)
    assert folded.weight.dtype == torch.float64
    assert not folded.weight.requires_grad
    assert weight.item() == 0.1


@pytest.mark.parametrize("convert", [fold_offset, unfold_offset])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0],), "weight must be a torch.Tensor, got list"),
        ((torch.ones(2, dtype=torch.int32),), "weight must be floating-point, got int32"),
        ((torch.ones(2), 1.0, torch.int8), "dtype must be floating-point, got int8"),
    ],
)
def test_what_cannot_be_converted(convert, arguments, message):
    with pytest.raises(TypeError, match=message):
        convert(*arguments)


@pytest.mark.parametrize(
    "cls", [nn.RMSNorm, OneGainPerHead, WeightInABuffer, EpsInABuffer], ids=lambda cls: cls.__name__
)
def test_a_module_made_from_another_computes_the_same(cls):
    theirs = cls(8) if cls is nn.RMSNorm else cls()
    state = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    weight = max(state.values(), key=torch.numel)
    nn.init.normal_(weight.data, generator=torch.Generator().manual_seed(0))
    made = RMSNorm.from_module(theirs)
    x = torch.randn(5, *weight.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(made(x), theirs(x))


def test_mode_dtype_and_what_is_trained_are_kept():
    theirs = nn.RMSNorm(8, dtype=torch.bfloat16).eval()
    theirs.weight.requires_grad_(False)
    made = RMSNorm.from_module(theirs)
    assert made.weight is theirs.weight
    assert not made.training
    with torch.device("meta"):
        theirs = nn.RMSNorm(8)
    assert RMSNorm.from_module(theirs).weight is theirs.weight


class GatePerHead(OneGainPerHead):
    def forward(self, x, gate):
        return super().forward(x) * torch.nn.functional.silu(gate)


@pytest.mark.parametrize(
    ("make", "cls", "message"),
    [
        (lambda: nn.LayerNorm(8), RMSNorm, "LayerNorm is no RMSNorm that can be converted: it subtracts the mean"),
        (Scaleless, RMSNorm, r"takes any width: write RMSNorm\(dim, eps=1e-06, elementwise_affine=False\)"),
        (lambda: nn.RMSNorm(8, eps=0.0), RMSNorm, "eps 0"),
        (GatePerHead, GatedRMSNorm, r"scales rows of shape \(4, 12\), GatedRMSNorm those of one dimension"),
        (SigmoidGateInside, RMSNorm, "is gated: use GatedRMSNorm"),
        (lambda: nn.RMSNorm(8), GatedRMSNorm, "has no gate: use RMSNorm"),
    ],
)
def test_what_no_module_of_ours_can_be_made_from(make, cls, message):
    with pytest.raises(ValueError, match=message):
        cls.from_module(make())


@pytest.mark.parametrize("function", [rmsnorm.identify, rmsnorm.patch, rmsnorm.unpatch, RMSNorm.from_module])
def test_what_is_no_module_at_all(function):
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got type"):
        function(nn.RMSNorm)
