"""Whole models under `torch.compile`: for equal inputs each norm has the bits of eager code."""

import importlib.util
import os

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from rmsnorm import RMSNorm, rms_norm
from rmsnorm.cli.demo.model import PACKAGE, LanguageModel
from tests.support.bits import difference

LANGUAGE_MODEL = ("transformers", "gguf", "accelerate", "rich", PACKAGE.replace("-", "_"))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (found := difference(a, b)) is None, found


class Block(nn.Module):
    """A residual block of a Llama's shape: attention without the attention, and a gated MLP."""

    def __init__(self, dim):
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(dim, 1e-5, rounding="before_scale") for _ in range(2)])
        self.mix, self.up, self.down = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x, residual, seen):
        y, h = self.norms[0](x, residual)
        seen.append((x, residual, y, h))
        x = self.mix(y)
        y, h2 = self.norms[1](x, h)
        seen.append((x, h, y, h2))
        return self.down(nn.functional.silu(self.up(y)) * y), h2


class Model(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim) for _ in range(layers)])
        self.norm = RMSNorm(dim, 1e-5)

    def forward(self, x):
        residual, seen = torch.zeros_like(x), []
        for block in self.blocks:
            x, residual = block(x, residual, seen)
        y, h = self.norm(x, residual)
        seen.append((x, residual, y, h))
        return y, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_trained_compiled_has_the_norms_of_eager(dtype):
    torch.manual_seed(0)
    model = Model(64, layers=4).to(dtype)
    norms = [norm for block in model.blocks for norm in block.norms] + [model.norm]
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    compilations = []
    for step in range(20):
        y, seen = compiled(torch.randn(2 + step, 7, 64).to(dtype))
        with torch.no_grad():
            for norm, (x, residual, *given) in zip(norms, seen, strict=True):
                same(given, norm(x, residual))
        loss = (y.float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        compilations.append(counter.frame_count)
    assert losses[-1] < losses[0]
    assert compilations[-1] == compilations[0]


class Watched(nn.Module):
    """A layer, compiled; `pairs` gets what went into its norms, and what came out."""

    def __init__(self, layer, backend, pairs):
        super().__init__()
        self.layer, self.pairs, self.fresh = layer, pairs, []
        for norm in layer.modules():
            if isinstance(norm, RMSNorm):
                norm.register_forward_hook(lambda norm, inputs, y: self.fresh.append((norm, inputs[0], y)))
        self.compiled = torch.compile(layer, fullgraph=True, backend=backend)

    def forward(self, *args, **kwargs):
        self.fresh.clear()  # the compiler looks at its length: left to grow, it would compile each layer anew
        result = self.compiled(*args, **kwargs)
        self.pairs.extend(self.fresh)
        return result


@pytest.mark.demo
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_language_model_compiled_has_the_norms_of_eager(dtype):
    missing = [package for package in LANGUAGE_MODEL if importlib.util.find_spec(package) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"not installed: {', '.join(missing)}; `make demo` installs them")
    language_model = LanguageModel()
    language_model.load_tokenizer()
    language_model.load_weights()
    language_model.use_norms("after")
    language_model.use_dtype(dtype)
    model, pairs = language_model.model, []
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    inner = model.model
    inner.layers = nn.ModuleList(Watched(layer, counter, pairs) for layer in inner.layers)
    inner.norm = Watched(inner.norm, counter, pairs)
    ids = language_model.long_prompt(64)
    with torch.no_grad():
        model(ids, use_cache=False)
        assert len(pairs) == len(language_model.norms["after"]) == 61
        for norm, x, y in pairs:
            assert x.shape == (1, 64, 576)
            same([y], [norm(x)])
    assert counter.frame_count == 2  # one for all layers, and one for the last norm

    # And as it is trained: every weight, and what came into its norm, through one compiled function.
    train = torch.compile(rms_norm, fullgraph=True, dynamic=True)
    for norm, x, _ in pairs:
        leaves = x.clone().requires_grad_(), norm.weight.detach().clone().requires_grad_()
        dy = torch.linspace(-1, 1, x.numel()).reshape(x.shape).to(dtype)
        gradients = [
            torch.autograd.grad(f(*leaves, norm.eps, rounding=norm.rounding), leaves, dy) for f in (train, rms_norm)
        ]
        same(*gradients)
