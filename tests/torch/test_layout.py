"""Where inputs and results lie: any strides are read, nothing else is, and results are laid out as x."""

import math

import pytest
import torch

from rmsnorm import add_rms_norm, rms_norm
from rmsnorm.ops.library import status
from tests.support.bits import same
from tests.support.expected import DTYPES, normalized, tensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_not_written_and_results_are_fresh(dtype):
    x, residual, weight = (tensor(*s, dtype=dtype, seed=i) for i, s in enumerate(((6, 32), (6, 32), (32,))))
    before = [t.clone() for t in (x, residual, weight)]
    versions = [t._version for t in (x, residual, weight)]
    y = rms_norm(x, weight)
    z, h = add_rms_norm(x, residual, weight)
    kept = h.clone()
    y.add_(1)
    z.add_(1)
    same(h, kept)
    h.add_(1)
    for t, b, v in zip((x, residual, weight), before, versions, strict=True):
        same(t, b)
        assert t._version == v


def test_incoming_gradients_are_not_written():
    for dtype in DTYPES:
        x, weight = tensor(6, 32, dtype=dtype).requires_grad_(), tensor(32, dtype=dtype, seed=1).requires_grad_()
        dy, dh = tensor(6, 32, dtype=dtype, seed=2), tensor(6, 32, dtype=dtype, seed=3)
        kept = dy.clone(), dh.clone()
        torch.autograd.backward(add_rms_norm(x, x.detach(), weight), [dy, dh])
        rms_norm(x, weight).backward(dy)
        same(dy, kept[0])
        same(dh, kept[1])


def test_result_is_laid_out_as_x_where_x_is_dense():
    weight = tensor(8, seed=1)
    dense = (tensor(4, 6, 8), tensor(6, 4, 8).transpose(0, 1), tensor(3, 2, 5, 8).permute(2, 0, 1, 3))
    for x in (*dense, tensor(8, 4).t(), tensor(2, 8, 3, 5).movedim(1, -1)):
        for y in (rms_norm(x, weight), *add_rms_norm(x, x, weight)):
            assert y.stride() == x.stride()


@pytest.mark.skipif(not status().compiled, reason="the reference leaves other layouts to PyTorch")
def test_result_is_contiguous_where_x_is_not_dense():
    weight = tensor(8, seed=1)
    for x in (tensor(4, 12)[:, :8], tensor(1, 8).expand(4, 8), tensor(8, 8).t()[:4], tensor(4, 16)[:, ::2]):
        for y in (rms_norm(x, weight), *add_rms_norm(x, x, weight)):
            assert y.is_contiguous()


def test_views_with_a_pending_negation_are_read_as_what_they_show():
    x, weight = tensor(4, 8), tensor(8, seed=1)
    negated = torch.view_as_complex(tensor(4, 8, 2, seed=2)).conj().imag
    assert negated.is_neg()
    same(rms_norm(negated, weight), rms_norm(negated.clone(), weight))
    same(rms_norm(x, x[0]._neg_view()), rms_norm(x, -x[0]))
    same(add_rms_norm(negated, x, weight)[0], rms_norm(negated.clone() + x, weight))
    same(rms_norm(torch._efficientzerotensor(4, 8), weight), rms_norm(torch.zeros(4, 8), weight))


def test_slices_of_a_fused_projection():
    for dtype in DTYPES:
        projected = tensor(10, 16 * 32 + 2 * 4 * 32, dtype=dtype)
        weight = tensor(32, dtype=dtype, seed=1)
        q, k, v = projected.split([16 * 32, 4 * 32, 4 * 32], dim=-1)
        for part in (q, k, v):
            heads = part.unflatten(-1, (-1, 32))
            same(rms_norm(heads, weight), normalized(heads, weight))
            same(rms_norm(heads.transpose(0, 1), weight), normalized(heads.transpose(0, 1), weight))


def test_what_surrounds_a_row_is_not_read():
    for width in (1, 7, 31, 33, 127, 1000):
        for dtype in DTYPES:
            padded = torch.full((5, width + 13), math.nan, dtype=dtype)
            padded[:, 3 : width + 3] = tensor(5, width, dtype=dtype)
            weight = torch.full((width + 9,), math.nan, dtype=dtype)
            weight[4 : width + 4] = 1
            x = padded[:, 3 : width + 3]
            same(rms_norm(x, weight[4 : width + 4]), normalized(x.clone()))


def test_offsets_beyond_32_bits():
    # Two rows 2^31 elements apart in a buffer of which the system provides the touched pages alone.
    buffer = torch.empty(2**31 + 1024, dtype=torch.bfloat16)
    x = buffer.as_strided((2, 256), (2**31 + 256, 1))
    x.copy_(tensor(2, 256, dtype=torch.bfloat16))
    same(rms_norm(x), rms_norm(x.clone()))
