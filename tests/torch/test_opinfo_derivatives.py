"""What PyTorch's OpInfo has checked of its own `rms_norm`, checked of ours: derivatives, and compiled code."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db

from rmsnorm import rms_norm
from tests.support.bits import difference

OP = next(op for op in op_db if op.name == "nn.functional.rms_norm")


def samples(dtype):
    """(function, tensors) for each sample with elements: the function is ours, of x and the weight if there is one."""
    for sample in OP.sample_inputs("cpu", dtype, requires_grad=True):
        arguments = dict(zip(("normalized_shape", "weight", "eps"), sample.args, strict=False)) | sample.kwargs
        weight, shape, eps = arguments.get("weight"), arguments["normalized_shape"], arguments.get("eps")
        if sample.input.numel() == 0:
            continue

        def ours(x, weight=None, shape=shape, eps=eps):
            return rms_norm(x, weight, eps, normalized_shape=shape)

        yield ours, (sample.input,) if weight is None else (sample.input, weight)


def test_derivatives():
    assert OP.supports_forward_ad
    assert OP.supports_fwgrad_bwgrad
    for ours, tensors in samples(torch.float64):
        assert gradcheck(ours, tensors, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
        assert gradgradcheck(ours, tensors, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_bits(dtype):
    for ours, tensors in samples(dtype):
        torch._dynamo.reset()
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
        eager, traced = ours(*tensors), compiled(*tensors)
        dy = torch.randn_like(eager)
        found = traced, *torch.autograd.grad(traced, tensors, dy)
        expected = eager, *torch.autograd.grad(eager, tensors, dy)
        assert [difference(a, b) for a, b in zip(found, expected, strict=True)] == [None] * len(found)
