"""identify: from a module to its convention, by running it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from rmsnorm.module import GatedRMSNorm, RMSNorm
from rmsnorm.patching.convention import Convention
from rmsnorm.patching.probes import LARGEST_MATRIX, find_form
from rmsnorm.patching.proof import prove
from rmsnorm.patching.specimen import NotRMSNorm, Specimen, require_module, undisturbed


def identify(module: nn.Module) -> Convention | None:
    """What an RMSNorm computes, found by running it, whatever its class is called; None if it is none.

    >>> print(identify(torch.nn.RMSNorm(64, eps=1e-5)))
    width 64, eps 1e-05, weight, once
    >>> identify(torch.nn.LayerNorm(64)) is None
    True

    Its own forward runs on random inputs and weights, in a copy: the module, its hooks and the random generators'
    states stay as they are. A convention is returned only if this library's result, in float32, bfloat16 and float16,
    has the same dtype and lies within one unit in the last place, or nearer to exact arithmetic than the module's own;
    and if the gradients are those of the formula.

    Args:
        module: any module, on any device, the meta device included.

    Returns:
        The convention, whose `arguments` are those with which `RMSNorm` or `GatedRMSNorm` reproduces the module.
    """
    try:
        return examine(module)
    except NotRMSNorm:
        return None


def examine(module: nn.Module) -> Convention:
    """The convention of a module.

    Raises:
        NotRMSNorm: it has none, and why.
    """
    require_module("module", module)
    cls = type(module)
    original = getattr(cls, "_rmsnorm_original", None)
    specimen = Specimen(module, original or cls)
    for name, t in specimen.tensors.items():
        if t.numel() > LARGEST_MATRIX and sum(size > 1 for size in t.shape) > 1:
            raise NotRMSNorm(f"its {name} is a matrix")
    with undisturbed(), specimen.observed():
        return prove(specimen, find_form(specimen))


def signature(module: nn.Module) -> Hashable:
    """What decides a module's convention, its tensors' values aside: modules of one signature are examined once."""
    own = {**module._parameters, **module._buffers}
    shapes = tuple((name, None if t is None else (tuple(t.shape), t.dtype, t.device.type)) for name, t in own.items())
    children = tuple((name, signature(child)) for name, child in module._modules.items() if child is not None)
    return type(module), shapes, children, tuple((k, _plain(v)) for k, v in vars(module).items() if k[0] != "_")


def _plain(value: object) -> Hashable:
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, float):
        return value.hex()
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def is_ours(module: nn.Module) -> bool:
    """Whether it is this library's own module already."""
    return isinstance(module, (RMSNorm, GatedRMSNorm))
