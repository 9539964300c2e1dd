"""patch and unpatch: a recognised module gets a subclass of its class, whose forward calls this library.

Nothing else about the module changes: its parameters, buffers, attributes and hooks are in the instance, which stays,
and the subclass has none of its own. So `isinstance`, names, `state_dict`, copies and later changes of dtype and device
work as before, and going back is going back to the class.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from rmsnorm.patching.patched import is_patched, patched_class
from rmsnorm.patching.report import Report
from rmsnorm.patching.specimen import require_module
from rmsnorm.patching.survey import Finding, survey


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
    run the module's own forward: another pair of dtypes, another width, further arguments; under autocast where that
    gives something else, and in traces of TorchScript; and from the moment on when something that the proof depended
    on has changed (an attribute, the code of the class, the weight's shape). Modules whose result may depend on what
    cannot be watched, such as a configuration object, are left alone. A second call changes nothing.

    Args:
        model: any module; those inside it that are RMSNorms by what they compute are replaced (see `identify`).

    Returns:
        What was found and replaced, how it was proved, and what was left alone and why; it prints as a table.
    """
    require_module("model", model)
    findings = list(survey(model))
    classes: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        done = [_replace(finding, classes) for finding in findings]
    except BaseException:
        for module, cls in reversed(classes):
            _give(module, cls)
        raise
    entries = tuple(f.entry for f in done if f.entry.convention is not None or f.entry.reason)
    return Report(entries, len(done) - len(entries))


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
        _give(module, type(module)._rmsnorm_original)
    return len(patched)


def _replace(finding: Finding, classes: list[tuple[nn.Module, type[nn.Module]]]) -> Finding:
    """The finding, carried out where there is a proof; `classes` notes what to undo."""
    if finding.proof is None:
        return finding
    module, own = finding.module, type(finding.module)
    try:
        made = patched_class(own, finding.proof)
        _give(module, made)
    except Exception as error:  # classes may refuse to be subclassed, and their instances to be given another
        reason = f"its class cannot be replaced: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return replace(finding, entry=replace(finding.entry, reason=reason))
    classes.append((module, own))
    return replace(finding, entry=replace(finding.entry, replaced=True))


def _give(module: nn.Module, cls: type[nn.Module]) -> None:
    # Whatever the module makes of attributes that are set: this is none.
    object.__setattr__(module, "__class__", cls)
