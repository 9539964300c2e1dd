"""Gradients in company: accumulated, checkpointed, hooked, changed in place, offloaded."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rmsnorm import RMSNorm, add_rms_norm, checked, rms_norm
from rmsnorm.spec import make_spec
from tests.support.bits import difference, same
from tests.support.expected import DTYPES, U, exact, gradients, leaves, tensor, within


def test_backward_twice_gives_the_same_bits():
    for dtype in DTYPES:
        inputs = leaves(tensor(6, 32, dtype=dtype), tensor(6, 32, dtype=dtype, seed=3), tensor(32, dtype=dtype, seed=1))
        dy = tensor(6, 32, dtype=dtype, seed=2)
        for outputs in ([rms_norm(inputs[0], inputs[2])], list(add_rms_norm(*inputs))):
            dys = [dy] * len(outputs)
            first = torch.autograd.grad(outputs, inputs, dys, retain_graph=True, allow_unused=True)
            first = [None if t is None else t.clone() for t in first]
            second = torch.autograd.grad(outputs, inputs, dys, allow_unused=True)
            for a, b in zip(first, second, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    same(a, b)
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(outputs, inputs, dys, allow_unused=True)


def test_gradients_accumulate():
    x, weight, dy = tensor(6, 32), tensor(32, seed=1), tensor(6, 32, seed=2)
    once, twice = leaves(x, weight), leaves(x, weight)
    rms_norm(*once).backward(dy)
    for _ in range(2):
        rms_norm(*twice).backward(dy)
    for a, b in zip(twice, once, strict=True):
        same(a.grad, b.grad + b.grad)


def test_gradients_of_x_and_residual_are_not_one_memory():
    # They are the same values, and the engine hands both to leaves that optimisers then write to.
    x, residual = leaves(tensor(6, 32), tensor(6, 32, seed=1))
    torch.autograd.backward(add_rms_norm(x, residual), [tensor(6, 32, seed=2), tensor(6, 32, seed=3)])
    kept = residual.grad.clone()
    x.grad.mul_(0)
    same(residual.grad, kept)
    x, residual = leaves(tensor(6, 32), tensor(6, 32, seed=1))
    dh = tensor(6, 32, seed=3)
    kept = dh.clone()
    add_rms_norm(x, residual)[1].backward(dh)
    x.grad.mul_(0)
    same(residual.grad, kept)
    same(dh, kept)


def test_one_tensor_in_every_place():
    for dtype in DTYPES:
        x = leaves(tensor(4, 16, dtype=dtype))[0]
        dy = tensor(4, 16, dtype=dtype, seed=2)
        y, h = add_rms_norm(x, x)
        dx = gradients(dy, x.detach() + x.detach(), dh=dy)[0]
        same(torch.autograd.grad([y, h], x, [dy, dy])[0], dx + dx)
        z = rms_norm(x) + rms_norm(x)
        dx = gradients(dy, x.detach())[0]
        same(torch.autograd.grad(z, x, dy)[0], dx + dx)
        row = leaves(tensor(16, dtype=dtype))[0]
        dx, dweight = gradients(dy[0], row.detach(), row.detach())
        (found,) = torch.autograd.grad(rms_norm(row, row), row, dy[0])
        assert difference(found, dx + dweight) is None or difference(found, dweight + dx) is None


def test_gradient_of_a_block_with_a_skip_path():
    def block(x, u, v, norm):
        return x + norm(norm(x, u) * 2.0, v)

    inputs = leaves(tensor(6, 32), tensor(32, seed=1), tensor(32, seed=3))
    dy = tensor(6, 32, seed=2)
    found = torch.autograd.grad(block(*inputs, rms_norm), inputs, dy)
    wide = leaves(*(t.double() for t in inputs))
    expected = torch.autograd.grad(block(*wide, exact), wide, dy.double())

    # The inner norm's gradient is a function of the outer's; each factor of the chain is at most max|gain| * rstd, and
    # each of the two norms adds the errors of gradient_bounds, at most 16u times those factors (their mean terms count
    # sqrt(d) at most, by Cauchy-Schwarz), the forward 3u of a second derivative of the same order. dweight adds 6 rows.
    u = U[torch.float32]
    factor = max(1.0, inputs[1].abs().max().item() * inputs[2].abs().max().item() * 2)
    for a, b in zip(found, expected, strict=True):
        assert within(a, b, 2 * (16 + 3 + 6) * u * 32**0.5 * factor * dy.abs().max().double() * torch.ones_like(b))


def test_backward_uses_the_weight_of_the_forward():
    norm = RMSNorm(16)
    weight = tensor(16, seed=1)
    norm.weight = torch.nn.Parameter(weight.clone())
    x = leaves(tensor(4, 16))[0]
    dy = tensor(4, 16, seed=2)
    y = norm(x)
    norm.weight = torch.nn.Parameter(torch.zeros(3))  # what re-sharding looks like
    y.backward(dy)
    same(x.grad, gradients(dy, x.detach(), weight)[0])


@pytest.mark.parametrize("which", ["x", "weight", "h", "y"])
def test_changing_in_place_what_backward_needs_is_an_error(which):
    x, weight = leaves(tensor(4, 16), tensor(16, seed=1))
    if which == "h":
        y, h = add_rms_norm(x, x, weight)
        with torch.no_grad():
            h.add_(1)
    elif which == "y":
        y, _ = checked.normalize(x, None, None, weight, make_spec(), None, True)
        with torch.no_grad():
            y.add_(1)
    else:
        y = rms_norm(x, weight)
        with torch.no_grad():
            (x if which == "x" else weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_operations_on_the_results_are_in_the_graph():
    x, weight = leaves(tensor(4, 16), tensor(16, seed=1))
    y = rms_norm(x, weight)
    y.mul_(2)
    y.backward(torch.ones(4, 16))
    same(x.grad, gradients(torch.full((4, 16), 2.0), x.detach(), weight.detach())[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(reentrant):
    def block(x, weight):
        y, h = add_rms_norm(x, 2 * x, weight)
        return rms_norm(y + h, weight)

    plain, saved = leaves(tensor(4, 16), tensor(16, seed=1)), leaves(tensor(4, 16), tensor(16, seed=1))
    block(*plain).sum().backward()
    checkpoint(block, *saved, use_reentrant=reentrant).sum().backward()
    for a, b in zip(saved, plain, strict=True):
        same(a.grad, b.grad)


def test_hooks_see_and_change_gradients():
    x, weight = leaves(tensor(4, 16), tensor(16, seed=1))
    y = rms_norm(x, weight)
    y.register_hook(lambda dy: 2 * dy)
    seen = []
    x.register_hook(seen.append)
    y.backward(torch.ones(4, 16))
    same(seen[0], gradients(torch.full((4, 16), 2.0), x.detach(), weight.detach())[0])


def test_saved_tensors_may_be_offloaded():
    inputs, others = leaves(tensor(4, 16), tensor(16, seed=1)), leaves(tensor(4, 16), tensor(16, seed=1))
    rms_norm(*inputs).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        add_rms_norm(others[0], torch.zeros(4, 16), others[1])[0].sum().backward()
    for a, b in zip(others, inputs, strict=True):
        same(a.grad, b.grad)


def test_gradient_through_autocast_has_the_leafs_dtype():
    linear = torch.nn.Linear(16, 16)
    norm = RMSNorm(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(linear(tensor(4, 16)))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert norm.weight.grad.dtype == linear.weight.grad.dtype == torch.float32
