"""`RMSNorm` inside of models: found, hooked, parametrised, and in place of the hand-written ones."""

import torch
from torch import nn
from torch.nn.utils import parametrize

import rmsnorm
from rmsnorm import RMSNorm, rms_norm
from tests.support.bits import same
from tests.support.expected import gradients, tensor
from tests.support.modules import filled


def test_filters_by_name_find_it():
    model = nn.Sequential(nn.Linear(4, 4), RMSNorm(4), nn.ModuleDict({"norm": RMSNorm(4, elementwise_affine=False)}))
    named = [name for name, module in model.named_modules() if "rmsnorm" in type(module).__name__.lower()]
    assert named == ["1", "2.norm"]
    no_decay = [name for name, p in model.named_parameters() if p.ndim == 1]
    assert no_decay == ["0.bias", "1.weight"]
    assert isinstance(model[1].weight, nn.Parameter)
    assert sum(p.numel() for p in model.parameters()) == 4 * 4 + 4 + 4


def test_frozen():
    norm = filled(RMSNorm(8)).requires_grad_(False)
    x = tensor(3, 8).requires_grad_()
    assert not norm(x.detach()).requires_grad
    norm(x).sum().backward()
    assert norm.weight.grad is None
    same(x.grad, gradients(torch.ones(3, 8), x.detach(), norm.weight)[0])


def test_hooks_of_every_kind():
    norm = filled(RMSNorm(8))
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    norm.register_forward_hook(lambda module, inputs, y: 2 * y)
    norm.register_full_backward_pre_hook(lambda module, dy: seen.append("backward"))
    norm.register_full_backward_hook(lambda module, dx, dy: seen.append("after"))
    norm.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("weight"))
    x = tensor(3, 8).requires_grad_()
    y = norm(x)
    same(y.detach(), 2 * rms_norm(x.detach(), norm.weight.detach()))
    y.sum().backward()
    assert seen[:2] == ["before", "backward"]
    assert set(seen[2:]) == {"after", "weight"}


def test_functional_call_with_other_weights():
    norm = RMSNorm(8)
    x, weight = tensor(3, 8), tensor(8, seed=1).requires_grad_()
    y = torch.func.functional_call(norm, {"weight": weight}, x)
    same(y.detach(), rms_norm(x, weight.detach()))
    y.sum().backward()
    same(weight.grad, gradients(torch.ones(3, 8), x, weight.detach())[1])
    assert norm.weight.grad is None


class Exponential(nn.Module):
    def forward(self, logarithm):
        return logarithm.exp()


def test_parametrised_weights():
    norm = filled(RMSNorm(8))
    logarithm = norm.weight.detach().clone()
    parametrize.register_parametrization(norm, "weight", Exponential())
    x = tensor(3, 8)
    same(norm(x).detach(), rms_norm(x, logarithm.exp()))
    norm(x).sum().backward()
    expected = gradients(torch.ones(3, 8), x, logarithm.exp())[1] * logarithm.exp()
    same(norm.parametrizations.weight.original.grad, expected)


class HandWritten(nn.Module):
    """A norm as projects have them: by the formula in float32, with the weight of all norms."""

    def __init__(self, width, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.scale = scale

    def forward(self, x):
        mean_square = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).square() / x.shape[-1]
        return self.scale(x.float() / (mean_square + 1e-6).sqrt(), self.weight, x.dtype)


def test_replaces_the_hand_written_ones():
    """One that rounds before the weight and one with a unit offset: the same dtypes, and results near to theirs."""

    def before_scale(x_hat, weight, dtype):
        return x_hat.to(dtype) * weight

    def unit_offset(x_hat, weight, dtype):
        return (x_hat + x_hat * weight.float()).to(dtype)

    x = tensor(64, 256, dtype=torch.bfloat16)
    for scale, options in ((before_scale, {"rounding": "before_scale"}), (unit_offset, {"weight_offset": 1.0})):
        theirs = HandWritten(256, scale)
        for dtype in (torch.float32, torch.bfloat16):
            filled(theirs.to(dtype))
            ours = RMSNorm(256, **options).to(dtype)
            ours.load_state_dict(theirs.state_dict())
            a, b = ours(x).detach(), theirs(x).detach()
            assert a.dtype == b.dtype
            # Their float32 mean of 256 squares is off by at most 256/2 roundings, ours by none; 8 more for the rest of
            # both. That moves a result to the next 16-bit number at most, once or twice where it was rounded twice.
            spacing = 2 if dtype == a.dtype == torch.bfloat16 else 1
            inner = (256 / 2 + 8) * 2.0**-24 + 2.0**-7
            assert ((a.double() - b.double()).abs() <= spacing * inner * b.double().abs()).all()


def test_is_exported():
    assert set(rmsnorm.__all__) >= {"RMSNorm", "add_rms_norm", "rms_norm"}
