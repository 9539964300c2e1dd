"""What others raise during a call reaches the caller, once, and nothing is computed twice."""

import signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm import GatedRMSNorm, RMSNorm, add_rms_norm, gated_rms_norm, rms_norm, rms_norms
from tests.support.forms import FORMS, Form
from tests.support.fused import FUSED


class OthersError(RuntimeError):
    """Of the kinds that a call might take for a refusal of its own."""


# Functions that are in neither list.
MORE = [
    Form("several", lambda x, w, **options: rms_norms([x, x], [w, w], **options), None, {"rounding": "once"}),
    Form("partial", lambda x, w, **options: rms_norm(x, w, partial=5, **options), None, {"rounding": "once"}),
    Form("bias", lambda x, w, **options: rms_norm(x, w, bias=w, **options), None, {"rounding": "once"}),
]


@pytest.mark.parametrize("kind", [OthersError, RuntimeError, TypeError, KeyError, AttributeError])
@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_hooks_on_saved_tensors(form, kind):
    calls = []

    def pack(t):
        calls.append(t)
        raise kind("mine")

    tensors = [None if t is None else t.requires_grad_() for t in form.tensors()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), pytest.raises(kind, match="mine"):
        form(*tensors)
    assert len(calls) == 1


class Raising(TorchDispatchMode):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        raise self.kind("mine")


@pytest.mark.parametrize("kind", [OthersError, RuntimeError, TypeError, KeyError])
@pytest.mark.parametrize("form", [*FORMS[::3], *FUSED[::3], *MORE], ids=str)
def test_dispatch_modes(form, kind):
    for need in (False, True):
        tensors = [t if t is None or t.dtype == torch.long else t.requires_grad_(need) for t in form.tensors()]
        mode = Raising(kind)
        with mode, pytest.raises(kind, match="mine"):
            form(*tensors)
        assert mode.calls == 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no interval timers")
@pytest.mark.parametrize("in_place", [False, True])
def test_signal_handlers(in_place):
    """The handler runs when the operator has returned: the row has been normalised, once."""

    def handler(number, frame):
        raise OthersError("mine")

    x, weight = torch.randn(3000, 1024), torch.linspace(0.5, 3.0, 1024)
    expected = rms_norm(x, weight)
    given = x.clone()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(OthersError, match="mine"):  # noqa: PT012 - whenever the signal comes
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            while True:
                rms_norm(given, weight, out=given if in_place else None)
                if in_place:
                    given.copy_(x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if in_place:  # as before, after one call, or partly copied back: no row is the norm of a norm
        rows = (given == x).all(-1) | (given == expected).all(-1)
        mixed = ((given == x) | (given == expected)).all(-1)
        assert (rows | mixed).all()


def test_an_inference_tensor_is_not_written_outside_inference_mode():
    with torch.inference_mode():
        x, other = torch.randn(4, 64), torch.zeros(4, 64)
    for out in (x, other):
        before = out.clone()
        with torch.no_grad(), pytest.raises(RuntimeError, match="out is an inference tensor"):
            rms_norm(x, out=out)
        with torch.no_grad(), pytest.raises(RuntimeError, match="out is an inference tensor"):
            gated_rms_norm(x, other, group_size=8, out=out)
        assert torch.equal(out, before)
    with torch.inference_mode():
        assert rms_norm(x, out=other) is other
        assert torch.equal(other, rms_norm(x))


@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_activations_of_inference_mode_and_trained_weights(form):
    """Autograd saves no inference tensor; a copy of it does."""
    with torch.inference_mode():
        x, beside, weight = form.tensors()
    trained = weight.clone().requires_grad_()
    form(x, beside, trained)[0].sum().backward()
    expected = weight.clone().requires_grad_()
    form(x.clone(), None if beside is None else beside.clone(), expected)[0].sum().backward()
    assert torch.equal(trained.grad, expected.grad)


def freed(*shape, **options):
    t = torch.ones(*shape, **options)
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_whose_storage_was_freed_is_named(dtype):
    x, weight = torch.ones(4, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    gone, gone_weight = freed(4, 8, dtype=dtype), freed(8, dtype=dtype)
    calls = {
        "x": [lambda: rms_norm(gone, weight), lambda: add_rms_norm(gone, x, weight)],
        "weight": [
            lambda: rms_norm(x, gone_weight),
            lambda: add_rms_norm(x, x, gone_weight, group_size=4),
            lambda: gated_rms_norm(x, x, gone_weight),
            lambda: rms_norm(x, gone_weight, out=torch.empty_like(x)),
        ],
        "residual": [lambda: add_rms_norm(x, gone), lambda: add_rms_norm(x, gone, sum="exact")],
        "gate": [lambda: gated_rms_norm(x, gone, weight), lambda: gated_rms_norm(x, gone, norm_before_gate=False)],
        "out": [lambda: rms_norm(x, weight, out=gone)],
    }
    for name, refused in calls.items():
        for call in refused:
            with pytest.raises(ValueError, match=f"{name} has no memory: its storage was freed"):
                call()


def test_modules_whose_weight_was_freed():
    for module in (RMSNorm(8), RMSNorm(8, memory_efficient=True), GatedRMSNorm(8)):
        module.weight.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="weight has no memory"):
            module(torch.ones(4, 8))


@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_what_was_freed_between_forward_and_backward(form):
    """As FSDP2 does with reshard_after_forward, where no hook of its own brings the weight back."""
    x, beside, weight = form.tensors()
    weight.requires_grad_()
    x.requires_grad_()
    result = form(x, beside, weight)[0]
    weight.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match="no memory: its storage was freed"):
        result.sum().backward()
