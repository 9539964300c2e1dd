"""The promises that every form keeps, by the list of tests/support/forms.py."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nested import nested_tensor_from_jagged
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm.numerics import decomposition
from rmsnorm.ops import fallback, library
from rmsnorm.spec import make_spec
from tests.support.bits import same
from tests.support.forms import COLS, FORMS, incoming_gradient

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
# Compiling costs seconds: each form in one rounding and dtype.
one_rounding = pytest.mark.parametrize("form", FORMS[1::3], ids=str)


def all_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        same(a, b)


@every_dtype
@every_form
def test_results_and_gradients_are_the_reference(form, dtype):
    tensors = form.tensors(dtype=dtype)
    all_same(form.gradients(tensors), form.expected(tensors))
    with torch.no_grad():
        results = form(*tensors)
    all_same(results, form.expected(tensors)[: len(results)])


@every_form
def test_large_rows_survive(form):
    x, beside, weight = form.tensors()
    y = form(x * 1e30, None if beside is None else beside * (1e30 if form.beside == "residual" else 1), weight)[0]
    assert y.isfinite().all()
    assert y.abs().amax() > 0.1


@every_dtype
@every_form
def test_a_row_has_one_answer_in_any_batch(form, dtype):
    tensors = form.tensors((7, COLS), dtype)
    whole = form(*tensors)
    for row in range(7):
        alone = form(*(t if t is None or t.dim() == 1 else t[row : row + 1] for t in tensors))
        all_same(alone, [w[row : row + 1] for w in whole])


@every_form
def test_any_number_of_threads(form):
    tensors = form.tensors((300, COLS), torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(form.gradients(tensors))
    finally:
        torch.set_num_threads(threads)
    all_same(found[0], found[1])
    all_same(found[0], found[2])


@every_dtype
@every_form
def test_jagged_tensors_have_the_bits_of_their_values(form, dtype):
    tensors = form.tensors((9, COLS), dtype)
    offsets = torch.tensor([0, 2, 2, 9])
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    jagged = [t if t is None or t.dim() == 1 else nested_tensor_from_jagged(t, offsets) for t in leaves]
    results = form(*jagged)
    assert all(r.is_nested for r in results)
    values = [r.values() for r in results]
    incoming = [incoming_gradient(v) for v in values]
    gradients = torch.autograd.grad(values, [t for t in leaves if t is not None], incoming)
    all_same([*(v.detach() for v in values), *gradients], form.gradients(tensors))


@one_rounding
def test_compiled_code(form):
    tensors = form.tensors(dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(form.function, backend="aot_eager", fullgraph=True)
    all_same(replace(form, function=compiled).gradients(tensors), form.gradients(tensors))


@every_form
def test_functorch(form):
    tensors = [t for t in form.tensors(dtype=torch.bfloat16) if t is not None]

    def call(*tensors):
        x, *beside, weight = tensors
        return form(x, beside[0] if beside else None, weight)

    results, pull_back = torch.func.vjp(call, *tensors)
    found = [*results, *pull_back(tuple(incoming_gradient(r) for r in results))]
    all_same(found, form.gradients(form.tensors(dtype=torch.bfloat16)))
    rows = torch.func.vmap(call, in_dims=(*[0] * (len(tensors) - 1), None))(*tensors)
    all_same(rows, results)


@every_form
def test_forward_mode(form):
    """The primal is the kernels'; the tangent is the one that reverse mode has, to rounding."""
    tensors = [t for t in form.tensors() if t is not None]
    tangents = [torch.randn(t.shape, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(tensors)]

    def call(*tensors):
        x, *beside, weight = tensors
        return form(x, beside[0] if beside else None, weight)

    results, found = torch.func.jvp(call, tuple(tensors), tuple(tangents))
    all_same(results, call(*tensors))
    incoming = tuple(incoming_gradient(r) for r in results)
    gradients = torch.func.vjp(call, *tensors)[1](incoming)
    one = sum((a.double() * b.double()).sum() for a, b in zip(incoming, found, strict=True))
    other = sum((a.double() * b.double()).sum() for a, b in zip(gradients, tangents, strict=True))
    # Both are sums of some 500 products of magnitude below 10, each made of fewer than 20 float32 roundings; under
    # "once" and in float32 no other rounding takes place.
    assert abs(one - other) < 500 * 10 * 20 * 2.0**-24

    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(t, d) for t, d in zip(tensors, tangents, strict=True)]
        unpacked = [torch.autograd.forward_ad.unpack_dual(r) for r in call(*duals)]
        all_same([u.primal for u in unpacked], results)
        all_same([u.tangent for u in unpacked], found)


@every_form
def test_forward_mode_has_the_range(form):
    x, beside, weight = form.tensors()
    big = x * 1e30
    beside = beside * 1e30 if form.beside == "residual" else beside
    results, tangents = torch.func.jvp(lambda x: form(x, beside, weight), (big,), (x * 1e30,))
    all_same(results, form(big, beside, weight))
    assert all(t.isfinite().all() for t in tangents)


@every_form
def test_functionalize(form):
    tensors = form.tensors(dtype=torch.bfloat16)
    all_same(torch.func.functionalize(lambda x: form(x, *tensors[1:]))(tensors[0]), form(*tensors))


@every_form
def test_the_meta_device_knows_shapes_and_dtypes(form):
    for dtype in DTYPES:
        tensors = form.tensors((2, 3, COLS), dtype)
        expected = form(*tensors)
        found = form(*(None if t is None else t.to("meta") for t in tensors))
        for a, b in zip(found, expected, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("form", [f for f in FORMS if f.beside != "residual"], ids=str)
def test_out(form):
    """Of all forms but those that add, which have two results."""
    tensors = form.tensors((5, COLS))
    (expected,) = form(*tensors)
    out = torch.empty_like(expected)
    assert form(*tensors, out=out)[0] is out
    same(out, expected)
    wide = torch.full((5, 2 * COLS), 7.0)
    same(form(*tensors, out=wide[:, ::2])[0], expected)
    assert (wide[:, 1::2] == 7).all()
    same(form(tensors[0], *tensors[1:], out=tensors[0])[0], expected)


@every_form
def test_several_normalised_dimensions(form):
    x, beside, weight = form.tensors()
    shaped = [None if t is None else t.view(*t.shape[:-1], 2, COLS // 2) for t in (x, beside, weight)]

    def in_rows(*tensors, **options):
        results = form.function(*tensors, **options)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(r.flatten(-2) for r in results)

    found = replace(form, function=in_rows).gradients(shaped)
    expected = form.gradients([x, beside, weight])
    all_same([a.view_as(b) for a, b in zip(found, expected, strict=True)], expected)


@every_form
def test_autocast_changes_nothing(form):
    for dtype in DTYPES:
        tensors = form.tensors(dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found = form.gradients(tensors)
        all_same(found, form.gradients(tensors))


@every_form
def test_second_derivatives_are_those_of_the_decomposition(form):
    tensors = [t.double().requires_grad_() for t in form.tensors((2, COLS)) if t is not None]

    def call(*tensors):
        x, *beside, weight = tensors
        return form(x, beside[0] if beside else None, weight)

    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


class NoFloat64(TorchDispatchMode):
    """A device that has no float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves((args, result)):
            assert not isinstance(t, torch.Tensor) or t.dtype != torch.float64, function
        return result


@every_form
def test_devices_without_float64_have_the_same_bits(form, monkeypatch):
    """Their operators are the fallback; here it is what the CPU has too, and is told that there is no float64."""
    if not library.status().compiled:
        pytest.skip("without kernels the CPU's operators are the reference, which computes in float64")
    tensors = form.tensors(dtype=torch.bfloat16)
    expected = form.gradients(tensors)
    monkeypatch.setattr(fallback, "has_float64", lambda device: False)
    with mock.patch("rmsnorm.ops.doors.operators", return_value=fallback), NoFloat64():
        found = form.gradients([None if t is None else t.clone() for t in tensors])
    all_same(found, expected)


def test_the_decomposition_has_the_range_of_the_kernels():
    for form in FORMS:
        x, beside, weight = form.tensors((4, COLS))
        for magnitude in (1e30, 1e-30, 3e38):
            spec = make_spec(**{**form.options, "eps": 0.0})
            gate = beside if form.beside == "gate" and spec.gate_first is False else None
            y = decomposition.forward(x / x.abs().amax() * magnitude, gate, weight, spec)
            assert y.isfinite().all()
            assert y.abs().amax() > 1e-3
