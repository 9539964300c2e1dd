"""What people do with models after patch, and before it: the results stay those of the module's own forward."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import rmsnorm
from rmsnorm import patch
from rmsnorm.patching.patched import is_patched

WIDTH = 16


class Llama(nn.Module):
    def __init__(self, width=WIDTH, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, width)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = Llama(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[0])  # shared

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def rows(dtype=torch.float32, *lead):
    return torch.randn(*(lead or (5,)), WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def bfloat16(model):
    return model.bfloat16()


def changed_eps(model):
    for block in model.blocks:
        block.norm.eps = 0.5
    return model


def swapped(model):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def other_weights(model):
    return {name: torch.linspace(1, 2, t.numel()).view_as(t) for name, t in model.state_dict().items()}


def loaded(model, **options):
    model.load_state_dict(other_weights(model), **options)
    return model


def assigned(model):
    return loaded(model, assign=True)


def emptied(model):
    return loaded(model.to("meta").to_empty(device="cpu"))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - made here


def parametrised(model):
    class Double(nn.Module):
        def forward(self, t):
            return 2 * t

    nn.utils.parametrize.register_parametrization(model.blocks[0].norm, "weight", Double())
    return model


def parametrised_and_back(model):
    parametrised(model)
    nn.utils.parametrize.remove_parametrizations(model.blocks[0].norm, "weight")
    return model


def weight_normed(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.blocks[0].norm)
        model.blocks[0].norm.weight_g.data.mul_(3)
    return model


def own_forward(model):
    norm = model.blocks[0].norm
    norm.forward = lambda x: x * 3
    return model


def wrapped_forward(model):
    """As hooks of accelerate do it."""
    norm = model.blocks[0].norm
    own = norm.forward
    norm.forward = lambda x: own(x) + 1
    return model


def quantised(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


SITUATIONS = (
    *(bfloat16, changed_eps, swapped, loaded, assigned, emptied, copy.deepcopy, pickled, saved),
    *(parametrised, parametrised_and_back, weight_normed, own_forward, wrapped_forward, quantised),
)


def both():
    own, patched = Model(), Model()
    assert len(patch(patched).replaced) == 2
    return own, patched


def near(got, expected):
    assert got.dtype == expected.dtype
    precision = max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps)
    # Three blocks, each of a norm that differs by one unit in the last place at most and of a product of WIDTH terms.
    torch.testing.assert_close(got, expected, rtol=64 * precision, atol=64 * precision)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda f: f.__name__)
def test_after_patch(situation):
    own, patched = map(situation, both())
    x = rows(own.blocks[0].norm.weight.dtype)
    near(patched(x), own(x))
    assert all(is_patched(block.norm) for block in patched.blocks)


@pytest.mark.parametrize("situation", SITUATIONS[:9], ids=lambda f: f.__name__)
def test_before_patch(situation):
    own, patched = situation(Model()), situation(Model())
    assert len(patch(patched).replaced) == 2
    x = rows(own.blocks[0].norm.weight.dtype)
    near(patched(x), own(x))


def test_a_replica_uses_its_own_weights():
    own, patched = (model.blocks[0].norm for model in both())
    copies = []
    for norm in (own, patched):
        copied = norm._replicate_for_data_parallel()
        copied._parameters = {}
        copied.weight = torch.linspace(1, 2, WIDTH)  # a tensor, not a parameter
        copies.append(copied)
    near(copies[1](rows()), copies[0](rows()))


def test_tied_weights_on_meta_get_their_values():
    def made():
        with torch.device("meta"):
            model = Model()
        return tied(model)

    def tied(model):
        model.blocks[1].norm.weight = model.blocks[0].norm.weight
        return model

    own, patched = made(), made()
    assert len(patch(patched).replaced) == 2
    assert patched.blocks[0].norm.weight is patched.blocks[1].norm.weight
    for model in (own, patched):
        loaded(tied(model.to_empty(device="cpu")))  # which unties
    near(patched(rows()), own(rows()))


def test_functional_call():
    own, patched = both()
    state = {name: t.detach() + 1 for name, t in own.named_parameters()}
    near(*(torch.func.functional_call(model, state, (rows(),)) for model in (patched, own)))


def test_vmap_over_stacked_modules():
    own, patched = both()
    models = [patched.blocks[0].norm, patched.blocks[1].norm]
    models[1].weight.data.mul_(2)
    own.blocks[1].norm.weight.data.mul_(2)
    parameters, buffers = torch.func.stack_module_state(models)

    def call(p, b, x):
        return torch.func.functional_call(models[0], (p, b), (x,))

    got = torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, rows())
    near(got, torch.stack([own.blocks[0].norm(rows()), own.blocks[1].norm(rows())]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    gradients = []
    for model in both():
        x = rows().requires_grad_()
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        gradients.append((x.grad, model.blocks[0].norm.weight.grad))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def test_second_derivatives():
    own, patched = (model.blocks[0].norm for model in both())
    x = rows()[0]
    expected, got = (torch.autograd.functional.hessian(lambda x, f=f: f(x).pow(3).sum(), x) for f in (own, patched))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_compiled_with_a_later_eps_weight_and_forward(monkeypatch):
    torch._dynamo.reset()
    own, patched = both()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    for change in (lambda model: model, loaded, changed_eps, bfloat16):
        x = rows(change(own).blocks[0].norm.weight.dtype)
        change(patched)
        near(compiled(x), own(x))
    monkeypatch.setattr(Llama, "forward", lambda self, x: x * self.weight)
    near(compiled(x), own(x))


def test_export():
    own, patched = both()
    near(torch.export.export(patched, (rows(),)).module()(rows()), own(rows()))


def test_onnx_of_torchscript():
    onnx = pytest.importorskip("onnx")
    _, patched = both()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(patched, (rows(),), file, dynamo=False)
    graph = onnx.load_from_string(file.getvalue()).graph
    assert {node.domain for node in graph.node} == {""}
    assert "Sqrt" in {node.op_type for node in graph.node}


def test_make_fx_of_a_memory_efficient_norm():
    norm = rmsnorm.RMSNorm(WIDTH, memory_efficient=True)

    def gradient(x):
        return torch.autograd.grad(norm(x).square().sum(), x)[0]

    traced = make_fx(gradient)(rows().requires_grad_())
    x = (rows() + 1).requires_grad_()
    near(traced(x), gradient(x))
