"""vLLM's operations with this library as their provider, on vLLM's own package."""

import importlib.metadata

import torch
from vllm import ir
from vllm.ir.op import enable_torch_wrap

from rmsnorm.integrations import vllm as plugin
from tests.support.counting import counted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cases(seed=0):
    g = torch.Generator().manual_seed(seed)
    for x_dtype in DTYPES:
        for weight_dtype in (x_dtype, torch.float32, None):
            x, residual = (torch.randn(64, 256, generator=g).to(x_dtype) for _ in range(2))
            yield x, residual, None if weight_dtype is None else torch.randn(256, generator=g).to(weight_dtype)


def use(name):
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        op.set_default([name, "native"] if name != "native" else ["native"])


def steps_apart(a, b):
    """The largest distance in steps of the dtype, and the share of results that are equal."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    a, b = (torch.where((i := t.view(integers).long()) < 0, torch.iinfo(integers).min - i, i) for t in (a, b))
    return int((a - b).abs().max()), float((a == b).float().mean())


def the_plugin_is_found_and_registers_once():
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="rmsnorm")
    for _ in range(2):
        point.load()()
    assert "rmsnorm" in ir.ops.rms_norm.impls
    assert "rmsnorm" in ir.ops.fused_add_rms_norm.impls


def results_are_vllms_native_ones_and_every_call_is_ours():
    plugin.register()
    for x, residual, weight in cases():
        use("native")
        wanted = ir.ops.rms_norm(x, weight, 1e-6), *ir.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        use("rmsnorm")
        found = ir.ops.rms_norm(x, weight, 1e-6), *ir.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        with enable_torch_wrap(False), counted() as calls:  # inside vLLM's own operator nothing can be counted
            again = ir.ops.rms_norm(x, weight, 1e-6), *ir.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        assert calls.total() == 2, calls
        assert all(map(torch.equal, again, found))
        assert [t.dtype for t in found] == [t.dtype for t in wanted]
        assert torch.equal(found[2], wanted[2])  # the residual
        for a, b in zip(found[:2], wanted[:2], strict=True):
            # A rounding to 16 bits falls the other way seldom: vLLM's float32 sums and its rsqrt err by some 2^-23,
            # which is 2^-13 of a step of float16. Scaled after that rounding it is two steps of the product at most.
            apart, equal = steps_apart(a, b)
            if x.dtype != torch.float32:
                assert apart <= 2, (x.dtype, apart)
                assert equal > 0.99, (x.dtype, equal)
            else:
                torch.testing.assert_close(a, b, rtol=2.0**-21, atol=0)


def in_place_of_activations_results_are_the_same():
    plugin.register()
    use("rmsnorm")
    for x, residual, weight in cases():
        wanted = ir.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        found = ir.ops.fused_add_rms_norm.maybe_inplace(x.clone(), residual.clone(), weight, 1e-6)
        assert all(map(torch.equal, found, wanted))


def what_it_does_not_offer_vllm_computes_itself():
    plugin.register()
    x, _, weight = next(cases())
    use("rmsnorm")
    with enable_torch_wrap(False), counted() as calls:
        y = ir.ops.rms_norm(x, weight, 1e-6, 128)  # statistics of half a row
        ir.ops.rms_norm(x.double(), weight, 1e-6)
    assert calls.total() == 0
    use("native")
    assert torch.equal(y, ir.ops.rms_norm(x, weight, 1e-6, 128))
