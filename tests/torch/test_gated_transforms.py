"""Gated and grouped norms inside PyTorch: compiled, transformed, differentiated twice, on meta; what training keeps."""

from itertools import product

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

import rmsnorm
from rmsnorm import GatedRMSNorm, RMSNorm, gated_rms_norm, rms_norm
from tests.support.bits import same
from tests.support.rows import DTYPES, all_rows, generator, random_rows

ops = torch.ops.rmsnorm
# The norm before the gate, after it, and without one.
KINDS = ("last", "first", "none")


def tensors(kind, dtype=torch.float32, rows=5):
    """X, the gate if there is one, and the weight."""
    x, gate = (random_rows(rows, 48, dtype, seed) for seed in (1, 2))
    weight = (1 + 0.3 * random_rows(1, 48, torch.float32, 3)[0]).to(dtype)
    return (x, weight) if kind == "none" else (x, gate, weight)


def function(kind, group_size=12, **options):
    if kind == "none":
        return lambda x, weight: rms_norm(x, weight, group_size=group_size, **options)
    return lambda x, gate, weight: gated_rms_norm(
        x, gate, weight, norm_before_gate=kind == "last", group_size=group_size, **options
    )


def gradients(call, given, dy, **options):
    leaves = [t.clone().requires_grad_() for t in given]
    return torch.autograd.grad(call(*leaves), leaves, dy, **options)


@pytest.mark.parametrize(("kind", "dtype"), [*zip(KINDS, DTYPES, strict=True)])
def test_compiled_code_has_the_bits_of_eager(kind, dtype):
    torch._dynamo.reset()
    given, dy = tensors(kind, dtype), random_rows(5, 48, dtype, 4)
    call = function(kind, rounding="before_scale")
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for batch in (5, 3):
        part = [*(t[:batch] for t in given[:-1]), given[-1]]
        same(compiled(*part), call(*part))
        for found, wanted in zip(gradients(compiled, part, dy[:batch]), gradients(call, part, dy[:batch]), strict=True):
            same(found, wanted)


def test_a_gate_that_is_x_compiles():
    torch._dynamo.reset()
    x = random_rows(5, 48, torch.float32, 1)

    def call(x):
        return gated_rms_norm(x, x)

    (found,) = gradients(torch.compile(call, fullgraph=True), (x,), torch.ones_like(x))
    same(found, gradients(call, (x,), torch.ones_like(x))[0])


def test_the_formula_can_be_compiled_instead():
    torch._dynamo.reset()
    given = tensors("last")
    rmsnorm.compile_as("decomposition")
    try:
        found = torch.compile(function("last"), fullgraph=True)(*given)
    finally:
        rmsnorm.compile_as("kernels")
    torch.testing.assert_close(found, function("last")(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [*zip(KINDS, DTYPES, strict=True)])
def test_operators_pass_opcheck(kind, dtype):
    x, *gate, weight = tensors(kind, dtype)
    gate = gate[0] if gate else None
    for w, code in ((weight.float(), 1), (None, 0)):
        options = (12, 1, kind == "first")
        opcheck(ops.gated_forward.default, (x, gate, w, 1e-6, 0.5, code, *options))
        opcheck(ops.gated_forward_train.default, (x, gate, w, 1e-6, 0.5, code, *options))
        rstd = ops.gated_forward_train(x, gate, w, 1e-6, 0.5, code, *options)[1]
        for needs in ((True, gate is not None, w is not None), (False, False, True)):
            opcheck(ops.gated_backward.default, (x, x, gate, rstd, w, None, 0.5, *options, *needs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functorch_has_the_bits_of_backward(kind, dtype):
    given, dy = tensors(kind, dtype), random_rows(5, 48, dtype, 4)
    call = function(kind)
    every = tuple(range(len(given)))
    wanted = gradients(call, given, dy)
    found = torch.func.vjp(call, *given)[1](dy)
    for f, w in zip(found, wanted, strict=True):
        same(f, w)
    rows = (*[0] * (len(given) - 1), None)
    same(torch.vmap(call, in_dims=rows)(*given), call(*given))
    weights = torch.stack([given[-1] * k for k in range(5)])
    alone = [call(*(t[i] for t in given[:-1]), weights[i]) for i in range(5)]
    same(torch.vmap(call)(*given[:-1], weights), torch.stack(alone))

    def loss(*tensors):
        return call(*tensors).float().sum()

    samples = torch.vmap(torch.func.grad(loss, argnums=every), in_dims=rows)(*given)
    for i in range(5):
        alone = torch.func.grad(loss, argnums=every)(*(t[i] for t in given[:-1]), given[-1])
        for s, a in zip(samples, alone, strict=True):
            same(s[i], a)
    batched = gradients(call, given, torch.stack([dy, -dy]), is_grads_batched=True)
    for b, w in zip(batched, wanted, strict=True):
        same(b[0], w)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_higher_order(kind):
    given = [t.double() for t in tensors(kind, rows=2)]
    leaves = [t.requires_grad_() for t in given]
    call = function(kind)
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, check_batched_grad=True, fast_mode=True)
    # A first derivative that is kept differentiable has the same bits, and a derivative close to float64's.
    single, dy = tensors(kind, rows=2), random_rows(2, 48, torch.float32, 4)
    for kept, plain in zip(gradients(call, single, dy, create_graph=True), gradients(call, single, dy), strict=True):
        same(kept.detach(), plain)

    def second(tensors, dy):
        leaves = [t.clone().requires_grad_() for t in tensors]
        first = torch.autograd.grad(call(*leaves), leaves, dy, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for f, w in zip(second(single, dy), second([t.detach() for t in given], dy.double()), strict=True):
        torch.testing.assert_close(f.double(), w, rtol=1e-4, atol=1e-4 * float(w.abs().max()))


def test_forward_over_reverse():
    x, gate, weight = (t.double() for t in tensors("first"))
    tangent = random_rows(5, 48, torch.float64, 5)

    def gradient(x):
        with torch.enable_grad():
            leaf = weight.clone().requires_grad_()
            return torch.autograd.grad(function("first")(x, gate, leaf).sum(), leaf)[0]

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(gradient(forward_ad.make_dual(x, tangent))).tangent
    step = 1e-6
    wanted = (gradient(x + step * tangent) - gradient(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_training_keeps_the_inputs_and_one_number_per_group(kind):
    leaves = [t.requires_grad_() for t in tensors(kind)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(kind)(*leaves)
    places = {t.untyped_storage().data_ptr() for t in leaves}
    new = [t for t in kept if t.untyped_storage().data_ptr() not in places]
    assert [tuple(t.shape) for t in new] == [(5, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_wanted_is_computed(kind):
    given, dy = tensors(kind), random_rows(5, 48, torch.float32, 4)
    call, wanted = function(kind), gradients(function(kind), given, dy)
    for needs in product((True, False), repeat=len(given)):
        if any(needs):
            leaves = [t.clone().requires_grad_(need) for t, need in zip(given, needs, strict=True)]
            found = torch.autograd.grad(call(*leaves), [t for t in leaves if t.requires_grad], dy)
            for f, w in zip(found, (w for w, need in zip(wanted, needs, strict=True) if need), strict=True):
                same(f, w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_threads_decide_nothing(kind, dtype, with_threads):
    special = all_rows(192, dtype)
    x = torch.cat([special, random_rows(257 - len(special), 192, dtype, seed=1)])
    gate, dy = (3 * random_rows(257, 192, dtype, seed) for seed in (2, 3))
    weight = random_rows(1, 192, torch.float32, 4)[0]
    gate = None if kind == "none" else gate
    options = (64, 0, kind == "first")

    def everything(rows):
        z = None if gate is None else gate[rows]
        y, rstd = ops.gated_forward_train(x[rows], z, weight, 1e-6, 0.0, 0, *options)
        found = ops.gated_backward(dy[rows], x[rows], z, rstd, weight, None, 0.0, *options, True, z is not None, False)
        return y, rstd, found[0], found[1]

    with with_threads(2):
        many = everything(slice(None))
    with with_threads(1):
        for row in range(257):
            for one, batch in zip(everything(slice(row, row + 1)), many, strict=True):
                if one is not None:
                    same(one, batch[row : row + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_results_lie_as_dense_inputs_do(kind):
    base = torch.randn(4, 6, 12, generator=generator(1))
    for x in (base, base.transpose(0, 1), base[:, ::2], base[..., ::2]):
        gate = None if kind == "none" else x.flip(0).transpose(0, 1).contiguous().transpose(0, 1)
        y, rstd = ops.gated_forward_train(x, gate, None, 1e-6, 0.0, 0, 3, 0, kind == "first")
        assert y.stride() == torch.empty_like(x).stride()
        assert rstd.shape == (*x.shape[:-1], x.shape[-1] // 3)
        found = ops.gated_backward(
            x, x, gate, rstd, None, None, 0.0, 3, 0, kind == "first", True, gate is not None, False
        )
        assert all(t.stride() == y.stride() for t in found[:2] if t is not None)


def test_meta_tensors_have_shapes_and_are_checked():
    for kind in KINDS:
        given = [t.to("meta") for t in tensors(kind, torch.bfloat16)]
        y = function(kind)(*given)
        assert (y.shape, y.dtype, y.device.type) == ((5, 48), torch.bfloat16, "meta")
        with pytest.raises((ValueError, RuntimeError), match="group_size"):
            function(kind, group_size=5)(*given)
    module = GatedRMSNorm(48, device="meta")
    assert module(torch.empty(2, 48, device="meta"), torch.empty(2, 48, device="meta")).shape == (2, 48)


X = torch.ones(2, 12)
OPTIONS = {"weight": None, "eps": 1e-6, "offset": 0.0, "rounding": 0, "group": 3, "activation": 0, "gate_first": False}


@pytest.mark.parametrize(
    "change",
    [
        {"gate": torch.ones(2, 11)},
        {"gate": torch.ones(12)},
        {"gate": torch.ones(2, 12, dtype=torch.float64)},
        {"gate": torch.ones(2, 12, device="meta")},
        {"weight": torch.ones(3)},
        {"weight": torch.ones(12, dtype=torch.float64)},
        {"group": 5},
        {"group": -3},
        {"group": 24},
        {"activation": 2},
        {"activation": -1},
        {"rounding": 3},
        {"eps": float("nan")},
        {"x": torch.ones(2, 12, dtype=torch.int32)},
        {"x": torch.ones(())},
    ],
    ids=str,
)
def test_operators_refuse_what_would_read_or_write_elsewhere(change):
    arguments = {"x": X, "gate": X, **OPTIONS} | change
    for call in (ops.gated_forward, ops.gated_forward_train):
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            call(*arguments.values())


def test_backward_refuses_what_does_not_fit_together():
    rstd = torch.ones(2, 4)
    right = {"dy": X, "x": X, "gate": X, "rstd": rstd, "weight": None, "dh": None, "offset": 0.0}
    right |= {"group": 3, "activation": 0, "gate_first": False, "dx": True, "dgate": True, "dweight": True}
    ops.gated_backward(*right.values())
    for change in (
        {"dy": torch.ones(2, 11)},
        {"dy": torch.ones(2, 12, dtype=torch.bfloat16)},
        {"gate": None},
        {"gate": torch.ones(3, 12)},
        {"rstd": torch.ones(2, 3)},
        {"rstd": torch.ones(2, 4, dtype=torch.float64)},
        {"weight": torch.ones(3)},
        {"group": 7},
        {"group": -3},
        {"activation": 3},
    ):
        with pytest.raises(RuntimeError):
            ops.gated_backward(*(right | change).values())


def test_groups_with_out():
    x, weight = tensors("none", torch.bfloat16)
    wanted = rms_norm(x, weight, group_size=12)
    out = torch.empty_like(x)
    assert rms_norm(x, weight, group_size=12, out=out) is out
    same(out, wanted)
    same(rms_norm(x, weight, group_size=12, out=x), wanted)
    with pytest.raises(ValueError, match="out is for inference"):
        rms_norm(x, weight.requires_grad_(), group_size=12, out=out)
    with pytest.raises(ValueError, match="memory_efficient=True is not offered with group_size"):
        RMSNorm(48, group_size=12, memory_efficient=True)


def test_float64_weights_are_taken():
    x, gate, weight = tensors("last")
    for first, rounding in product((True, False), ("once", "weight_dtype")):
        options = {"norm_before_gate": first, "rounding": rounding}
        y = gated_rms_norm(x, gate, weight.double(), **options)
        assert y.dtype == (torch.float64 if rounding == "weight_dtype" and not first else torch.float32)
        torch.testing.assert_close(y.float(), gated_rms_norm(x, gate, weight, **options), rtol=1e-6, atol=1e-6)
