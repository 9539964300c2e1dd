"""PyTorch's own samples for `torch.nn.functional.rms_norm`, with its float64 result as the judge."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from rmsnorm import add_rms_norm, rms_norm
from rmsnorm.numerics import fixed_sum
from tests.support.expected import DTYPES, gradient_bounds, rows_of, within, y_bound

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what PyTorch's test machinery imports is not ours to mend
    common = pytest.importorskip("torch.testing._internal.common_methods_invocations", exc_type=ImportError)

(OP,) = [op for op in common.op_db if op.name == "nn.functional.rms_norm"]


def samples(dtype):
    for sample in OP.sample_inputs("cpu", dtype, requires_grad=True):
        shape, weight, eps = *sample.args, *[None] * (2 - len(sample.args)), sample.kwargs.get("eps")
        yield sample.input.detach(), shape, None if weight is None else weight.detach(), eps


def test_there_are_samples():
    assert len([*samples(torch.float32)]) >= 6
    assert len([*OP.error_inputs("cpu")]) >= 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples(dtype):
    for x, shape, weight, eps in samples(dtype):
        compute = fixed_sum.compute_dtype(x)
        number = torch.finfo(compute).eps if eps is None else eps
        wide = [x.double().requires_grad_()] + ([] if weight is None else [weight.double().requires_grad_()])
        value = F.rms_norm(wide[0], shape, *wide[1:], eps=number)
        inputs = [x.clone().requires_grad_()] + ([] if weight is None else [weight.clone().requires_grad_()])
        y = rms_norm(*inputs, eps=eps, normalized_shape=shape)
        assert (y.shape, y.dtype) == (x.shape, dtype)

        dims = len(shape)
        flat = rows_of(x, dims), None if weight is None else weight.flatten()
        assert within(y.detach(), value.detach(), y_bound(y, *flat, number).reshape(x.shape))
        dy = torch.linspace(-1, 2, x.numel()).reshape(x.shape).to(dtype)
        expected = torch.autograd.grad(value, wide, dy.double())
        found = torch.autograd.grad(y, inputs, dy)
        bounds = gradient_bounds(rows_of(dy, dims), *flat, number)
        for actual, wanted, bound in zip(found, expected, bounds[: len(found)], strict=True):
            # Where a row has one element and eps is 0 or nearly, the gradient is what the errors leave of it.
            assert within(actual, wanted, bound.reshape(actual.shape) + torch.finfo(torch.float64).tiny)

        if weight is not None:
            z, h = add_rms_norm(x, torch.zeros_like(x), weight, eps)
            assert torch.equal(h, x)
            assert torch.equal(z, y)


def test_error_inputs():
    for error in OP.error_inputs("cpu"):
        x, (shape, weight, eps) = error.sample_input.input, error.sample_input.args
        with pytest.raises(ValueError, match="must"):
            rms_norm(x, weight, eps, normalized_shape=shape)
        if weight is not None:
            with pytest.raises(ValueError, match="must"):
                rms_norm(x, weight, eps)


@pytest.mark.parametrize("dtype", sorted(OP.dtypes - set(DTYPES), key=str))
def test_samples_of_other_dtypes_are_refused(dtype):
    for x, shape, weight, eps in samples(dtype):
        with pytest.raises(TypeError, match="must be one of float32, bfloat16, float16, float64"):
            rms_norm(x, weight, eps, normalized_shape=shape)
