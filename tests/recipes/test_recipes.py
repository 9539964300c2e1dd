"""Gains of whole models: without decay, in float32, as offsets; by norms of other people's classes and our own."""

import copy

import pytest
import torch
from torch import nn

import rmsnorm
from rmsnorm import RMSNorm, float32_weights, from_offset, param_groups, to_offset


class Theirs(nn.Module):
    """Llama's rounding, in a class that nobody knows."""

    def __init__(self, dim, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Scale(nn.Module):
    """A weight like a norm's, and no norm."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.weight


def model(dtype=torch.float32):
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(8, 16), Theirs(16), nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-6), RMSNorm(16, weight_offset=1.0)
    ).to(dtype)
    with torch.no_grad():
        for i in (1, 3):
            made[i].weight.copy_(torch.empty(16).uniform_(0.5, 2.0))
        made[4].weight.uniform_(-0.5, 1.0)
    return made


def test_gains_alone_are_without_decay_whatever_their_class():
    given = nn.Sequential(model(), Scale(16))
    decayed, not_decayed = param_groups(given, weight_decay=0.1)
    assert not_decayed["names"] == ["0.1.weight", "0.3.weight", "0.4.weight"]
    assert (decayed["weight_decay"], not_decayed["weight_decay"]) == (0.1, 0.0)
    assert decayed["names"] == ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias", "1.weight"]
    named = dict(given.named_parameters())
    for group in (decayed, not_decayed):
        assert all(named[name] is p for name, p in zip(group["names"], group["params"], strict=True))


def test_vectors_may_stay_out_too_and_frozen_parameters_are_in_no_group():
    given = model()
    given[2].weight.requires_grad_(False)
    decayed, not_decayed = param_groups(given, weight_decay=0.1, vectors=True)
    assert decayed["names"] == ["0.weight"]
    assert not_decayed["names"] == ["0.bias", "1.weight", "2.bias", "3.weight", "4.weight"]


def test_decay_moves_no_gain():
    given = model()
    before = {name: p.detach().clone() for name, p in given.named_parameters()}
    optimizer = torch.optim.SGD(param_groups(given, weight_decay=0.5), lr=0.1)
    for p in given.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moved = {name for name, p in given.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("weight_decay", [-0.1, float("nan")])
def test_a_decay_below_zero_is_refused(weight_decay):
    with pytest.raises(ValueError, match="weight_decay must be 0 or more"):
        param_groups(model(), weight_decay=weight_decay)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gains_in_float32_beside_activations_of_16_bits(dtype):
    given = model(dtype)
    parameters, state = dict(given.named_parameters()), copy.deepcopy(given.state_dict())
    x = torch.randn(3, 8).to(dtype)
    before = given(x)
    outcome = float32_weights(given)
    assert [step.name for step in outcome.done] == ["1", "3", "4"]
    assert not outcome.left
    y = given(x)
    assert y.dtype == dtype
    assert all(parameters[name] is p for name, p in given.named_parameters())
    for i, offset in ((1, 0.0), (3, 0.0), (4, 1.0)):
        norm = given[i]
        assert norm.weight.dtype == torch.float32
        assert torch.equal(norm.weight, state[f"{i}.weight"].float())
        u = torch.randn(5, 16).to(dtype)
        assert torch.equal(norm(u), rmsnorm.rms_norm(u, state[f"{i}.weight"], norm.eps, weight_offset=offset))
    y.float().sum().backward()
    assert given[1].weight.grad.dtype == torch.float32
    outcome.undo()
    assert torch.equal(given(x), before)
    assert all(torch.equal(t, state[name]) and t.dtype == dtype for name, t in given.state_dict().items())


def test_a_step_too_small_for_bfloat16_moves_a_gain_in_float32():
    given = model(torch.bfloat16)
    with torch.no_grad():
        given[3].weight.fill_(1.0)
    float32_weights(given)
    optimizer = torch.optim.SGD([given[3].weight], lr=1e-3)
    for _ in range(10):
        given[3].weight.grad = torch.ones(16)
        optimizer.step()
    # Ten steps of 1e-3, each rounded to float32.
    assert torch.allclose(given[3].weight, torch.full((16,), 0.99), atol=10 * 2.0**-24, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_offsets_of_gains_between_a_half_and_two_are_exact_both_ways(dtype):
    given = model(dtype)
    x = torch.randn(3, 8).to(dtype)
    before, weight = given(x), given[3].weight.detach().clone()
    there = to_offset(given)
    assert [step.name for step in there.done] == ["1", "3"]
    assert [step.said for step in there.left] == ["its gains are offsets from 1 already"]
    assert "all 16 gains are exactly what they were" in str(there)
    assert torch.equal(given[3].weight, weight - 1)
    assert torch.equal(given(x), before)
    again = from_offset(given)
    assert [step.name for step in again.done] == ["1", "3", "4"]
    assert torch.equal(given[3].weight, weight)
    again.undo()
    there.undo()
    assert torch.equal(given(x), before)
    assert type(given[1]) is Theirs


def test_undo_converts_what_was_trained_meanwhile():
    given = model()
    outcome = to_offset(given)
    with torch.no_grad():
        given[3].weight.fill_(0.25)
    outcome.undo()
    assert torch.equal(given[3].weight, torch.full((16,), 1.25))
    with pytest.raises(ValueError, match="undone already"):
        outcome.undo()


def test_what_cannot_be_replaced_says_why():
    shared = nn.RMSNorm(16, eps=1e-6)
    hooked, tied = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6)
    tied.weight = shared.weight
    hooked.register_forward_hook(lambda *_: None)
    given = nn.ModuleDict(
        {"a": shared, "again": shared, "hooked": hooked, "tied": tied, "bare": nn.RMSNorm(16, 1e-6, False)}
    )
    outcome = to_offset(given)
    assert [step.name for step in outcome.done] == ["a"]
    assert given["a"] is given["again"]
    assert isinstance(given["a"], RMSNorm)
    said = {step.name: step.said for step in outcome.left}
    assert "hooks" in said["hooked"]
    assert said["tied"] == "it shares its weight with a"
    assert "no weight" in said["bare"]
    assert [step.said for step in to_offset(nn.RMSNorm(8, eps=1e-6)).left] == ["it is the model itself"]


def test_gradients_that_wait_are_refused():
    given = model()
    given(torch.randn(2, 8)).sum().backward()
    with pytest.raises(ValueError, match=r"1\.weight has a gradient"):
        float32_weights(given)
