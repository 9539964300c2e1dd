"""Every module of a model, with what was proved of it or the reason why nothing was."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.identifying import identify, is_ours, prove_module
from rmsnorm.patching.images import specimen_of
from rmsnorm.patching.patched import Proof, is_patched
from rmsnorm.patching.proof import confirm
from rmsnorm.patching.report import Entry
from rmsnorm.patching.specimen import NotRMSNorm, unfit
from rmsnorm.patching.surroundings import undisturbed
from rmsnorm.patching.watching import Watch

IN_USE = "uses this library already"


@dataclass(frozen=True)
class Finding:
    """A module, its line in a report, and the proof if it can be replaced."""

    module: nn.Module
    entry: Entry
    proof: Proof | None = None


def survey(model: nn.Module) -> Iterator[Finding]:
    """Every module of a model with its convention, or a reason why it has none; neither if it normalises nothing.

    Modules of one class whose results depend on the same values are examined once. Whatever a stranger's code raises
    is the reason of that one module.
    """
    known: dict[Hashable, list[tuple[Watch, Proof | NotRMSNorm]]] = {}
    flattened = _flattened(model)
    for name, module in model.named_modules():
        class_name = getattr(type(module), "_rmsnorm_original", type(module)).__name__
        if isinstance(module, torch.jit.ScriptModule):
            class_name = module.original_name
        if is_ours(module) or is_patched(module):
            yield Finding(module, Entry(name, class_name, _convention_in_use(module), reason=IN_USE))
        elif ".parametrizations." in f".{name}":
            yield Finding(module, Entry(name, class_name, None))  # it makes a weight
        else:
            if id(module) in flattened:
                reason = "its tensors are part of a flat parameter (FullyShardedDataParallel): patch before wrapping"
                found: Proof | NotRMSNorm = NotRMSNorm(reason, normalises=flattened[id(module)] == 1)
            else:
                found = _guarded(module, known)
            if isinstance(found, Proof):
                yield Finding(module, Entry(name, class_name, found.convention), found)
            else:
                said = found.normalises or "norm" in class_name.lower()
                yield Finding(module, Entry(name, class_name, found.convention, reason=str(found) if said else ""))


def _guarded(module: nn.Module, known: dict[Hashable, list[tuple[Watch, Proof | NotRMSNorm]]]) -> Proof | NotRMSNorm:
    try:
        return _found(module, known)
    except NotRMSNorm as reason:
        return reason
    except Exception as error:  # strangers' attributes, classes and tensors may raise anything
        message = str(error).strip().partition("\n")[0]
        return NotRMSNorm(f"it cannot be examined: {type(error).__name__}: {message}", True)


def _convention_in_use(module: nn.Module) -> Convention | None:
    return getattr(type(module), "_rmsnorm_convention", None) or identify(module)


def _found(module: nn.Module, known: dict[Hashable, list[tuple[Watch, Proof | NotRMSNorm]]]) -> Proof | NotRMSNorm:
    """What is known of a module of its outline that it is equal to; else what its own examination shows."""
    if reason := unfit(module):
        return reason
    group = known.setdefault(outline(module), [])
    found = next((found for watch, found in group if watch.holds(module)), None)
    if found is None:
        found, reaches = prove_module_once(module)
        if reaches is not None:
            group.append((reaches, found))
    if isinstance(found, NotRMSNorm):
        return found
    try:
        with undisturbed():
            confirm(specimen_of(module, found.convention), found.convention)
    except NotRMSNorm:
        again = prove_module(module)
        with undisturbed():
            confirm(specimen_of(module, again.convention), again.convention)
        return again
    return found


def prove_module_once(module: nn.Module) -> tuple[Proof | NotRMSNorm, Watch | None]:
    """What an examination shows, and for which modules of the same outline that is so."""
    reads: set[str] = set()
    found: Proof | NotRMSNorm
    try:
        found = prove_module(module, reads)
        return found, found.watch
    except NotRMSNorm as reason:
        found = reason
    try:
        return found, Watch(module, frozenset(reads))
    except NotRMSNorm:
        return found, None


def outline(module: nn.Module, inside: tuple[nn.Module, ...] = ()) -> Hashable:
    """What a module is made of, values aside: its class, its tensors, and the same of its children."""
    own = [*module._parameters.items(), *module._buffers.items()]
    own += [(name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
    shapes = tuple((name, None if t is None else (tuple(t.shape), t.dtype, t.device.type)) for name, t in own)
    children = tuple(
        (name, None if child is None or child in inside else outline(child, (*inside, module)))
        for name, child in module._modules.items()
    )
    return id(type(module)), shapes, children


def _flattened(model: nn.Module) -> dict[int, int]:
    """The modules whose parameters FullyShardedDataParallel has put into one, and the most dimensions that one had.

    Each rank holds another part of them, and all must decide alike.
    """
    managed: dict[int, int] = {}
    for module in model.modules():
        flat = getattr(vars(module).get("_handle"), "flat_param", None)
        if flat is not None:
            for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
                managed[id(info.module)] = max(len(shape), managed.get(id(info.module), 0))
            for info in flat._shared_param_infos:
                managed.setdefault(id(info.module), 2)
    return managed
