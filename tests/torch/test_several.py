"""rms_norms: the bits of each tensor by itself, for whatever tensors."""

import pytest
import torch

from rmsnorm import rms_norm, rms_norms
from rmsnorm.spec import ROUNDINGS
from tests.support.bits import bits_equal
from tests.support.rows import DTYPES

SHAPES = ((2, 9, 8, 64), (2, 9, 2, 64), (5, 1536), (3, 7), (0, 4))


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_each_has_the_bits_of_itself_alone(rounding):
    for count, dtype in enumerate(DTYPES):
        xs = [made(*shape, dtype=DTYPES[(count + i) % 3], seed=i) for i, shape in enumerate(SHAPES)]
        weights = [None if i == 1 else made(shape[-1], dtype=dtype, seed=9) for i, shape in enumerate(SHAPES)]
        options = {"weight_offset": 1.0, "rounding": rounding}
        found = rms_norms(xs, weights, 1e-5, **options)
        assert isinstance(found, tuple)
        for y, x, weight in zip(found, xs, weights, strict=True):
            assert bits_equal(y, rms_norm(x, weight, 1e-5, **options))


def test_heads_out_of_one_projection_are_read_where_they_are():
    q, k, _ = made(10, 8 * 64 + 2 * 64 + 64).split([8 * 64, 2 * 64, 64], dim=-1)
    heads = [q.unflatten(-1, (-1, 64)).transpose(0, 1), k.unflatten(-1, (-1, 64)).transpose(0, 1)]
    for y, x in zip(rms_norms(heads), heads, strict=True):
        assert bits_equal(y, rms_norm(x))


def test_gradients_transforms_and_other_tensors_go_by_the_steps():
    leaves = [made(4, 8).requires_grad_(), made(6, 3).requires_grad_(), made(8).requires_grad_()]
    found = torch.autograd.grad([y.sum() for y in rms_norms(leaves[:2], [leaves[2], None])], leaves)
    expected = torch.autograd.grad([rms_norm(leaves[0], leaves[2]).sum(), rms_norm(leaves[1]).sum()], leaves)
    assert all(bits_equal(f, e) for f, e in zip(found, expected, strict=True))
    xs = [made(4, 8), made(4, 3)]
    for y, x in zip(torch.vmap(lambda a, b: rms_norms([a, b]))(*xs), xs, strict=True):
        assert bits_equal(y, rms_norm(x))
    for y, x in zip(torch.compile(rms_norms, fullgraph=True)(xs), xs, strict=True):
        assert bits_equal(y, rms_norm(x))
    assert [y.dtype for y in rms_norms([xs[0].double(), xs[1]])] == [torch.float64, torch.float32]
    assert [y.device.type for y in rms_norms([x.to("meta") for x in xs])] == ["meta", "meta"]
    assert rms_norms([]) == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((made(2, 3),), "xs must be a list or tuple of tensors, got Tensor"),
        (([made(2, 3)], made(3)), "weights must be a list or tuple of tensors, got Tensor"),
        (([made(2, 3), made(2, 3)], [made(3)]), "weights must be as many as xs, 2, got 1"),
        (([made(2, 3), 3.0],), "x must be a torch.Tensor, got float"),
        (([made(2, 3), made(2, 4)], [None, made(3)]), r"weight must have shape \(4,\)"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        rms_norms(*arguments)
