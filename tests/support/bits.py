"""Equality of bit patterns, which is what the numerics contract promises (docs/numerics.md)."""

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_equal(actual, expected):
    """Whether two tensors have the same dtype, shape and bits; any NaN equals any NaN, its payload is unspecified.

    `torch.equal` is not this: it calls -0 and +0 equal, and NaN different from itself.
    """
    return difference(actual, expected) is None


def difference(actual, expected):
    """What is different, in words; None where `bits_equal`."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    integers = _INTEGERS[actual.element_size()]
    # NaN first: a view of a strided tensor as integers of the same size keeps its strides.
    wrong = actual.view(integers) != expected.view(integers)
    if actual.is_floating_point():
        wrong &= ~(actual.isnan() & expected.isnan())
    if not wrong.any():
        return None
    where = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {where}: "
        f"{actual[where].item()!r}, expected {expected[where].item()!r}"
    )


def unequal(what, actual, expected):
    """What is different, as a text or none; None equals None."""
    if actual is None or expected is None:
        if actual is not expected:
            yield f"{what}: only one of them is None"
    elif (found := difference(actual, expected)) is not None:
        yield f"{what}: {found}"


def same(actual, expected):
    """Asserts `bits_equal`."""
    assert (found := difference(actual, expected)) is None, found
