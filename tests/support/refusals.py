"""Refusals: what they must say, and every way to call the library with what it refuses."""

import re

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm

MARK = 7.0


def refused(error, *parts):
    """`pytest.raises` for a message that contains all `parts`."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts))


def as_module(weight, x):
    """An RMSNorm that holds `weight`, whatever that is."""
    norm = RMSNorm(x.shape[-1] if isinstance(x, torch.Tensor) and not x.is_nested and x.dim() and x.shape[-1] else 8)
    del norm.weight
    norm.weight = weight
    if weight is None:
        norm.normalized_shape = (8,)
    return norm


def every_way(x, weight, residual=None):
    """The ways to call with these, as (name, call) pairs; a call that computed anything would mark `out`."""
    residual = x if residual is None else residual
    yield "function", lambda: rms_norm(x, weight)
    yield (
        "function, float eps and offset",
        lambda: rms_norm(x, weight, 1e-5, weight_offset=1.0, rounding="before_scale"),
    )
    yield "function, int offset", lambda: rms_norm(x, weight, weight_offset=1)
    yield "add", lambda: add_rms_norm(x, residual, weight)
    yield "module", lambda: as_module(weight, x)(x)
    yield "module with residual", lambda: as_module(weight, x)(x, residual)


def wanting(t):
    """The same tensor, as one that wants a gradient, where it can."""
    if not isinstance(t, torch.Tensor) or not (t.is_floating_point() or t.is_complex()) or t.is_quantized:
        return t
    return t.detach().requires_grad_()


def check_refused(x, weight, error, *parts):
    for name, call in every_way(x, weight):
        with refused(error, *parts):
            call()
            pytest.fail(f"{name} answered")
    for name, call in every_way(wanting(x), wanting(weight)):
        with refused(error, *parts):
            call()
            pytest.fail(f"{name} answered under grad")
    with torch.inference_mode(), refused(error, *parts):
        rms_norm(x, weight)


def takers(**option):
    """Everything that takes eps and weight_offset; on the way through the operator, and not."""
    x = torch.ones(4, 8)
    weight = torch.ones(8)
    out = torch.full((4, 8), MARK)
    yield lambda: rms_norm(x, weight, **option)
    yield lambda: rms_norm(x, **option)
    yield lambda: rms_norm(x, weight, out=out, **option)
    yield lambda: rms_norm(x.double(), weight, **option)
    yield lambda: rms_norm(x, weight.clone().requires_grad_(), **option)
    yield lambda: rms_norm(x.to("meta"), **option)
    yield lambda: add_rms_norm(x, x, weight, **option)
    yield lambda: RMSNorm(8, **option)

    def untouched():
        assert (out == MARK).all()
        raise ValueError(f"{option}")

    yield untouched
