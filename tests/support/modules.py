"""Modules that tests make: every option, and weights that no wrong formula survives."""

import torch

from tests.support.expected import tensor

OPTIONS = [
    {},
    {"eps": 1e-3},
    {"weight_offset": 1.0},
    {"weight_offset": 0.5},
    {"rounding": "before_scale"},
    {"rounding": "weight_dtype"},
    {"memory_efficient": True},
    {"eps": None, "memory_efficient": True, "weight_offset": 1.0},
    {"elementwise_affine": False},
    {"elementwise_affine": False, "memory_efficient": True},
]


def filled(norm, seed=1):
    """The module with a weight that no wrong formula survives."""
    with torch.no_grad():
        norm.weight.copy_(tensor(*norm.weight.shape, seed=seed))
    return norm
