"""Derivatives of every kind: higher orders, forward mode, `vmap`, functorch, checkpointing, frozen parts, hooks."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from rmsnorm.spec import ROUNDINGS
from tests.support.bits import difference

# Of input and weight.
PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]


def same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (found := difference(a, b)) is None, found


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def stack(results):
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def weighted(x, weight, dy):
    """A scalar whose gradients are those of `rms_norm` for the incoming gradient dy."""
    return (rms_norm(x, weight).float() * dy.float()).sum()


def eager_gradients(x, weight, dy):
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    return torch.autograd.grad(weighted(x, weight, dy), (x, weight))


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(str(d).removeprefix("torch.") for d in pair))
def batch(request):
    """Six samples of x and dy, one weight for all, and one for each."""
    dtype, weight_dtype = request.param
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(6, 3, 65, generator=g).to(dtype) for _ in range(2))
    return x, dy, torch.randn(65, generator=g).to(weight_dtype), torch.randn(6, 65, generator=g).to(weight_dtype)


# ---------------------------------------------------------------- the judges of PyTorch


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gradcheck_of_every_kind(rounding):
    def function(x, weight):
        return rms_norm(x, weight, 1e-5, weight_offset=0.5, rounding=rounding)

    inputs = double(3, 5), double(5)
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True)


def test_gradcheck_with_a_residual():
    def function(x, residual, weight):
        return add_rms_norm(x, residual, weight, 1e-5)

    inputs = double(3, 5), double(3, 5), double(5)
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_gradcheck_with_a_frozen_part(wanted):
    x, weight = (t.requires_grad_(w) for t, w in zip((double(3, 5).detach(), double(5).detach()), wanted, strict=True))
    assert gradcheck(rms_norm, (x, weight), check_forward_ad=True)
    assert gradgradcheck(rms_norm, (x, weight), check_fwd_over_rev=True)
    assert gradgradcheck(lambda x: rms_norm(x, None), (double(3, 5),), check_fwd_over_rev=True)


def test_third_order():
    def gradient(x, weight):
        (g,) = torch.autograd.grad(rms_norm(x, weight, 0.1).pow(3).sum(), x, create_graph=True)
        return g

    assert gradgradcheck(gradient, (double(2, 4), double(4)))


# ---------------------------------------------------------------- first order stays on the kernels


def test_functional_gradients_have_the_bits_of_backward(batch):
    x, dy, weight, _ = batch
    expected = eager_gradients(x, weight, dy)
    same(grad(weighted, (0, 1))(x, weight, dy), expected)
    y, pull_back = vjp(rms_norm, x, weight)
    same([y], [rms_norm(x, weight)])
    same(pull_back(dy.to(y.dtype)), expected)


def test_per_sample_gradients_have_the_bits_of_a_loop(batch):
    x, dy, weight, weights = batch
    per_sample = vmap(grad(weighted, (0, 1)), (0, None, 0))
    same(per_sample(x, weight, dy), stack([eager_gradients(a, weight, b) for a, b in zip(x, dy, strict=True)]))
    per_model = vmap(grad(weighted, (0, 1)), (0, 0, 0))
    expected = stack([eager_gradients(a, w, b) for a, w, b in zip(x, weights, dy, strict=True)])
    same(per_model(x, weights, dy), expected)
    same(vmap(grad(weighted, (0, 1)), (0, None, 0), chunk_size=4)(x, weight, dy), per_sample(x, weight, dy))


def test_vmap_over_either_or_both_has_the_bits_of_a_loop(batch):
    x, _, weight, weights = batch
    same([vmap(rms_norm, (0, None))(x, weight)], [rms_norm(x, weight)])
    same([vmap(rms_norm, (1, None), 2)(x, weight)], [rms_norm(x, weight).movedim(1, 2)])
    one = x[0]
    same([vmap(rms_norm, (None, 0))(one, weights)], [torch.stack([rms_norm(one, w) for w in weights])])
    expected = torch.stack([rms_norm(a, w) for a, w in zip(x, weights, strict=True)])
    same([vmap(rms_norm)(x, weights)], [expected])
    same([vmap(rms_norm, (0, 1))(x, weights.t())], [expected])
    same([vmap(vmap(rms_norm, (0, None)), (0, None))(x, weight)], [rms_norm(x, weight)])
    expected = stack([add_rms_norm(a, one, w) for a, w in zip(x, weights, strict=True)])
    same(vmap(add_rms_norm, (0, None, 0))(x, one, weights), expected)
    same(vmap(add_rms_norm, (0, None, None))(x, one, weight), stack([add_rms_norm(a, one, weight) for a in x]))


def test_vmap_over_nothing():
    assert vmap(rms_norm, (0, None))(torch.empty(0, 3, 8), torch.ones(8)).shape == (0, 3, 8)
    assert vmap(rms_norm, (None, 0))(torch.ones(3, 8), torch.empty(0, 8)).shape == (0, 3, 8)


def test_weights_of_several_dimensions_under_transforms():
    x, weight = torch.randn(5, 2, 3, 4), torch.randn(3, 4)
    same([vmap(rms_norm, (0, None))(x, weight)], [rms_norm(x, weight)])
    per_sample = vmap(grad(lambda w, x: rms_norm(x, w).sum()), (None, 0))(weight, x)
    assert per_sample.shape == (5, 3, 4)


def test_batched_incoming_gradients_have_the_bits_of_a_loop():
    x, weight = torch.randn(3, 17, requires_grad=True), torch.randn(17, requires_grad=True)
    incoming = torch.randn(4, 3, 17)
    y = rms_norm(x, weight)
    one_by_one = stack([torch.autograd.grad(y, (x, weight), g, retain_graph=True) for g in incoming])
    same(torch.autograd.grad(y, (x, weight), incoming, is_grads_batched=True), one_by_one)


# ---------------------------------------------------------------- higher orders agree among themselves


def test_hessian_and_jacobians_by_every_route():
    x, weight = torch.randn(2, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def loss(x):
        return rms_norm(x, weight, 0.1).pow(3).sum()

    def function(x):
        return rms_norm(x, weight, 0.1)

    expected = torch.autograd.functional.hessian(loss, x)
    for route in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacfwd(f))):
        torch.testing.assert_close(route(loss)(x), expected)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, x, vectorize=True), expected)
    torch.testing.assert_close(jacfwd(function)(x), jacrev(function)(x))
    for options in ({}, {"vectorize": True}, {"vectorize": True, "strategy": "forward-mode"}):
        torch.testing.assert_close(torch.autograd.functional.jacobian(function, x, **options), jacrev(function)(x))
    third = grad(lambda x: grad(lambda x: grad(loss)(x).pow(2).sum())(x).pow(2).sum())
    assert third(x).shape == x.shape


def test_forward_mode_agrees_with_reverse_mode():
    x, weight, dx, dy = (torch.randn(s, dtype=torch.float64) for s in ((3, 6), (6,), (3, 6), (3, 6)))
    _, tangent = jvp(rms_norm, (x, weight), (dx, torch.zeros_like(weight)))
    with forward_ad.dual_level():
        y = rms_norm(forward_ad.make_dual(x, dx), weight)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, tangent)
    pulled, _ = vjp(rms_norm, x, weight)[1](dy)
    torch.testing.assert_close((tangent * dy).sum(), (pulled * dx).sum())


def test_memory_efficient_layers_refuse_a_second_derivative():
    norm, x = RMSNorm(8, memory_efficient=True), torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="memory_efficient=True keeps y instead of x"):
        torch.autograd.grad(norm(x).sum(), x, create_graph=True)


def test_out_is_refused_where_a_derivative_may_be_wanted():
    out = torch.empty(8)
    with pytest.raises(ValueError, match="out is for inference"):
        vmap(lambda x: rms_norm(x, out=out))(torch.randn(3, 8))
    with forward_ad.dual_level(), pytest.raises(ValueError, match="out is for inference"):
        rms_norm(torch.randn(8), out=out)


# ---------------------------------------------------------------- training, as it is done


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(use_reentrant):
    norm, linear = RMSNorm(16), nn.Linear(16, 16)
    x, residual = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)

    def block(x, residual):
        y, h = norm(linear(x), residual)
        return norm(y) + h

    def gradients(output):
        for p in (*norm.parameters(), *linear.parameters(), x, residual):
            p.grad = None
        output.square().sum().backward()
        return [p.grad for p in (*norm.parameters(), *linear.parameters(), x, residual)]

    expected = gradients(block(x, residual))
    same(gradients(checkpoint(block, x, residual, use_reentrant=use_reentrant)), expected)


class BackwardCalls(TorchDispatchMode):
    """What every call of the backward operator was asked for, as (need_dx, need_dweight)."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.rmsnorm.backward.default:
            self.seen.append(args[-2:])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("x_wanted", "weight_wanted"), [(True, False), (False, True), (True, True)])
def test_only_the_gradients_wanted_are_computed(x_wanted, weight_wanted):
    x, weight = torch.randn(3, 8, requires_grad=x_wanted), torch.randn(8, requires_grad=weight_wanted)
    with BackwardCalls() as calls:
        rms_norm(x, weight).sum().backward()
    assert calls.seen == [(x_wanted, weight_wanted)]
    assert (x.grad is not None, weight.grad is not None) == (x_wanted, weight_wanted)


def test_a_gradient_of_the_residual_sum_alone_needs_no_kernel():
    x, residual, weight = (torch.randn(s, requires_grad=True) for s in ((3, 8), (3, 8), (8,)))
    _, h = add_rms_norm(x, residual, weight)
    g = torch.randn(3, 8)
    with BackwardCalls() as calls:
        h.backward(g)
    assert calls.seen == []
    same([x.grad, residual.grad], [g, g])
    assert weight.grad is None


def test_a_residual_alone_may_want_the_gradient():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True), torch.randn(8)
    y, h = add_rms_norm(x, residual, weight)
    (y + h).sum().backward()
    both = residual.detach().clone().requires_grad_()
    y, h = add_rms_norm(both, x, weight)
    (y + h).sum().backward()
    same([residual.grad], [both.grad])


def test_backward_uses_the_weight_of_its_forward():
    norm, x, dy = RMSNorm(8), torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    (expected,) = torch.autograd.grad(norm(x), x, dy)
    y = norm(x)
    norm.weight = nn.Parameter(torch.zeros(8))
    same(torch.autograd.grad(y, x, dy), [expected])
    y = norm(x)
    with torch.no_grad():
        norm.weight.fill_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_incoming_gradients_of_any_layout():
    x, weight = torch.randn(3, 6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    for dy in (
        torch.ones(()).expand(3, 6, 8),
        torch.randn(8).expand(3, 6, 8),
        torch.randn(3, 6, 16)[..., ::2],
        torch.randn(6, 3, 8).transpose(0, 1),
        torch.randn(3, 8, 6).transpose(1, 2),
    ):
        same(
            torch.autograd.grad(rms_norm(x, weight), (x, weight), dy),
            torch.autograd.grad(rms_norm(x, weight), (x, weight), dy.contiguous()),
        )


def test_hooks_run():
    norm, x = RMSNorm(8), torch.randn(3, 8, requires_grad=True)
    seen = []
    norm.register_forward_pre_hook(lambda *_: seen.append("before"))
    norm.register_forward_hook(lambda *_: seen.append("after"))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm.weight.register_hook(lambda g: seen.append("weight") or g * 2)
    norm(x).sum().backward()
    assert sorted(seen) == ["after", "backward", "before", "weight"]
    plain = RMSNorm(8)
    plain(x.detach()).sum().backward()
    same([norm.weight.grad], [plain.weight.grad * 2])


def test_functional_call_replaces_the_weight():
    norm, x = RMSNorm(8), torch.randn(3, 8)
    weight = torch.randn(8)
    same([functional_call(norm, {"weight": weight}, (x,))], [rms_norm(x, weight)])
    models = {"weight": torch.randn(4, 8)}
    ensemble = vmap(lambda parameters, x: functional_call(norm, parameters, (x,)), (0, None))(models, x)
    same([ensemble], [torch.stack([rms_norm(x, w) for w in models["weight"]])])
