"""What makes graphs of models, and odd tensors: works after patch if it worked before, with the module's own values."""

import copy
import warnings
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from rmsnorm import patch
from tests.wild.handwritten import Base


class Stock(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(dim) + 0.5), 1e-6

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class UsesItsFile(Stock):
    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def pair(norm):
    own = nn.Sequential(nn.Linear(8, 8), norm)
    patched = copy.deepcopy(own)
    assert len(patch(patched).replaced) == 1
    return own, patched, torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


NORMS = {"of torch": lambda: nn.RMSNorm(8), "handwritten": Stock, "with globals": UsesItsFile}


@pytest.fixture(params=NORMS.values(), ids=NORMS.keys())
def models(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pair(request.param())


def test_torchscript_compiles_the_modules_own_forward(models):
    own, patched, x = models
    assert torch.equal(torch.jit.script(patched)(x), own(x))
    assert len(patch(patched).replaced) == 0  # it is patched still
    assert "rmsnorm" in repr(patched)


def test_torchscript_traces_with_gradients(models):
    own, patched, x = models
    traced = torch.jit.trace(patched, x)
    assert torch.equal(traced(x), own(x))
    traced(x).square().sum().backward()
    own(x).square().sum().backward()
    assert torch.equal(patched[1].weight.grad, own[1].weight.grad)


def test_fx_traces_and_keeps_the_values(models):
    own, patched, x = models
    torch.testing.assert_close(torch.fx.symbolic_trace(patched)(x), own(x))


def test_make_fx_traces_forward_and_backward(models):
    own, patched, x = models
    torch.testing.assert_close(make_fx(patched)(x)(x), own(x))
    loss = make_fx(lambda x: torch.func.grad(lambda u: patched(u).square().sum())(x))
    wanted = torch.func.grad(lambda u: own(u).square().sum())(x)
    torch.testing.assert_close(loss(x)(x), wanted)


def test_a_gradient_for_the_weight_where_activations_are_of_inference_mode():
    # The module's own forward saves nothing of its input.
    own, patched, _ = pair(Stock())
    with torch.inference_mode():
        x = torch.randn(3, 8)
    for model in (own, patched):
        model[1](x).square().sum().backward()
    torch.testing.assert_close(patched[1].weight.grad, own[1].weight.grad)


ORDERS = {
    "channels last": lambda: torch.randn(2, 8, 3, 5).permute(0, 2, 3, 1),
    "heads moved": lambda: torch.randn(2, 3, 5, 8).transpose(1, 2),
    "sequence first": lambda: torch.randn(4, 3, 8).transpose(0, 1),
    "every second row": lambda: torch.randn(8, 3, 8)[::2],
    "part of a row": lambda: torch.randn(4, 3, 24)[..., 8:16],
    "part of a row, heads moved": lambda: torch.randn(4, 3, 5, 24)[..., 8:16].transpose(1, 2),
    "columns": lambda: torch.randn(8, 5).t(),
    "spread": lambda: torch.randn(1, 1, 8).expand(4, 3, 8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS.keys())
def test_results_lie_in_memory_as_the_modules_own(models, make, dtype):
    own, patched, _ = models
    x = make().to(dtype)
    wanted, got = own[1].to(dtype)(x), patched[1].to(dtype)(x)
    assert got.stride() == wanted.stride()
    torch.testing.assert_close(got, wanted)


def test_any_number_of_arguments_reaches_this_library():
    class Norm(Base):
        def forward(self, *args, **kwargs):
            (x,) = args
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    class Seen(TorchFunctionMode):
        functions: ClassVar[list] = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.functions.append(function)
            return function(*args, **(kwargs or {}))

    module = Norm()
    x = torch.randn(2, module.weight.numel())
    with Seen() as seen:
        module(x)
        assert F.rms_norm in seen.functions
        seen.functions.clear()
    assert patch(module).replaced
    with Seen() as seen:
        module(x)
    assert F.rms_norm not in seen.functions
