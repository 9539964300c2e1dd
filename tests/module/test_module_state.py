"""`RMSNorm` as a module like any of PyTorch's: state, copies, moves, training."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from rmsnorm import RMSNorm, rms_norm
from tests.support.bits import same
from tests.support.expected import tensor
from tests.support.modules import OPTIONS, filled


def test_state_dict_has_the_one_key_of_torch_nn():
    ours, theirs = filled(RMSNorm(8)), nn.RMSNorm(8)
    assert list(ours.state_dict()) == ["weight"]
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(theirs.weight, ours.weight)
    with torch.no_grad():
        theirs.weight.uniform_()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(theirs.weight, ours.weight)
    assert list(RMSNorm(8, elementwise_affine=False).state_dict()) == []
    RMSNorm(8, elementwise_affine=False).load_state_dict({}, strict=True)


def test_loading_is_strict_about_keys_and_shapes():
    for state in ({}, {"scale": torch.ones(8)}, {"weight": torch.ones(8), "bias": torch.ones(8)}):
        with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
            RMSNorm(8).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        RMSNorm(8).load_state_dict({"weight": torch.ones(7)})


def test_loading_onto_the_meta_device_by_assignment():
    norm = RMSNorm(8, device="meta")
    norm.load_state_dict({"weight": tensor(8, dtype=torch.bfloat16)}, assign=True)
    assert norm.weight.dtype == torch.bfloat16
    assert isinstance(norm.weight, nn.Parameter)
    x = tensor(3, 8)
    same(norm(x).detach(), rms_norm(x, norm.weight.detach()))


@pytest.mark.parametrize("options", OPTIONS)
def test_copies_and_pickles(options):
    norm = RMSNorm(8, sequence_parallel=True, **options)
    if norm.weight is not None:
        filled(norm)
    stream = io.BytesIO()
    torch.save(norm, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    x = tensor(3, 8, seed=2)
    for other in (copy.deepcopy(norm), copy.copy(norm), pickle.loads(pickle.dumps(norm)), loaded):  # noqa: S301
        assert repr(other) == repr(norm)
        same(other(x).detach(), norm(x).detach())
    if norm.weight is not None:
        assert copy.deepcopy(norm).weight is not norm.weight


def test_moves_like_any_module():
    norm = filled(RMSNorm(8))
    weight = norm.weight.detach().clone()
    for dtype, move in ((torch.float16, norm.half), (torch.bfloat16, norm.bfloat16), (torch.float64, norm.double)):
        assert move().weight.dtype == dtype
        x = tensor(3, 8)
        same(norm(x).detach(), rms_norm(x, norm.weight.detach()))
        assert norm(x).dtype == torch.float32
    assert norm.to("meta").weight.is_meta
    other = RMSNorm(8).to(torch.bfloat16)
    assert other.weight.dtype == torch.bfloat16
    same(weight, filled(RMSNorm(8)).weight.detach())


def test_float32_weights_train_on_16_bit_activations():
    norm = RMSNorm(64)
    optimiser = torch.optim.SGD(norm.parameters(), lr=1e-4)
    y = norm(tensor(32, 64, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    y.float().square().mean(0).sum().backward()
    assert norm.weight.grad.dtype == torch.float32
    optimiser.step()
    assert (norm.weight != 1).all()


def test_trains_to_another_norms_weight():
    goal = filled(RMSNorm(16, weight_offset=1.0))
    norm = RMSNorm(16, weight_offset=1.0, memory_efficient=True)
    x = tensor(64, 16)
    optimiser = torch.optim.SGD(norm.parameters(), lr=8.0)
    target = goal(x).detach()
    losses = []
    for _ in range(50):
        loss = (norm(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    # Each gain is a quadratic of its own with curvature about 2/16: a step of 8 solves it to a small fraction.
    assert losses[-1] < 1e-6 * losses[0]
