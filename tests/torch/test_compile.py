"""`torch.compile`: one graph, no recompiling over batch sizes, and the bits of eager code."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck

import rmsnorm
from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from rmsnorm.spec import ROUNDINGS
from tests.support.bits import difference

# Of input and weight.
PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]
ops = torch.ops.rmsnorm


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (found := difference(a, b)) is None, found


def results_and_gradients(function, *inputs):
    """What `function` returns, and the gradients of those inputs that want one, for fixed incoming gradients."""
    inputs = [t.clone().detach().requires_grad_(t.requires_grad) for t in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    g = torch.Generator().manual_seed(1)
    incoming = [torch.randn(o.shape, generator=g).to(o.dtype) for o in outputs]
    wanted = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(outputs, wanted, incoming) if wanted else ()
    return [o.detach() for o in outputs] + list(found)


def operators(function, *inputs):
    """The operators of the forward and backward graphs that the compiler is given."""
    seen = []

    def record(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    results_and_gradients(torch.compile(function, backend=backend, fullgraph=True), *inputs)
    return seen


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
def test_every_operator_passes_opcheck(dtype, weight_dtype):
    x = torch.randn(4, 3, 17).to(dtype)
    for code, weight in itertools.product(range(3), (torch.randn(17).to(weight_dtype), None)):
        options = (1e-6, 0.5, code)
        y, rstd = ops.forward_train(x, weight, *options)
        opcheck(ops.forward.default, (x, weight, *options))
        opcheck(ops.forward_train.default, (x, weight, *options))
        opcheck(ops.forward_out.default, (x, weight, 1e-6, torch.empty_like(y), 0.5, code))
        opcheck(ops.add_forward.default, (x, x.clone(), weight, *options))
        opcheck(ops.backward.default, (y, x, rstd, weight, 0.5, x, None, True, weight is not None))
    opcheck(ops.backward.default, (x, x, rstd, weight, 0.5, None, None, True, False))
    opcheck(ops.backward.default, (x, y, rstd, weight, 0.5, None, dtype, True, False))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(0, 2),
        lambda x: x[..., ::2],
        lambda x: x[:, 1:],
        lambda x: x[:0],
        lambda x: x[:1, :, :1],
        lambda x: x[:, :1].expand(4, 6, 8),
    ],
    ids=["leading", "columns apart", "every second", "gaps", "no rows", "ones", "expanded"],
)
def test_operators_lay_out_results_as_the_compiler_is_told(layout):
    x = layout(torch.randn(4, 6, 8))
    weight = torch.randn(x.shape[-1])
    _, rstd = ops.forward_train(x, weight, 1e-6, 0.0, 0)
    opcheck(ops.forward_train.default, (x, weight, 1e-6, 0.0, 0))
    opcheck(ops.add_forward.default, (x, x, weight, 1e-6, 0.0, 0))
    opcheck(ops.backward.default, (x, x, rstd, weight, 0.0, x, None, True, True))


def test_forward_and_backward_are_one_operator_each():
    x, weight = torch.randn(8, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    assert [o for o in operators(rms_norm, x, weight) if "getitem" not in o] == [
        "rmsnorm.forward_train.default",
        "rmsnorm.backward.default",
    ]
    assert [o for o in operators(add_rms_norm, x, x.detach(), weight) if "getitem" not in o] == [
        "rmsnorm.add_forward.default",
        "rmsnorm.backward.default",
    ]
    assert operators(rms_norm, x.detach(), weight.detach()) == ["rmsnorm.forward.default"]


def test_a_frozen_weight_costs_no_dweight():
    x, weight = torch.randn(8, 64, requires_grad=True), torch.randn(64)
    needs = []

    def record(graph, _):
        needs.extend(node.args[-2:] for node in graph.graph.nodes if str(node.target) == "rmsnorm.backward.default")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    results_and_gradients(torch.compile(rms_norm, backend=backend), x, weight)
    assert needs == [(True, False)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
def test_bits_of_the_compiled_function_and_its_gradients(dtype, weight_dtype, rounding):
    x = (torch.randn(33, 576) * 3).to(dtype).requires_grad_()
    residual = torch.randn(33, 576).to(dtype).requires_grad_()
    weight = torch.randn(576).to(weight_dtype).requires_grad_()

    def block(x, residual, weight):
        y, h = add_rms_norm(x, residual, weight, 1e-5, rounding=rounding)
        return rms_norm(y, weight, weight_offset=1.0, rounding=rounding), h

    compiled = torch.compile(block, fullgraph=True)
    same(results_and_gradients(compiled, x, residual, weight), results_and_gradients(block, x, residual, weight))
    with torch.no_grad():
        same(compiled(x, residual, weight), block(x, residual, weight))


@pytest.mark.parametrize(("dynamic", "looks"), [(True, 1), (None, 2)])
def test_one_compilation_serves_every_batch_size(dynamic, looks):
    # Told nothing, the compiler finds at the second size that sizes change; that is all it compiles.
    norm = RMSNorm(64)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for rows in (2, 3, 17, 64, 65, 257):
        x = torch.randn(rows, 64, requires_grad=True)
        same(results_and_gradients(compiled, x), results_and_gradients(norm, x))
        counts.append(counter.frame_count)
    assert counts[looks - 1 :] == [counts[looks - 1]] * len(counts[looks - 1 :])


def test_a_dynamic_eps_and_width_compile():
    compiled = torch.compile(lambda x, eps: rms_norm(x, None, eps), backend="aot_eager", fullgraph=True, dynamic=True)
    for width, eps in ((8, 1e-6), (9, 1e-5), (10, 1e-2)):
        x = torch.randn(3, width)
        same([compiled(x, eps)], [rms_norm(x, None, eps)])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: add_rms_norm(x, x, w),
        lambda x, w: rms_norm(x, w.expand(2, 4, 8)),
        lambda x, w: rms_norm(x, None, normalized_shape=(4, 8)),
        lambda x, w: rms_norm(x.transpose(0, 1), w),
        lambda x, w: rms_norm(x[..., 1:5], w[1:5]),
        lambda x, w: rms_norm(x, None),
        lambda x, w: rms_norm(x, w, eps=None),
    ],
)
def test_compiled_calls_of_every_shape_have_the_bits_of_eager(call):
    x, w = torch.randn(2, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def function(x, w):
        outputs = call(x, w)
        return (*(outputs if isinstance(outputs, tuple) else (outputs,)), w * 1)

    same(
        results_and_gradients(torch.compile(function, backend="aot_eager", fullgraph=True), x, w),
        results_and_gradients(function, x, w),
    )


def test_out_compiles():
    x, weight = torch.randn(4, 8), torch.randn(8)

    def into(x, out):
        rms_norm(x, weight, out=out)
        rms_norm(out, weight, out=out)
        return out

    expected = rms_norm(rms_norm(x, weight), weight)
    compiled = torch.compile(into, backend="aot_eager", fullgraph=True)
    same([compiled(x, torch.empty(4, 8))], [expected])
    same([compiled(x, x)], [expected])


def test_memory_efficient_compiles_with_the_ordinary_gradients():
    x = torch.randn(5, 32, requires_grad=True)
    plain, saving = RMSNorm(32), RMSNorm(32, memory_efficient=True)
    compiled = torch.compile(saving, backend="aot_eager", fullgraph=True)
    same(results_and_gradients(compiled, x), results_and_gradients(plain, x))


def test_bad_input_is_refused_while_compiling():
    compiled = torch.compile(lambda x, w: rms_norm(x, w), backend="eager")
    with pytest.raises(ValueError, match=r"weight must have shape \(8,\).*got \(7,\)"):
        compiled(torch.randn(3, 8), torch.randn(7))


def test_transforms_compile():
    x, weight = torch.randn(4, 3, 8), torch.randn(8)

    def loss(weight, x):
        return rms_norm(x, weight).pow(3).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    compiled = torch.compile(per_sample, backend="aot_eager", fullgraph=True)
    # A sum of 3 y^2 x_hat: three factors of some ten roundings at most, those of the eight squares among them, and as
    # many on the other side; counted against the sum of magnitudes, which is what positive numbers give.
    allowed = 64 * 2**-24 * per_sample(weight.abs(), x.abs())
    assert ((compiled(weight, x) - per_sample(weight, x)).abs() <= allowed).all()


def test_autocast_inside_compiled_code_keeps_the_dtype():
    norm, linear = RMSNorm(32), nn.Linear(32, 32)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return norm(linear(x))

    x = torch.randn(4, 32)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    assert compiled(x).dtype == torch.bfloat16
    same([compiled(x)], [forward(x)])


@pytest.mark.parametrize("name", ["decomposition", "formula"])
def test_the_formula_can_be_compiled_instead(name):
    x, weight = torch.randn(8, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    rmsnorm.compile_as(name)
    try:
        seen = operators(rms_norm, x, weight)
        compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
        formula = compiled(x, weight)
    finally:
        rmsnorm.compile_as("kernels")
    assert not [o for o in seen if "rmsnorm" in o]
    torch.testing.assert_close(formula, rms_norm(x, weight))
    same([compiled(x, weight)], [rms_norm(x, weight)])
    with pytest.raises(ValueError, match="way must be 'kernels' or 'decomposition', got 'triton'"):
        rmsnorm.compile_as("triton")
