"""identify: from a module to its convention, by running it."""

from __future__ import annotations

import inspect
import types
from dataclasses import replace

from torch import nn

from rmsnorm.module import GatedRMSNorm, RMSNorm
from rmsnorm.patching import layout
from rmsnorm.patching.convention import Convention
from rmsnorm.patching.dependencies import recording
from rmsnorm.patching.images import Images
from rmsnorm.patching.patched import Proof
from rmsnorm.patching.probes import LARGEST_MATRIX, find_form
from rmsnorm.patching.proof import prove
from rmsnorm.patching.reason import OtherDimensions
from rmsnorm.patching.specimen import NotRMSNorm, Specimen, require_module, unfit
from rmsnorm.patching.surroundings import undisturbed
from rmsnorm.patching.watching import Watch

# Running a module takes about a hundred times the memory of a row; flat parameters and tables are no rows.
LARGEST_ROW = 2**18


def identify(module: nn.Module) -> Convention | None:
    """What an RMSNorm computes, found by running it, whatever its class is called; None if it is none.

    >>> import torch
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
    return _examined(module, set())[1]


def prove_module(module: nn.Module, reads: set[str] | None = None) -> Proof:
    """The convention of a module with all that a call has to look at: what it depends on, the layout of its results.

    Args:
        module: any module.
        reads: receives the names that its forward reads of it.

    Raises:
        NotRMSNorm: it has none, or depends on something that cannot be watched, and why.
    """
    reads = set() if reads is None else reads
    specimen, convention = _examined(module, reads)
    with undisturbed(), specimen.observed():
        laid_out = None if convention.dims is not None else layout.observed(specimen, convention)
    weight = None if convention.weight is None else specimen.own_shape(convention.weight)
    try:
        watch = Watch(module, frozenset(reads), tuple(specimen.scalars))
    except NotRMSNorm as reason:
        raise NotRMSNorm(str(reason), True, convention) from None
    return Proof(convention, watch, weight, laid_out, specimen.device.type)


def _examined(module: nn.Module, reads: set[str]) -> tuple[Specimen, Convention]:
    cls = getattr(type(module), "_rmsnorm_original", type(module))
    if reason := unfit(module):
        raise reason
    if type(inspect.getattr_static(cls, "forward", None)) is not types.FunctionType:
        raise NotRMSNorm("its forward is no method written in Python")
    specimen = Specimen(module, cls, recording(cls, reads))
    for name, t in specimen.tensors.items():
        if t.numel() > LARGEST_MATRIX and sum(size > 1 for size in t.shape) > 1:
            raise NotRMSNorm(f"its {name} is a matrix")
        if t.numel() > LARGEST_ROW:
            raise NotRMSNorm(f"its {name} has {t.numel():,} elements; rows of up to {LARGEST_ROW:,} are examined")
    try:
        with undisturbed(), specimen.observed():
            return specimen, prove(specimen, find_form(specimen))
    except OtherDimensions as reason:
        found = _examined_on_images(module, cls, reads)
        if found is None:
            raise reason
        return found


def _examined_on_images(module: nn.Module, cls: type[nn.Module], reads: set[str]) -> tuple[Specimen, Convention] | None:
    """The same of the channels of images, or of videos, whichever it takes."""
    for dims in (4, 5):
        specimen = Images(module, cls, recording(cls, reads), dims=dims)
        try:
            with undisturbed(), specimen.observed():
                convention = prove(specimen, find_form(specimen))
        except NotRMSNorm:
            continue
        if convention.activation is None and convention.shape is not None:
            return specimen, replace(convention, dims=dims)
    return None


def is_ours(module: nn.Module) -> bool:
    """Whether it is this library's own module already."""
    return isinstance(module, (RMSNorm, GatedRMSNorm))
