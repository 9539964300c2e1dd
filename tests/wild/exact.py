"""The formula in float64, written once more: the judge of the tests trusts nothing of the library."""

import torch


def norm(x, gain, eps, group=None):
    shape = x.shape
    x = x.reshape(*shape[:-1], -1, group or shape[-1])
    return (x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)).reshape(shape) * gain


def forward(convention, x, weight, gate=None):
    gain = 1.0 if weight is None else weight.flatten() + convention.weight_offset
    eps = torch.finfo(torch.float32).eps if convention.eps is None else convention.eps
    if gate is None:
        return norm(x, gain, eps, convention.group_size)
    act = torch.sigmoid(gate) * (gate if convention.activation == "silu" else 1.0)
    if convention.norm_before_gate:
        return norm(x, gain, eps, convention.group_size) * act
    return norm(x * act, gain, eps, convention.group_size)


def error(actual, expected):
    """The largest difference in relation to the largest of its row."""
    size = expected.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((actual.double() - expected).abs() / size).max())
