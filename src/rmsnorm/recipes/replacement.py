"""A module of this library in the place of a norm, with the norm's own parameter."""

from __future__ import annotations

import copy

from torch import nn

from rmsnorm.module import GatedRMSNorm, RMSNorm
from rmsnorm.patching.convert import from_convention
from rmsnorm.patching.identifying import is_ours
from rmsnorm.recipes.finding import Norm


class CannotReplace(Exception):
    """Why a norm stays as it is."""


def replacement(model: nn.Module, norm: Norm) -> RMSNorm | GatedRMSNorm:
    """Computes what the norm computes, and has its parameter under the same name.

    Raises:
        CannotReplace: why there is none.
    """
    module, convention = norm.module, norm.convention
    if convention is None:
        raise CannotReplace(norm.reason)
    if module is model:
        raise CannotReplace("it is the model itself")
    if hooked := [name for name in vars(module) if name.endswith("_hooks") and vars(module)[name]]:
        raise CannotReplace(f"it has hooks ({', '.join(hooked)})")
    names = set(module.state_dict())
    if not isinstance(module._parameters.get("weight"), nn.Parameter) or names != {"weight"}:
        raise CannotReplace(f"its state_dict would change: it has {', '.join(sorted(names)) or 'no weight'}")
    made: RMSNorm | GatedRMSNorm
    if is_ours(module):
        made = copy.copy(module)  # type: ignore[assignment]
        made._parameters = dict(module._parameters)
        return made
    try:
        if convention.activation is None:
            made = from_convention(module, convention, RMSNorm)
        else:
            made = from_convention(module, convention, GatedRMSNorm)
    except ValueError as reason:
        raise CannotReplace(str(reason)) from None
    if made.weight is not module.weight:
        raise CannotReplace("its weight has another shape than its rows")
    return made


def exchange(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module wherever another one stands."""
    new.train(old.training)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
