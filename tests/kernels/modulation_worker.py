"""How the worker calls the operators of modulation: see kernel_worker.py."""

from itertools import product

import torch


def modulated(*arguments):
    *arguments, (y_wanted, rstd_wanted) = arguments
    y, rstd = torch.ops.rmsnorm.modulated_forward_train(*arguments)
    yield "y", torch.ops.rmsnorm.modulated_forward(*arguments), y_wanted
    yield "y in training", y, y_wanted
    yield "rstd", rstd, rstd_wanted


def modulated_backward(*arguments):
    """dweight is asked for beside the other sums where all rows are one segment of theirs, and else alone."""
    *tensors, offset, rounding, shared, sum_dtype, expected = arguments
    dscale = expected[2]
    names = ("dx", "dweight", "dscale", "dshift")
    one_segment = dscale.numel() == dscale.shape[-1]
    for needed in product((True, False), repeat=4):
        if needed[1] and (needed[2] or needed[3]) and not one_segment:
            continue
        dtypes = [sum_dtype if need else None for need in needed[2:]]
        found = torch.ops.rmsnorm.modulated_backward(*tensors, offset, rounding, shared, *needed[:2], *dtypes)
        for what, need, f, e in zip(names, needed, found, expected, strict=True):
            yield f"{what} (need {needed})", f, e if need else None
