"""The promises that every fused function keeps, by the list of tests/support/fused.py."""

import pytest
import torch
from torch.nested import nested_tensor_from_jagged

from tests.support.bits import same
from tests.support.forms import incoming_gradient
from tests.support.fused import COLS, FUSED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_function = pytest.mark.parametrize("fused", FUSED, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
# What costs seconds: each function in one rounding and dtype.
one_rounding = pytest.mark.parametrize("fused", FUSED[1::3], ids=str)


def all_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        same(a, b)


@every_dtype
@every_function
def test_results_and_gradients_are_those_of_the_steps(fused, dtype):
    for shape in ((6, COLS), (3, 1), (2, 3, 700), (0, 5), (5,)):
        if fused.pairs:
            shape = (*shape[:-1], shape[-1] + shape[-1] % 2)
        tensors = fused.tensors(shape, dtype)
        all_same(fused.gradients(tensors), fused.expected(tensors))
        with torch.no_grad():
            all_same(fused(*tensors), fused.by_steps(*tensors))


@every_function
def test_large_rows_survive(fused):
    tensors = fused.each_row(lambda t: t * 1e30, fused.tensors())
    results = fused(*tensors)
    assert all(r.isfinite().all() for r in results)
    all_same(results, fused.by_steps(*tensors))


@every_dtype
@every_function
def test_a_row_has_one_answer_in_any_batch(fused, dtype):
    tensors = fused.tensors((257, COLS), dtype)
    whole = fused(*tensors)
    for row in (0, 1, 100, 256):
        alone = fused(*fused.each_row(lambda t, row=row: t[row : row + 1], tensors))
        all_same(alone, [w[row : row + 1] for w in whole])


@every_function
def test_any_number_of_threads(fused):
    tensors = fused.tensors((1500, COLS), torch.bfloat16)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(fused.gradients(tensors))
    finally:
        torch.set_num_threads(threads)
    all_same(found[0], found[1])
    all_same(found[0], found[2])


@every_function
def test_rows_that_lie_in_any_way(fused):
    tensors = fused.tensors((4, 6, COLS), torch.bfloat16)
    for lie in (
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.cat((t, t), -1)[..., :COLS],
        lambda t: torch.stack((t, t), -1)[..., 0],
        lambda t: t[:1].expand(4, 6, COLS),
    ):
        placed = fused.each_row(lie, tensors)
        plain = fused.each_row(lambda t: t.contiguous(), placed)
        all_same(fused(*placed), fused.by_steps(*plain))
        all_same(fused.gradients(placed), fused.expected(plain))


@one_rounding
def test_jagged_tensors_have_the_bits_of_their_values(fused):
    tensors = fused.tensors((9, COLS), torch.bfloat16)
    offsets = torch.tensor([0, 2, 2, 9])
    leaves = [t.clone().requires_grad_() for t in tensors]
    results = fused(*fused.each_row(lambda t: nested_tensor_from_jagged(t, offsets), leaves))
    assert all(r.is_nested for r in results)
    values = [r.values() for r in results]
    gradients = torch.autograd.grad(values, leaves, [incoming_gradient(v) for v in values])
    all_same([*(v.detach() for v in values), *gradients], fused.expected(tensors))


@one_rounding
def test_compiled_code(fused):
    tensors = fused.tensors(dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(fused.__call__, backend="aot_eager", fullgraph=True)
    all_same(fused.gradients(tensors, compiled), fused.expected(tensors))


@every_function
def test_functorch(fused):
    tensors = fused.tensors(dtype=torch.bfloat16)
    results, pull_back = torch.func.vjp(lambda *t: fused(*t), *tensors)
    all_same([*results, *pull_back(tuple(incoming_gradient(r) for r in results))], fused.expected(tensors))
    rows = torch.func.vmap(lambda *t: fused(*t), in_dims=tuple(0 if rows else None for rows in fused.is_rows()))(
        *tensors
    )
    all_same(rows, results)
    all_same(torch.func.functionalize(lambda *t: fused(*t))(*tensors), results)


@every_function
def test_gradients_of_many_results_at_once(fused):
    """`is_grads_batched` is the older vmap over the backward."""
    tensors = fused.tensors()
    leaves = [t.requires_grad_() for t in tensors]
    results = fused(*leaves)
    incoming = [torch.randn(3, *r.shape, generator=torch.Generator().manual_seed(1)) for r in results]
    found = torch.autograd.grad(results, leaves, incoming, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        each = torch.autograd.grad(results, leaves, [g[i] for g in incoming], retain_graph=True)
        for a, b in zip(found, each, strict=True):
            # Batched gradients are the decomposition's, in float32: some thirty roundings of values below 100.
            torch.testing.assert_close(a[i], b, atol=100 * 30 * 2.0**-24, rtol=0)


@every_function
def test_forward_mode(fused):
    tensors = fused.tensors()
    tangents = tuple(torch.randn(t.shape, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(tensors))
    results, found = torch.func.jvp(lambda *t: fused(*t), tuple(tensors), tangents)
    expected, by_steps = torch.func.jvp(lambda *t: fused.by_steps(*t), tuple(tensors), tangents)
    all_same(results, fused(*tensors))
    all_same([*results, *found], [*expected, *by_steps])


@every_function
def test_the_meta_device_knows_shapes_and_dtypes(fused):
    for dtype in DTYPES:
        tensors = fused.tensors((2, 3, COLS), dtype)
        found = fused(*(t.to("meta") for t in tensors))
        for a, b in zip(found, fused(*tensors), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@every_function
def test_autocast_changes_nothing(fused):
    for dtype in DTYPES:
        tensors = fused.tensors(dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found = fused.gradients(tensors)
        all_same(found, fused.gradients(tensors))


@one_rounding
def test_second_derivatives(fused):
    tensors = [t.double().requires_grad_() for t in fused.tensors((2, COLS))]
    assert torch.autograd.gradcheck(lambda *t: fused(*t), tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *t: fused(*t), tensors, fast_mode=True)


@every_function
def test_second_derivatives_of_the_kernels_are_those_of_the_steps(fused):
    tensors = fused.tensors((3, COLS))

    def twice(function):
        leaves = [t.clone().requires_grad_() for t in tensors]
        results = function(*leaves)
        first = torch.autograd.grad(results, leaves, [incoming_gradient(r) for r in results], create_graph=True)
        squares = [g.square().sum() for g in first if g.requires_grad]  # the residual's is the incoming one
        return torch.autograd.grad(squares, leaves, materialize_grads=True)

    for a, b in zip(twice(fused), twice(fused.by_steps), strict=True):
        same(a, b)


@pytest.mark.parametrize("fused", [f for f in FUSED if not f.pairs], ids=str)
def test_several_normalised_dimensions(fused):
    tensors = fused.tensors(dtype=torch.bfloat16)
    shaped = [t.unflatten(-1, (2, COLS // 2)) for t in tensors]
    results = fused(*shaped)
    all_same([r.flatten(-2) for r in results], fused(*tensors))


@every_function
def test_inference_tensors(fused):
    with torch.inference_mode():
        tensors = fused.tensors()
        all_same(fused(*tensors), fused.by_steps(*tensors))
    weight = tensors[-1].clone().requires_grad_()
    results = fused(*tensors[:-1], weight)
    (found,) = torch.autograd.grad(results, [weight], [incoming_gradient(r) for r in results])
    same(found, fused.expected([t.clone() for t in tensors])[-1])


@every_function
def test_a_tensor_that_does_not_fit_is_named(fused):
    tensors = fused.tensors()
    names = fused.rows + fused.vectors
    for place, name in enumerate(names):
        for wrong, error in (
            (lambda t: t[..., :-1], ValueError),
            (lambda t: t.to("meta"), ValueError),
            (lambda t: t.long(), TypeError),
            (lambda t: "tensor", TypeError),
        ):
            if place == 0 and error is ValueError:
                continue  # then it is the others that do not fit x
            arguments = [wrong(t) if i == place else t for i, t in enumerate(tensors)]
            with pytest.raises(error, match=rf"(^|\W){name}\b"):
                fused(*arguments)
    freed = tensors[1].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match=f"{names[1]}.*(memory|storage)"):
        fused(tensors[0], freed, *tensors[2:])
    with pytest.raises(ValueError, match="rounding"):
        fused.function(*tensors, **(fused.options | {"rounding": "never"}))
