"""patch and unpatch: a recognised module gets a subclass of its class, whose forward calls this library.

Nothing else about the module changes: its parameters, buffers, attributes and hooks are in the instance, which stays,
and the subclass has none of its own. So `isinstance`, names, `state_dict`, copies and later changes of dtype and device
work as before, and going back is going back to the class.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.identifying import examine, is_ours, signature
from rmsnorm.patching.proof import confirm
from rmsnorm.patching.report import Entry, Report
from rmsnorm.patching.specimen import NotRMSNorm, Specimen, require_module, undisturbed, unfit


def patch(model: nn.Module) -> Report:
    """Makes every RMSNorm of a model use this library, each after the proof that its results are the same.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
    >>> report = patch(model)
    >>> [entry.name for entry in report.replaced]
    ['1']
    >>> unpatch(model)
    1

    Parameters, `state_dict`, attributes, hooks and `isinstance` stay as they are. Calls that the proof does not cover
    (another pair of dtypes, another width, further arguments, an eps that has changed since) run the module's own
    forward; an eps in a buffer is taken as it is now. A second call changes nothing.

    Args:
        model: any module; those inside it that are RMSNorms by what they compute are replaced (see `identify`).

    Returns:
        What was found and replaced, how it was proved, and what was left alone and why; it prints as a table.
    """
    require_module("model", model)
    entries = []
    others = 0
    for entry, module in survey(model):
        if entry.convention is not None and not entry.reason:
            module.__class__ = _subclass(type(module), entry.convention)
            entry = replace(entry, replaced=True)
        if entry.convention is not None or entry.reason:
            entries.append(entry)
        else:
            others += 1
    return Report(tuple(entries), others)


def survey(model: nn.Module) -> Iterator[tuple[Entry, nn.Module]]:
    """Every module of a model with its convention, or a reason why it has none; neither if it normalises nothing."""
    known: dict[Hashable, Convention | NotRMSNorm] = {}
    for name, module in model.named_modules():
        class_name = getattr(type(module), "_rmsnorm_original", type(module)).__name__
        if isinstance(module, torch.jit.ScriptModule):
            class_name = module.original_name
        if is_ours(module) or is_patched(module):
            convention = getattr(type(module), "_rmsnorm_convention", None) or _examined(module)
            found = None if isinstance(convention, NotRMSNorm) else convention
            yield Entry(name, class_name, found, reason="uses this library already"), module
            continue
        if ".parametrizations." in f".{name}":
            yield Entry(name, class_name, None), module  # it makes a weight
            continue
        found = unfit(module)
        if found is None:
            key = signature(module)
            if key not in known:
                known[key] = _examined(module)
            found = known[key]
        if isinstance(found, Convention):
            with undisturbed():
                found = _confirmed(module, found)
        if isinstance(found, Convention):
            yield Entry(name, class_name, found), module
        elif found.normalises or "norm" in class_name.lower():
            yield Entry(name, class_name, None, reason=str(found)), module
        else:
            yield Entry(name, class_name, None), module


def unpatch(model: nn.Module) -> int:
    """Gives every patched module its own class back, and with it its own forward; returns how many there were.

    Raises:
        ValueError: a patched module has been given yet another class since (by a parametrisation or by FSDP).
    """
    require_module("model", model)
    patched = {name: module for name, module in model.named_modules() if is_patched(module)}
    for name, module in patched.items():
        if "_rmsnorm_original" not in vars(type(module)):
            raise ValueError(
                f"{name or 'the model'} was given the class {type(module).__name__} after patch: undo that first"
            )
    for module in patched.values():
        module.__class__ = type(module)._rmsnorm_original
    return len(patched)


def is_patched(module: nn.Module) -> bool:
    """Whether its forward is this library's."""
    return hasattr(type(module), "_rmsnorm_original")


def _examined(module: nn.Module) -> Convention | NotRMSNorm:
    try:
        return examine(module)
    except NotRMSNorm as reason:
        return reason


def _confirmed(module: nn.Module, convention: Convention) -> Convention | NotRMSNorm:
    """The convention if it holds for this very module, with its own weights; else what a fresh examination says."""
    try:
        confirm(Specimen(module), convention)
    except NotRMSNorm:
        try:
            convention = examine(module)
            confirm(Specimen(module), convention)
        except NotRMSNorm as reason:
            return reason
    return convention


@functools.cache
def _subclass_of(cls: type[nn.Module], convention: Convention, pairs: frozenset[Any]) -> type[nn.Module]:
    names = Specimen.input_names(cls)[: 1 if convention.activation is None else 2]
    own_forward = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = args if not kwargs else _positional(args, kwargs, names)
        if inputs is not None and len(inputs) == len(names):
            weight = None if convention.weight is None else getattr(self, convention.weight)
            known = convention.eps_name is None or getattr(self, convention.eps_name) == convention.eps
            if known and _covered(inputs, weight, convention, pairs):
                return convention.apply(inputs[0], weight, *inputs[1:])
        return own_forward(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:  # noqa: N807 - a method of the class below
        # The subclass has no name by which pickle could find it; it is made again.
        return _restore, (cls, convention), self.__getstate__() if hasattr(cls, "__getstate__") else self.__dict__

    def extra_repr(self: nn.Module) -> str:
        own = cls.extra_repr(self)
        return f"{own}{', ' if own else ''}rmsnorm: {convention}"

    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "_rmsnorm_original": cls,
        "_rmsnorm_convention": convention,
        "extra_repr": extra_repr,
        "forward": functools.wraps(own_forward)(forward),
    }
    return type(cls.__name__, (cls,), body)


def _subclass(cls: type[nn.Module], convention: Convention) -> type[nn.Module]:
    return _subclass_of(cls, convention, frozenset((e.x, e.weight) for e in convention.evidence))  # type: ignore[arg-type]


def _restore(cls: type[nn.Module], convention: Convention) -> nn.Module:
    """What pickle and copy make first of a patched module; its state follows."""
    made = _subclass(cls, convention)
    return made.__new__(made)


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> tuple[Any, ...] | None:
    """The inputs in order, if all keywords are among them."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return tuple(given[name] for name in names) if len(args) <= len(names) and set(given) == set(names) else None


def _covered(inputs: tuple[Any, ...], weight: Tensor | None, convention: Convention, pairs: frozenset[Any]) -> bool:
    """Whether the proof holds for these inputs."""
    x = inputs[0]
    if not all(isinstance(t, Tensor) and t.dtype == x.dtype and t.shape == x.shape for t in inputs):
        return False
    if (x.dtype, None if weight is None else weight.dtype) not in pairs or x.dim() == 0 or x.shape[-1] == 0:
        return False
    if convention.shape is None:
        return convention.group_size is None or x.shape[-1] % convention.group_size == 0
    return tuple(x.shape[-len(convention.shape) :]) == convention.shape
