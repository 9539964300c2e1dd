"""`rms_norm(..., out=...)`: it gets the result, and what overlaps or does not fit is refused."""

import math
from itertools import product

import pytest
import torch

from rmsnorm import rms_norm
from rmsnorm.spec import ROUNDINGS
from tests.support.bits import bits_equal, same
from tests.support.expected import DTYPES, normalized, tensor
from tests.support.refusals import MARK, refused

# ---------------------------------------------------------------- what it receives


def outs(shape, dtype):
    """Every kind of layout that an `out` may have."""
    *lead, d = shape
    yield "fresh", torch.full(shape, math.nan, dtype=dtype)
    yield "slice of columns", torch.full((*lead, d + 3), math.nan, dtype=dtype)[..., 1 : d + 1]
    yield "strided columns", torch.full((*lead, 2 * d), math.nan, dtype=dtype)[..., ::2]
    yield "every second row", torch.full((2 * lead[0], *lead[1:], d), math.nan, dtype=dtype)[::2]
    yield "transposed", torch.full(shape[::-1], math.nan, dtype=dtype).permute(*reversed(range(len(shape))))
    yield "negated view", torch.full(shape, math.nan, dtype=dtype)._neg_view()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16), (1, 1), (6, 1)])
def test_out_receives_the_result_whatever_its_layout(shape, dtype):
    x, weight = tensor(*shape, dtype=dtype), tensor(shape[-1], seed=1)
    expected = normalized(x, weight, 1e-5, weight_offset=1.0)
    for name, out in outs(shape, dtype):
        returned = rms_norm(x, weight, 1e-5, weight_offset=1.0, out=out)
        assert returned is out, name
        same(out.clone(), expected)


def test_out_leaves_alone_what_lies_between_its_elements():
    buffer = torch.full((8, 40), 7.0)
    x = tensor(4, 16)
    rms_norm(x, out=buffer[::2, 3:19])
    same(buffer[::2, 3:19].clone(), normalized(x))
    buffer[::2, 3:19] = 7.0
    assert torch.equal(buffer, torch.full((8, 40), 7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_may_be_x(dtype):
    weight = tensor(16, seed=1)
    makers = (
        lambda: tensor(6, 16, dtype=dtype),
        lambda: tensor(16, dtype=dtype),
        lambda: tensor(6, 32, dtype=dtype)[:, ::2],
        lambda: tensor(6, 40, dtype=dtype)[:, 5:21],
        lambda: tensor(16, 6, dtype=dtype).t(),
        lambda: tensor(6, 2, 16, dtype=dtype).transpose(0, 1),
        lambda: tensor(0, 16, dtype=dtype),
    )
    for make in makers:
        expected = normalized(make(), weight)
        x = make()
        assert rms_norm(x, weight, out=x) is x
        same(x.clone(), expected)
        x = make()
        rms_norm(x, weight, out=x.view_as(x))  # another tensor of the same elements
        same(x.clone(), expected)


def test_out_may_be_x_read_by_a_residual_free_chain():
    x = tensor(300, 512)
    y = x.clone()
    for step in range(3):
        x = rms_norm(x, tensor(512, seed=step))
        rms_norm(y, tensor(512, seed=step), out=y)
    same(y, x)


def test_out_over_several_dimensions():
    x, weight = tensor(5, 3, 4), tensor(3, 4, seed=1)
    for out in (torch.empty(5, 3, 4), torch.empty(4, 3, 5).permute(2, 1, 0), x):
        expected = normalized(x, weight, dims=2)
        assert rms_norm(x, weight, out=out) is out
        same(out.clone(), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(product(DTYPES, DTYPES)))
def test_out_has_the_dtype_that_the_rounding_gives(x_dtype, w_dtype, rounding):
    x, weight = tensor(4, 16, dtype=x_dtype), tensor(16, dtype=w_dtype, seed=1)
    expected = normalized(x, weight, rounding=rounding)
    same(rms_norm(x, weight, rounding=rounding, out=torch.empty_like(expected)), expected)


def test_out_may_lie_between_the_elements_of_x():
    buffer = tensor(6, 32)
    expected = normalized(buffer[:, ::2])
    rms_norm(buffer[:, ::2], out=buffer[:, 1::2])
    same(buffer[:, 1::2].clone(), expected)
    buffer = tensor(6, 32)
    expected = normalized(buffer[:, :16])
    rms_norm(buffer[:, :16], out=buffer[:, 16:])
    same(buffer[:, 16:].clone(), expected)


def test_out_is_counted_as_changed_in_place():
    weight = tensor(8, seed=1)
    for make in (lambda: torch.empty(4, 8), lambda: torch.empty(4, 16)[:, ::2], lambda: torch.empty(4, 8).double()):
        out = make()
        version = out._version
        rms_norm(tensor(4, 8, dtype=out.dtype), weight, out=out)
        assert out._version > version
    # So that autograd notices: here exp's backward needs the values that are gone.
    leaf = tensor(4, 8).requires_grad_()
    values = leaf.exp()
    with torch.no_grad():
        rms_norm(values, weight, out=values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_out_works_in_inference_mode():
    with torch.inference_mode():
        x = tensor(4, 8)
        expected = normalized(x)
        assert rms_norm(x, out=x) is x
        same(x, expected)


# ---------------------------------------------------------------- what is refused


def overlapping():
    """x and out that share some memory and are not the same elements, from one buffer."""

    def pair(make):
        buffer = tensor(4096)
        return buffer, *make(buffer)

    yield "one element later", pair(lambda b: (b[:32].view(4, 8), b[1:33].view(4, 8)))
    yield "one element earlier", pair(lambda b: (b[1:33].view(4, 8), b[:32].view(4, 8)))
    yield "one row later", pair(lambda b: (b[:32].view(4, 8), b[8:40].view(4, 8)))
    yield "the last element", pair(lambda b: (b[:32].view(4, 8), b[31:63].view(4, 8)))
    yield "slices of columns", pair(lambda b: (b[:64].view(4, 16)[:, :8], b[:64].view(4, 16)[:, 7:15]))
    yield "slices of columns, backwards", pair(lambda b: (b[:64].view(4, 16)[:, 7:15], b[:64].view(4, 16)[:, :8]))
    yield "next row's start", pair(lambda b: (b[:64].view(4, 16)[:, :8], b[12:76].view(4, 16)[:, :8]))
    yield "transposed", pair(lambda b: (b[:64].view(8, 8), b[:64].view(8, 8).t()))
    yield "strided and dense", pair(lambda b: (b[:64].view(4, 16)[:, ::2], b[:32].view(4, 8)))
    yield "dense and strided", pair(lambda b: (b[:32].view(4, 8), b[:64].view(4, 16)[:, ::2]))
    yield "rows in another order", pair(lambda b: (b[:32].view(2, 2, 8), b[:32].view(2, 2, 8).transpose(0, 1)))
    yield "every second row", pair(lambda b: (b[:64].view(8, 8)[::2], b[:32].view(4, 8)))
    yield (
        "two slices apart, shifted",
        pair(lambda b: (b[:192].view(2, 3, 32)[:, :, :8], b[:192].view(2, 3, 32)[:, :, 4:12])),
    )
    yield "a repeated row", pair(lambda b: (b[:8].expand(4, 8), b[:32].view(4, 8)))
    yield "a repeated row, shifted", pair(lambda b: (b[4:12].expand(4, 8), b[:32].view(4, 8)))
    yield "windows", pair(lambda b: (b.as_strided((4, 8), (4, 1)), b[:32].view(4, 8)))
    yield (
        "columns reached by another stride",
        pair(lambda b: (b.as_strided((3, 4), (50, 3)), b.as_strided((3, 4), (50, 3), 6))),
    )


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("kind", [name for name, _ in overlapping()])
def test_out_that_overlaps_x_partly(kind, with_weight):
    buffer, x, out = dict(overlapping())[kind]
    weight = tensor(x.shape[-1], seed=1) if with_weight else None
    kept = buffer.clone()
    with refused(ValueError, "out must", "overlaps x partly"):
        rms_norm(x, weight, out=out)
    assert bits_equal(buffer, kept)
    with refused(ValueError, "out must", "overlaps x partly"):
        rms_norm(x, weight, normalized_shape=x.shape[-1], out=out)
    assert bits_equal(buffer, kept)


def test_out_that_overlaps_x_as_another_dtype():
    buffer = tensor(64)
    for x, out in (
        (buffer.view(8, 8).view(torch.bfloat16)[:, :8], buffer.view(8, 8)),
        (buffer[:32].view(4, 8), buffer.view(torch.bfloat16)[:32].view(4, 8)),
    ):
        kept = buffer.clone()
        for rounding in ("before_scale", "weight_dtype"):
            with refused(ValueError, "out must"):
                rms_norm(x, torch.ones(8, dtype=out.dtype), rounding=rounding, out=out)
        assert bits_equal(buffer, kept)


def itself():
    """Layouts in which two elements are one."""
    yield lambda b: b[:8].expand(4, 8)
    yield lambda b: b[:4, None].expand(4, 8)
    yield lambda b: b[:1].expand(4, 8)
    yield lambda b: b.as_strided((4, 8), (4, 1))
    yield lambda b: b.as_strided((4, 8), (1, 1))
    yield lambda b: b.unfold(0, 8, 2)[:4]
    yield lambda b: b.as_strided((2, 3, 8), (16, 8, 1))


@pytest.mark.parametrize("make", list(itself()))
def test_out_that_overlaps_itself(make):
    buffer = tensor(128)
    kept = buffer.clone()
    out = make(buffer)
    for x in (torch.ones(out.shape), out, out.view(out.shape)):
        with refused(ValueError, "out must not overlap itself"):
            rms_norm(x, out=out)
        with refused(ValueError, "out must not overlap itself"):
            rms_norm(x, torch.ones(8), 1, out=out)
    assert bits_equal(buffer, kept)


def test_out_that_overlaps_weight():
    for make in (lambda b: (b, b[1]), lambda b: (b, b[:, 3]), lambda b: (b, b.flatten()[5:13])):
        buffer = tensor(8, 8)
        kept = buffer.clone()
        out, weight = make(buffer)
        for x in (out, tensor(8, 8, seed=1)):
            with refused(ValueError, "out must share no memory with weight"):
                rms_norm(x, weight, out=out)
        assert bits_equal(buffer, kept)


@pytest.mark.parametrize("shape", [(4, 7), (4, 16), (8, 4), (32,), (1, 8), (5, 8), (4, 8, 1), (1, 4, 8), (0,), ()])
def test_out_of_another_shape(shape):
    x = torch.ones(4, 8)
    for given in (x, x.double()):
        out = torch.full(shape, MARK, dtype=given.dtype)
        with refused(ValueError, "out must have shape (4, 8)", f"got {shape}"):
            rms_norm(given, torch.ones(8), out=out)
        assert (out == MARK).all()


def test_out_of_another_dtype():
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for a in dtypes:
        for w in dtypes:
            for b in dtypes:
                x, weight = torch.ones(4, 8, dtype=a), torch.ones(8, dtype=w)
                for rounding in ("once", "before_scale", "weight_dtype"):
                    result = normalized(x, weight, rounding=rounding).dtype
                    if b != result:
                        out = torch.full((4, 8), MARK, dtype=b)
                        with refused(ValueError, f"out must have dtype {result}", f"got {b}"):
                            rms_norm(x, weight, rounding=rounding, out=out)
                        assert (out == MARK).all()
                    if a == b != result:  # x itself, which is then of the wrong dtype
                        with refused(ValueError, f"out must have dtype {result}", f"got {a}"):
                            rms_norm(x, weight, rounding=rounding, out=x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_out_where_a_gradient_is_needed(dtype):
    x, weight = torch.ones(4, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    for which in ("x", "weight", "out"):
        given = {"x": x.clone(), "weight": weight.clone(), "out": torch.full((4, 8), MARK, dtype=dtype)}
        given[which].requires_grad_()
        with refused(ValueError, "out is for inference"):
            rms_norm(**given)
        assert (given["out"] == MARK).all()
        with torch.no_grad():
            rms_norm(**given)
        assert bits_equal(given["out"].detach(), normalized(x, weight))
    y = 2 * x.clone().requires_grad_()
    with refused(ValueError, "out is for inference"):
        rms_norm(y, out=y)


def test_bad_weights_leave_out_alone():
    x = torch.ones(4, 8)
    for weight, error in (
        (torch.ones(7), ValueError),
        (torch.ones(8).int(), (TypeError, ValueError)),
        ([1.0] * 8, TypeError),
    ):
        for given in (x, x.double()):
            out = torch.full((4, 8), MARK, dtype=given.dtype)
            with pytest.raises(error):
                rms_norm(given, weight, out=out)
            assert (out == MARK).all()
