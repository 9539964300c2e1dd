"""Gains folded into linear layers: the function stays, and what takes more than the norm's result is left alone."""

import copy

import pytest
import torch
from torch import nn

from rmsnorm import RMSNorm, fold_into_linear
from rmsnorm.recipes import folding


class Block(nn.Module):
    """A norm before two layers, one before an MLP whose branch also takes it, and one that comes last."""

    def __init__(self, dim=16):
        super().__init__()
        self.before = nn.RMSNorm(dim, eps=1e-6)
        self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.heads = RMSNorm(4)
        self.inner = RMSNorm(dim, weight_offset=1.0)
        self.up = nn.Linear(dim, dim)
        self.kept = nn.RMSNorm(dim, eps=1e-6)
        self.down = nn.Linear(dim, dim)
        self.last = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x):
        n = self.before(x)
        q = self.heads(self.q(n).unflatten(-1, (4, 4))) * 2
        x = x + q.flatten(-2) + self.k(n[..., :])
        x = x + self.up(self.inner(x).view(x.shape))
        n = self.kept(x)
        return self.last(n + self.down(n))


def random_gains(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 and "bias" not in name:
                p.uniform_(0.25, 0.75)
    return model


def test_what_linear_layers_alone_take_is_folded_and_undone():
    model = random_gains(Block())
    x = torch.randn(2, 5, 16)
    before, own = model(x), copy.deepcopy(model)
    outcome = fold_into_linear(model, x)
    assert {step.name: step.said for step in outcome.done} == {"before": "into q, k", "inner": "into up"}
    left = {step.name: step.said for step in outcome.left}
    assert left["heads"] == "its result is also taken by aten::mul"
    assert left["kept"] == "its result is also taken by aten::add"
    assert left["last"] == "its result is also taken by the model's result"
    assert model.before.weight is None
    assert torch.equal(model.k.weight, own.k.weight * own.before.weight)
    assert torch.equal(model.up.weight, own.up.weight * (own.inner.weight + 1.0))
    # Each product of 16 in four layers has one rounding more, of numbers of order one.
    torch.testing.assert_close(model(x), before, rtol=0, atol=64 * 2.0**-23)
    outcome.undo()
    assert torch.equal(model(x), before)
    assert model.state_dict().keys() == own.state_dict().keys()


class Tied(nn.Module):
    """The layer's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.norm = nn.RMSNorm(16, eps=1e-6)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


class Shared(nn.Module):
    """Two norms before one layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.layer = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(self.a(x)) + self.layer(self.b(x))


class Mixed(Shared):
    """One layer before and after a norm."""

    def forward(self, x):
        return self.layer(self.a(self.layer(x)))


class Unused(Shared):
    def forward(self, x):
        return self.layer(x)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x


class Special(Shared):
    def __init__(self):
        super().__init__()
        self.layer = OwnLinear(16, 16)

    def forward(self, x):
        return self.layer(self.a(x))


@pytest.mark.parametrize(
    ("cls", "norm", "reason"),
    [
        (Tied, "norm", "the weight of head is tied to another module's"),
        (Shared, "a", "layer also takes something else"),
        (Mixed, "a", "layer also takes something else"),
        (Unused, "a", "no linear layer took its result"),
        (Special, "a", "its result is also taken by aten::add"),
    ],
)
def test_consumers_that_are_not_the_norms_alone_are_refused(cls, norm, reason):
    model = random_gains(cls())
    state = copy.deepcopy(model.state_dict())
    given = torch.arange(6).view(2, 3) if cls is Tied else torch.randn(2, 16)
    if cls is Special:
        reason = "layer is no ordinary linear layer"
    outcome = fold_into_linear(model, given)
    assert not outcome.done
    assert {step.name: step.said for step in outcome.left}[norm] == reason
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_a_16_bit_layer_is_rounded_once():
    model = random_gains(nn.Sequential(nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 16))).bfloat16()
    own = copy.deepcopy(model)
    fold_into_linear(model, torch.randn(2, 16).bfloat16())
    assert torch.equal(model[1].weight, (own[1].weight.float() * own[0].weight.float()).bfloat16())
    assert model(torch.randn(2, 16).bfloat16()).dtype == torch.bfloat16


def test_nothing_is_changed_where_the_folded_copy_gives_another_result(monkeypatch):
    model = random_gains(Block())
    x = torch.randn(2, 16)
    before = model(x)
    fold = folding._fold

    def wrong(given, name, takers, ours):
        return fold(given, name, takers[1:], ours)

    monkeypatch.setattr(folding, "_fold", wrong)
    with pytest.raises(ValueError, match="a folded copy gives another result"):
        fold_into_linear(model, x)
    assert torch.equal(model(x), before)
