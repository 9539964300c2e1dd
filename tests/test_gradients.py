"""Gradients of the public functions: to the bit by the reference, and the reference's own against float64 autograd."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rmsnorm import RMSNorm, add_rms_norm, autograd, functional, reference, rms_norm
from tests.bits import difference
from tests.expected import DTYPES, HALF_A_SUBNORMAL, U, exact, gradient_bounds, gradients, tensor, within

# PyTorch's own, when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

ROUNDINGS = reference.ROUNDINGS


def same(actual, expected):
    assert (found := difference(actual, expected)) is None, found


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def judged(dy, x, weight=None, eps=1e-6, weight_offset=0.0, dh=None):
    """Gradients by PyTorch's autograd of the formula in float64."""
    inputs = leaves(x.double()) if weight is None else leaves(x.double(), weight.double())
    y = exact(*inputs, eps=eps, weight_offset=weight_offset)
    found = torch.autograd.grad(y, inputs, dy.double())
    dx = found[0] if dh is None else found[0] + dh.double()
    return dx, (found[1] if weight is not None else None)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(DTYPES, (None, *DTYPES))))
def test_gradients_are_the_references_and_near_those_of_float64(x_dtype, w_dtype, offset, rounding):
    # 300 rows are eight leaves of dweight. Gains of 0.5 to 2, of both signs, and a few of zero.
    x = tensor(300, 33, dtype=x_dtype, scale=3.0)
    weight = None if w_dtype is None else tensor(33, seed=1).sign() * torch.linspace(0, 2, 33)
    weight = None if weight is None else weight.to(w_dtype)
    result = reference.result_dtype(x, weight, rounding)
    dy = tensor(300, 33, dtype=result, seed=2)
    inputs = leaves(x) if weight is None else leaves(x, weight)
    y = rms_norm(*inputs, weight_offset=offset, rounding=rounding)
    found = torch.autograd.grad(y, inputs, dy)

    kernel_dy = dy.float() if x_dtype != torch.float64 == result else dy
    narrow = weight.float() if weight is not None and x_dtype != torch.float64 == w_dtype else weight
    dx, dweight = gradients(kernel_dy, x, narrow, weight_offset=offset)
    same(found[0], dx)
    if weight is not None:
        same(found[1], dweight.to(w_dtype))
    # Narrowed to float32, as it is with x of fewer bits, a float64 weight is another weight.
    values = judged(kernel_dy, x, narrow, weight_offset=offset)
    bounds = gradient_bounds(kernel_dy, x, narrow, weight_offset=offset)
    assert within(found[0], values[0], bounds[0])
    if weight is not None:
        assert within(found[1], values[1], bounds[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-2, 3.0, None])
def test_gradients_of_any_eps_and_of_small_rows(eps, dtype):
    x, weight, dy = tensor(6, 64, dtype=dtype, scale=1e-2), tensor(64, seed=1), tensor(6, 64, dtype=dtype, seed=2)
    number = (2.0**-52 if dtype == torch.float64 else 2.0**-23) if eps is None else eps
    inputs = leaves(x, weight)
    found = torch.autograd.grad(rms_norm(*inputs, eps), inputs, dy)
    for actual, value, bound in zip(
        found, judged(dy, x, weight, number), gradient_bounds(dy, x, weight, number), strict=True
    ):
        assert within(actual, value, bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_over_several_dimensions(dtype):
    x, weight, dy = tensor(5, 3, 4, dtype=dtype), tensor(3, 4, seed=1), tensor(5, 3, 4, dtype=dtype, seed=2)
    inputs = leaves(x, weight)
    found = torch.autograd.grad(rms_norm(*inputs), inputs, dy)
    dx, dweight = gradients(dy, x, weight, dims=2)
    same(found[0], dx)
    same(found[1], dweight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_of_the_fused_add(dtype, offset):
    x, residual, weight = tensor(70, 33, dtype=dtype), tensor(70, 33, dtype=dtype, seed=1), tensor(33, seed=2)
    dy, dh = tensor(70, 33, dtype=dtype, seed=3), tensor(70, 33, dtype=dtype, seed=4)
    inputs = leaves(x, residual, weight)
    outputs = add_rms_norm(*inputs, weight_offset=offset)
    for used, given in (((0,), None), ((0, 1), dh)):
        found = torch.autograd.grad([outputs[i] for i in used], inputs, [(dy, dh)[i] for i in used], retain_graph=True)
        dx, dweight = gradients(dy, x + residual, weight, weight_offset=offset, dh=given)
        for actual, expected in zip(found, (dx, dx, dweight), strict=True):
            same(actual, expected)
        values = judged(dy, x + residual, weight, weight_offset=offset, dh=given)
        bounds = gradient_bounds(dy, x + residual, weight, weight_offset=offset, dh=given)
        for actual, value, bound in zip(found[1:], values, bounds, strict=True):
            assert within(actual, value, bound)
    # h alone passes its gradient on as it is, and the weight has no part in it.
    found = torch.autograd.grad(outputs[1], inputs, dh, allow_unused=True)
    same(found[0], dh)
    same(found[1], dh)
    assert found[2] is None


def test_huge_and_tiny_rows_have_the_gradients_of_ordinary_ones():
    # A power of two changes no rounding: dx is divided by it, dweight stays. eps is the only thing with a scale.
    x, weight, dy = tensor(9, 100), tensor(100, seed=1), tensor(9, 100, seed=2)
    plain = leaves(x, weight)
    expected = torch.autograd.grad(rms_norm(*plain, 0.0), plain, dy)
    for scale in (2.0**100, 2.0**-90):
        inputs = leaves(x * scale, weight)
        dx, dweight = torch.autograd.grad(rms_norm(*inputs, 0.0), inputs, dy)
        same(dx * scale, expected[0])
        same(dweight, expected[1])


def test_dweight_of_many_rows_does_not_drift():
    x = (tensor(16384, 32).abs() + 0.5).bfloat16()
    weight = torch.ones(32, dtype=torch.bfloat16)
    dy = (1 + 0.05 * tensor(16384, 32, seed=1)).bfloat16()
    inputs = leaves(x, weight)
    dweight = torch.autograd.grad(rms_norm(*inputs), inputs, dy)[1]
    assert within(dweight, judged(dy, x, weight)[1], gradient_bounds(dy, x, weight)[1])


# ---------------------------------------------------------------- which gradients


class Asked(TorchDispatchMode):
    """Records which gradients the operator is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.rmsnorm.backward.default:
            self.asked.append(args[-2:])
        return function(*args, **(kwargs or {}))


def test_what_is_frozen_costs_nothing():
    x, weight, dy = (tensor(*s, seed=i) for i, s in enumerate(((6, 32), (32,), (6, 32))))
    dx, dweight = gradients(dy, x, weight)

    a = x.clone().requires_grad_()
    rms_norm(a, weight).backward(dy)
    same(a.grad, dx)
    b = weight.clone().requires_grad_()
    rms_norm(x, b).backward(dy)
    same(b.grad, dweight)
    assert weight.grad is None
    assert x.grad is None
    c = x.clone().requires_grad_()

    with Asked() as spy:
        rms_norm(a, weight).backward(dy)
        rms_norm(x, b).backward(dy)
        add_rms_norm(c, x, weight)[0].backward(dy)
        add_rms_norm(x, c, weight)[0].backward(dy)
        add_rms_norm(x, x, b)[0].backward(dy)
        rms_norm(c).backward(dy)
    assert spy.asked == [(True, False), (False, True), (True, False), (True, False), (False, True), (True, False)]


def test_weight_alone_gets_its_gradient_while_the_residual_passes():
    x, weight = tensor(6, 32), tensor(32, seed=1)
    y, h = add_rms_norm(x, x, weight.requires_grad_())
    (y.sum() + h.sum()).backward()
    same(weight.grad, gradients(torch.ones(6, 32), 2 * x, weight.detach())[1])


# ---------------------------------------------------------------- incoming gradients of every kind

INCOMING = {
    "one number": lambda: torch.ones(()).expand(3, 8, 64),
    "one row": lambda: tensor(64, seed=2).expand(3, 8, 64),
    "one column": lambda: tensor(3, 8, 1, seed=2).expand(3, 8, 64),
    "every second column": lambda: tensor(3, 8, 128, seed=3)[..., ::2],
    "slice of columns": lambda: tensor(3, 8, 99, seed=3)[..., 5:69],
    "transposed rows": lambda: tensor(8, 3, 64, seed=4).transpose(0, 1),
    "transposed columns": lambda: tensor(3, 64, 8, seed=5).transpose(1, 2),
    "negated view": lambda: tensor(3, 8, 64, seed=6)._neg_view(),
    "zeros that are not there": lambda: torch._efficientzerotensor(3, 8, 64),
    "not finite": lambda: tensor(3, 8, 64, seed=7) / 0.0,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", INCOMING)
def test_any_incoming_gradient(kind, dtype):
    x, weight = tensor(3, 8, 64, dtype=dtype), tensor(64, seed=1)
    dy = INCOMING[kind]()
    dy = dy if dtype == torch.float32 else dy.to(dtype)
    inputs = leaves(x, weight)
    torch.autograd.backward(rms_norm(*inputs), dy)
    dense = torch.zeros(3, 8, 64, dtype=dtype) if kind.startswith("zeros") else dy.clone()
    dx, dweight = gradients(dense, x, weight)
    same(inputs[0].grad, dx)
    same(inputs[1].grad, dweight)
    fused = leaves(x, x, weight)
    torch.autograd.backward(add_rms_norm(*fused), [dy, dy])
    dx, dweight = gradients(dense, x + x, weight, dh=dense)
    same(fused[0].grad, dx)
    same(fused[2].grad, dweight)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows_have_empty_gradients_and_zero_dweight(shape):
    for dtype in DTYPES:
        inputs = leaves(tensor(*shape, dtype=dtype), tensor(*shape, dtype=dtype), tensor(8, dtype=dtype))
        y, h = add_rms_norm(*inputs)
        torch.autograd.backward([y, h], [torch.ones_like(y), torch.ones_like(h)])
        assert inputs[0].grad.shape == inputs[1].grad.shape == torch.Size(shape)
        same(inputs[2].grad, torch.zeros(8, dtype=dtype))


def test_strided_inputs_have_the_gradients_of_dense_ones():
    weight = tensor(16, seed=1)
    for view in (
        lambda t: t.transpose(0, 1),
        lambda t: t[..., ::2],
        lambda t: t[:, 1:3, 3:],
        lambda t: t.expand(4, 5, 6, 32),
    ):
        base = leaves(tensor(5, 6, 32))[0]
        x = view(base)[..., :16]
        dy = tensor(*x.shape, seed=2)
        rms_norm(x, weight).backward(dy)
        other = leaves(base)[0]
        y = view(other)[..., :16]
        y.backward(gradients(dy, y.detach().contiguous(), weight)[0])
        same(base.grad, other.grad)


# ---------------------------------------------------------------- the engine


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
        y, _ = functional.normalize(x, None, weight, 1e-6, 0.0, "once", None, True)
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


# ---------------------------------------------------------------- derivatives of higher order


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_first_and_second_derivatives_by_finite_differences(offset, rounding):
    # gradcheck's own tolerances, for its finite differences in float64.
    inputs = leaves(tensor(3, 5, dtype=torch.float64), tensor(5, dtype=torch.float64, seed=1))

    def norm(x, weight):
        return rms_norm(x, weight, 1e-5, weight_offset=offset, rounding=rounding)

    assert torch.autograd.gradcheck(norm, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(norm, inputs, check_fwd_over_rev=True)


def test_derivatives_of_the_fused_add_by_finite_differences():
    double = torch.float64
    inputs = leaves(tensor(3, 5, dtype=double), tensor(3, 5, dtype=double, seed=1), tensor(5, dtype=double, seed=2))
    for function in (add_rms_norm, lambda *t: add_rms_norm(*t)[0], lambda *t: add_rms_norm(*t)[1] ** 2):
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_third_derivatives_by_finite_differences():
    inputs = leaves(tensor(2, 4, dtype=torch.float64), tensor(4, dtype=torch.float64, seed=1))

    def gradient(x, weight):
        return torch.autograd.grad(rms_norm(x, weight).pow(3).sum(), (x, weight), create_graph=True)

    assert torch.autograd.gradgradcheck(gradient, inputs)


def higher_order_bound(value, d):
    """Float32 derivatives through formula.py, where sums over d elements are taken in any order.

    A sum of d float32 terms is off by at most d roundings of the sum of their magnitudes; by Cauchy-Schwarz that is at
    most sqrt(d) times what it counts in a row whose terms are of one order, as these are. A second derivative is the
    sum of some ten products of up to six such factors each, three of them sums.
    """
    return 10 * (3 * d + 6) * U[torch.float32] * d**0.5 * max(1.0, value.abs().max().item()) * torch.ones_like(value)


@pytest.mark.parametrize("with_weight", [True, False])
def test_gradient_penalty_in_float32(with_weight):
    x, weight, direction = tensor(3, 16), tensor(16, seed=1), tensor(3, 16, seed=2)

    def penalty(norm, direction, *inputs):
        (dx,) = torch.autograd.grad((norm(*inputs) * direction).sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), inputs)

    given = (x, weight) if with_weight else (x,)
    found = penalty(rms_norm, direction, *leaves(*given))
    expected = penalty(exact, direction.double(), *leaves(*(t.double() for t in given)))
    for a, b in zip(found, expected, strict=True):
        assert within(a, b, higher_order_bound(b, 16))


def test_second_derivative_with_respect_to_the_incoming_gradient():
    x, weight, dy = leaves(
        tensor(3, 16, dtype=torch.float64), tensor(16, dtype=torch.float64), tensor(3, 16, dtype=torch.float64)
    )

    def both(norm):
        dx, dweight = torch.autograd.grad(norm(x, weight), (x, weight), dy, create_graph=True)
        return torch.autograd.grad(dx.sum() + dweight.sum(), (dy, x, weight))

    for a, b in zip(both(rms_norm), both(exact), strict=True):
        # As above, in float64, and the judge has as much.
        assert within(a, b, 2 * 2.0**-29 * higher_order_bound(b, 16))


def test_second_derivative_of_frozen_parts():
    x, weight, dy = tensor(3, 16), tensor(16, seed=1), tensor(3, 16, seed=2)
    for frozen in ("weight", "x"):
        given = leaves(x)[0] if frozen == "weight" else leaves(weight)[0]
        y = rms_norm(given, weight) if frozen == "weight" else rms_norm(x, given)
        (first,) = torch.autograd.grad((y**2 * dy).sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        wide = leaves(given.double())[0]
        z = exact(wide, weight) if frozen == "weight" else exact(x, wide)
        (first,) = torch.autograd.grad((z**2 * dy).sum(), wide, create_graph=True)
        (expected,) = torch.autograd.grad(first.square().sum(), wide)
        assert within(second, expected, higher_order_bound(expected, 16))


# ---------------------------------------------------------------- functorch and forward mode

DOUBLE = {"dtype": torch.float64}


def near(actual, expected):
    """Two ways through float64: each is within the bound for float32, scaled by the ratio of their roundoffs."""
    assert within(
        actual, expected, 2 * 2.0**-29 * higher_order_bound(expected, expected.shape[-1] if expected.dim() else 1)
    )


def test_vmap_over_x_and_over_weight():
    x, weight = tensor(5, 3, 16, **DOUBLE), tensor(16, seed=1, **DOUBLE)
    near(torch.func.vmap(lambda t: rms_norm(t, weight))(x), exact(x, weight))
    weights = torch.stack([weight, 2 * weight, weight - 1])
    near(torch.func.vmap(lambda v: rms_norm(x[0], v))(weights), exact(x[0], weights[:, None]))
    near(torch.func.vmap(rms_norm, in_dims=(0, None))(x, weight), exact(x, weight))
    y, h = torch.func.vmap(lambda t: add_rms_norm(t, t, weight))(x)
    near(y, exact(2 * x, weight))
    near(h, 2 * x)


def test_gradients_per_sample():
    x, weight = tensor(5, 3, 16, **DOUBLE), tensor(16, seed=1, **DOUBLE)

    def loss(norm):
        return lambda v, t: norm(t, v).pow(3).sum()

    found = torch.func.vmap(torch.func.grad(loss(rms_norm)), in_dims=(None, 0))(weight, x)
    for i in range(5):
        near(found[i], torch.func.grad(loss(exact))(weight, x[i]))


def test_jacobians_and_hessians():
    x, weight = tensor(6, **DOUBLE), tensor(6, seed=1, **DOUBLE)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        for argnum in (0, 1):
            near(transform(rms_norm, argnums=argnum)(x, weight), transform(exact, argnums=argnum)(x, weight))

    def loss(norm):
        return lambda t: norm(t, weight).pow(3).sum()

    near(torch.func.hessian(loss(rms_norm))(x), torch.func.hessian(loss(exact))(x))
    near(torch.autograd.functional.hessian(loss(rms_norm), x), torch.func.hessian(loss(exact))(x))
    near(
        torch.autograd.functional.jacobian(lambda t: rms_norm(t, weight), x, vectorize=True),
        torch.func.jacrev(exact)(x, weight),
    )


def test_forward_mode():
    x, weight, tangent = tensor(3, 6, **DOUBLE), tensor(6, seed=1, **DOUBLE), tensor(3, 6, seed=2, **DOUBLE)
    for found, expected in zip(
        torch.func.jvp(lambda t: rms_norm(t, weight), (x,), (tangent,)),
        torch.func.jvp(lambda t: exact(t, weight), (x,), (tangent,)),
        strict=True,
    ):
        near(found, expected)
    tangent_of_sum = torch.func.jvp(lambda t: exact(2 * t, weight), (x,), (tangent,))[1]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        y, h = add_rms_norm(dual, dual, weight)
        near(torch.autograd.forward_ad.unpack_dual(h).tangent, 2 * tangent)
        near(torch.autograd.forward_ad.unpack_dual(y).tangent, tangent_of_sum)


def test_vjp_of_the_module():
    norm = RMSNorm(6, **DOUBLE)
    x, dy = tensor(3, 6, **DOUBLE), tensor(3, 6, seed=1, **DOUBLE)
    y, pull = torch.func.vjp(
        lambda parameters, t: torch.func.functional_call(norm, parameters, t), dict(norm.named_parameters()), x
    )
    expected, expected_pull = torch.func.vjp(exact, x, norm.weight)
    near(y, expected)
    dparameters, dx = pull(dy)
    near(dx, expected_pull(dy)[0])
    near(dparameters["weight"], expected_pull(dy)[1])


def test_batched_gradients():
    x, weight = leaves(tensor(3, 6, **DOUBLE), tensor(6, seed=1, **DOUBLE))
    dys = tensor(4, 3, 6, seed=2, **DOUBLE)
    found = torch.autograd.grad(rms_norm(x, weight), (x, weight), dys, is_grads_batched=True)
    for i in range(4):
        for a, b in zip(found, torch.autograd.grad(exact(x, weight), (x, weight), dys[i]), strict=True):
            near(a[i], b)
    # In float32 each is what it is alone.
    x, weight = leaves(x.float(), weight.float())
    found = torch.autograd.grad(rms_norm(x, weight), (x, weight), dys.float(), is_grads_batched=True)
    for i in range(4):
        for a, b in zip(found, gradients(dys[i].float(), x.detach(), weight.detach()), strict=True):
            same(a[i], b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batched_gradients_are_differentiable(dtype):
    x, weight, dys = tensor(3, 6), tensor(6, seed=1), tensor(4, 3, 6, seed=2)

    def second(norm, *inputs):
        first = torch.autograd.grad(
            norm(*inputs), inputs, dys.to(inputs[0].dtype), is_grads_batched=True, create_graph=True
        )
        return torch.autograd.grad([t.square().sum() for t in first], inputs)

    expected = second(exact, *leaves(x.double(), weight.double()))
    for a, b in zip(second(rms_norm, *leaves(x.to(dtype), weight.to(dtype))), expected, strict=True):
        assert within(a, b, 4 * higher_order_bound(b, 6))  # four gradients are summed


# ---------------------------------------------------------------- y in place of x


def remembered(x, weight, dy, dh=None, **options):
    """Gradients of a `memory_efficient` norm."""
    inputs = leaves(x) if weight is None else leaves(x, weight)
    y, _ = functional.normalize(
        inputs[0],
        None,
        None if weight is None else inputs[1],
        1e-6,
        options.get("weight_offset", 0.0),
        options.get("rounding", "once"),
        None,
        True,
    )
    return y.detach(), torch.autograd.grad(y, inputs, dy)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(DTYPES, (None, *DTYPES[:3]))))
def test_memory_efficient_gradients_are_those_of_the_x_rebuilt_from_y(x_dtype, w_dtype, offset, rounding):
    x = tensor(70, 33, dtype=x_dtype, scale=3.0)
    weight = None if w_dtype is None else (0.3 * tensor(33, seed=1)).exp().to(w_dtype)
    result = reference.result_dtype(x, weight, rounding)
    dy = tensor(70, 33, dtype=result, seed=2)
    y, found = remembered(x, weight, dy, weight_offset=offset, rounding=rounding)
    expected, rstd = reference.forward(x, weight, 1e-6, offset, rounding)
    same(y, expected)
    rebuilt = reference.rebuild(y, rstd, weight, offset, x_dtype)
    dx, dweight = reference.backward(dy, rebuilt, rstd, weight, offset)
    same(found[0], dx)
    if weight is not None:
        same(found[1], dweight)
    # "To within y's own rounding": y is off by 3u (4u with an offset) of the arithmetic and by its roundings to 16 bits
    # (that of x_hat is one more); dividing takes three more u, of the gain and the quotients, and rounds to x's dtype.
    # Where y or x_hat is subnormal its rounding is absolute; the smallest gain here is above 1/4.
    inner = {"once": result, "before_scale": x_dtype, "weight_dtype": result if weight is None else w_dtype}[rounding]
    relative = 7 * U[reference.compute_dtype(x)] + U[inner] + U[result] + U[x_dtype]
    absolute = 4 * (HALF_A_SUBNORMAL[inner] + HALF_A_SUBNORMAL[result]) / rstd.double() + HALF_A_SUBNORMAL[x_dtype]
    assert within(rebuilt, x.double(), 1.01 * relative * x.double().abs() + absolute)


@pytest.mark.parametrize("gain", [0.0, 2.0**-11, 2.0**11, float("nan"), float("inf")])
def test_memory_efficient_keeps_x_where_a_gain_would_lose_it(gain):
    x, dy = tensor(9, 16), tensor(9, 16, seed=2)
    weight = tensor(16, seed=1).exp()
    weight[3] = gain
    _, found = remembered(x, weight, dy)
    dx, dweight = gradients(dy, x, weight)
    same(found[0], dx)
    same(found[1], dweight)
    # With an offset it is the gain that counts.
    _, found = remembered(x, weight - 1, dy, weight_offset=1.0)
    for actual, expected in zip(found, gradients(dy, x, weight - 1, weight_offset=1.0), strict=True):
        same(actual, expected)


def test_memory_efficient_of_the_largest_and_smallest_gains_it_inverts():
    x, dy = tensor(9, 16), tensor(9, 16, seed=2)
    weight = torch.full((16,), autograd.SMALLEST_GAIN)
    weight[::2] = -autograd.LARGEST_GAIN
    assert autograd.invertible(weight, 0.0)
    y, found = remembered(x, weight, dy)
    rstd = reference.forward(x, weight, 1e-6, 0.0, "once")[1]
    same(found[0], reference.backward(dy, reference.rebuild(y, rstd, weight, 0.0, x.dtype), rstd, weight, 0.0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_efficient_with_batched_incoming_gradients(dtype):
    x, weight, dys = (
        tensor(3, 8, dtype=dtype),
        tensor(8, dtype=dtype, seed=1).exp(),
        tensor(4, 3, 8, dtype=dtype, seed=2),
    )
    inputs = leaves(x, weight)
    y, _ = functional.normalize(inputs[0], None, inputs[1], 1e-6, 0.0, "once", None, True)
    found = torch.autograd.grad(y, inputs, dys, is_grads_batched=True, retain_graph=True)
    for i in range(4):
        for a, b in zip(found, torch.autograd.grad(y, inputs, dys[i], retain_graph=True), strict=True):
            if dtype == torch.float32:
                same(a[i], b)
            else:
                near(a[i], b)


def test_memory_efficient_refuses_a_second_derivative():
    inputs = leaves(tensor(3, 8), tensor(8, seed=1).exp())
    y, _ = functional.normalize(*inputs[:1], None, inputs[1], 1e-6, 0.0, "once", None, True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(y.sum(), inputs, create_graph=True)


def test_memory_efficient_rows_of_zero_infinity_and_none():
    x = tensor(6, 16)
    x[1], x[2, 3], x[3, 4] = 0.0, float("inf"), float("nan")
    weight, dy = tensor(16, seed=1).exp(), tensor(6, 16, seed=2)
    _, found = remembered(x, weight, dy)
    plain = gradients(dy, x, weight)[0]
    assert found[0][1].isfinite().all()
    same(found[0].isnan(), plain.isnan())
    _, found = remembered(tensor(0, 16), weight, tensor(0, 16))
    same(found[1], torch.zeros(16))
