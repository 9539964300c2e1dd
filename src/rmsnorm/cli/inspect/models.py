"""The norms of a model: conventions by running the modules, and which tensors of a checkpoint are their weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rmsnorm.cli.inspect.findings import Norm, eps_problem
from rmsnorm.cli.inspect.tensors import Stored, of_module
from rmsnorm.patching.convention import Convention
from rmsnorm.patching.report import Entry
from rmsnorm.patching.survey import survey

# What modules call their eps.
_EPS_ATTRIBUTES = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
# Normalise, and are no RMSNorms: their weights are not our subject.
_OTHER_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.modules.batchnorm._NormBase,
)


@dataclass(frozen=True)
class ModelNorm:
    """A norm of a model, the name of its weight in the state dict, and the weight if the model holds it."""

    norm: Norm
    key: str | None
    stored: Stored | None


@dataclass(frozen=True)
class Surveyed:
    """The norms of a model, the classes of the modules that normalise otherwise, and every eps that a module holds."""

    norms: list[ModelNorm]
    aside: dict[str, str]
    eps: set[float]


def survey_norms(model: nn.Module) -> Surveyed:
    """Every RMSNorm, with its convention or the reason why it has none."""
    norms: list[ModelNorm] = []
    aside: dict[str, str] = {}
    eps: set[float] = set()
    for finding in survey(model):
        entry, module = finding.entry, finding.module
        held = list(_eps_of(module))
        eps.update(held)
        problems = [text for value in held if not 0 <= value < math.inf and (text := eps_problem(value))]
        if entry.convention is not None:
            found = _recognised(entry, entry.convention, module)
            eps.update(() if found.norm.eps is None else (found.norm.eps,))
            norms.append(found)
        elif entry.reason and (isinstance(module, _OTHER_NORMS) or ("a LayerNorm" in entry.reason and not problems)):
            aside[entry.name] = entry.module
        elif entry.reason:
            norms.append(_refused(entry, module, problems))
    return Surveyed(norms, aside, eps)


def _recognised(entry: Entry, convention: Convention, module: nn.Module) -> ModelNorm:
    eps = torch.finfo(torch.float32).eps if convention.eps is None else convention.eps
    problem = eps_problem(eps)
    words = (part for part in str(convention).split(", ") if not part.startswith(("width", "any width", "eps")))
    norm = Norm(
        _name(entry),
        convention.width,
        ", ".join(words),
        eps,
        convention.weight_offset + 0.0,
        warnings=[problem] if problem else [],
    )
    return _with_weight(entry, module, norm, convention.weight)


def _refused(entry: Entry, module: nn.Module, problems: list[str]) -> ModelNorm:
    eps = next((value for value in _eps_of(module) if math.isfinite(value)), None)
    reason = [] if problems else [f"convention unknown: {entry.reason}"]
    own = dict(module.named_parameters(recurse=False))
    weight = next((name for name in ("weight", "scale", "gamma", *own) if name in own), None)
    width = own[weight].numel() if weight else None
    problems = problems if width != 0 else [*problems, "its weight has no elements"]
    norm = Norm(_name(entry), width, None, eps, None, warnings=problems, notes=reason)
    return _with_weight(entry, module, norm, weight)


def _name(entry: Entry) -> str:
    return entry.name or "(the model itself)"


def _with_weight(entry: Entry, module: nn.Module, norm: Norm, weight: str | None) -> ModelNorm:
    if weight is None:
        return ModelNorm(norm, None, None)
    key = f"{entry.name}.{weight}".lstrip(".")
    t = getattr(module, weight, None)
    stored = of_module(key, t) if isinstance(t, torch.Tensor) and not t.is_meta else None
    return ModelNorm(norm, key, stored)


def _eps_of(module: nn.Module) -> Iterator[float]:
    for name in _EPS_ATTRIBUTES:
        value = vars(module).get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)


def with_eps_of(norms: Iterable[Norm], configured: Mapping[str, float], held: set[float], strict: bool) -> list[Norm]:
    """The norms, with a warning for each whose eps is not the configuration's.

    An architecture may fix the eps of some norms, or have the configuration name that of others. So unless `strict`,
    which holds every norm to the configuration, there must be an eps that it names and no module has.
    """
    sound = {name: value for name, value in configured.items() if eps_problem(value) is None}
    unused = {name: value for name, value in sound.items() if not _near_any(value, held)}
    wanted = sound if strict else unused
    text = " or ".join(f"{value:g}" for value in dict.fromkeys(wanted.values()))
    return [
        norm
        if not wanted or norm.eps is None or eps_problem(norm.eps) or _near_any(norm.eps, sound.values())
        else replace(norm, warnings=[*norm.warnings, f"eps is {norm.eps:g}, not the configuration's {text}"])
        for norm in norms
    ]


def _near_any(eps: float, others: Iterable[float]) -> bool:
    return any(math.isclose(eps, other, rel_tol=1e-3) for other in others)


def keys_as_loaded(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of a checkpoint's tensors that the model has, perhaps under others: transformers writes many as before."""
    known = model.state_dict()
    names = list(names)
    own = {name: name for name in names if name in known}
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return own
    if not isinstance(model, PreTrainedModel):
        return own
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    keys = {name: rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0] for name in names}
    return own | {name: key for name, key in keys.items() if key in known}


def weights_by_key(
    model: nn.Module, keys: Iterable[str], tensors: Mapping[str, Stored], loaded: Mapping[str, str]
) -> dict[str, Stored]:
    """For keys of the model's state dict, the tensors of a checkpoint that are loaded under them."""
    by_key: dict[str, str] = {}
    for name in tensors:
        if name in loaded:
            by_key.setdefault(loaded[name], name)
    same = _tied(model)
    found: dict[str, Stored] = {}
    for key in keys:
        names = [by_key[alias] for alias in (key, *same.get(key, ())) if alias in by_key]
        # Prefixes come and go between the libraries that wrote a checkpoint and those that read it.
        names = names or [n for n in tensors if n.endswith(f".{key}") or key.endswith(f".{n}")]
        if len(set(names)) == 1 or (names and names[0] in loaded):
            found[key] = tensors[names[0]]
    return found


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """For each name of a parameter, the other names of the same one: checkpoints have it once."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() if len(same) > 1 for name in same}


def sized(found: ModelNorm, own: Mapping[str, Tensor], stored: Stored | None) -> Norm:
    """The norm, with a warning if the checkpoint's weight has another size than the model's."""
    weight = own.get(found.key or "")
    if stored is None or weight is None or weight.numel() == stored.count:
        return found.norm
    text = f"the checkpoint's weight has {stored.count} elements, the model's norm {weight.numel()}"
    return replace(found.norm, warnings=[*found.norm.warnings, text])
