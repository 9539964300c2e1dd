"""How the worker calls the operators of rotation: see kernel_worker.py."""

import torch


def rotated(*arguments):
    """The results, those written to new memory, and those written over x."""
    x, weight, cos, sin, *options, (y_wanted, rstd_wanted) = arguments
    y, rstd = torch.ops.rmsnorm.rotary_forward(x, weight, cos, sin, *options)
    yield "y", y, y_wanted
    yield "rstd", rstd, rstd_wanted
    if all(t is None or t.stride(-1) == 1 or t.shape[-1] == 1 for t in (x, cos, sin, weight)):
        out = torch.full(x.shape, torch.nan, dtype=y.dtype)
        torch.ops.rmsnorm.rotary_forward_out(x, weight, cos, sin, *options, out)
        yield "out", out, y_wanted
        if y.dtype == x.dtype:
            whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
            torch.ops.rmsnorm.rotary_forward_out(whole, weight, cos, sin, *options, whole)
            yield "in place", whole, y_wanted


def rotated_backward(*arguments):
    *given, expected = arguments
    for needed in ((True, True), (True, False), (False, True)):
        found = torch.ops.rmsnorm.rotary_backward(*given, *needed)
        for what, need, f, e in zip(("dx", "dweight"), needed, found, expected, strict=True):
            yield f"{what} (need {needed})", f, e if need else None
