"""From a target to its norms: their conventions where there is code to run, their weights where there are any."""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from rmsnorm.cli.inspect import building, models
from rmsnorm.cli.inspect.files import (
    Parts,
    gguf_parts,
    parts_beside,
    read_json,
    regular,
    safetensors_of_folder,
)
from rmsnorm.cli.inspect.findings import Norm, eps_problem
from rmsnorm.cli.inspect.gguf_file import Gguf, read_gguf
from rmsnorm.cli.inspect.tensors import Stored, norm_weights, read_safetensors
from rmsnorm.cli.requirements import CannotRun, is_installed
from rmsnorm.cli.text import printable

_ALLOWED = "a checkpoint folder, a .safetensors or .gguf file, a config.json, or module:callable"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_GGUF_EPS = ".attention.layer_norm_rms_epsilon"
# What llama.cpp calls the architectures whose offsets from one its converter folds into the gains.
_FOLDED = ("gemma", "qwen3next", "qwen35", "nemotron")
_NOT_FOLDED = ("gemma3n", "gemma4")


@dataclass
class Found:
    """The norms of a target with their weights; `warnings` and `notes` are about the whole."""

    source: str
    norms: list[tuple[Norm, Stored | None]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    offsets_folded: bool = False


def read(target: str, step: Callable[[str], None]) -> Found:
    """Whatever the target is.

    Raises:
        CannotRun: it is nothing of what is allowed, or cannot be read.
    """
    path = Path(target)
    try:
        if path.is_dir():
            return _folder(path, step)
        if path.suffix == ".safetensors" and regular(path):
            return _checkpoint(Found(str(path)), parts_beside(path), path.with_name("config.json"), step)
        if path.suffix == ".json" and regular(path):
            return _checkpoint(Found(str(path)), Parts(), path, step)
        if path.suffix == ".gguf" and regular(path):
            return _gguf(gguf_parts(path), step)
        there = path.exists()
    except OSError as error:
        raise CannotRun(f"{target} cannot be read: {error.strerror}") from None
    if ":" in target and not there:
        return _callable(target, step)
    problem = "is no file that can be inspected" if there or path.is_symlink() else "does not exist"
    raise CannotRun(f"{target} {problem}; TARGET is {_ALLOWED}")


def _folder(path: Path, step: Callable[[str], None]) -> Found:
    config = path / "config.json"
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")) or config.exists():
        return _checkpoint(Found(str(path)), safetensors_of_folder(path), config, step)
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        whole = gguf_parts(ggufs[0])
        if set(ggufs) <= set(whole.files):
            return _gguf(whole, step)
        raise CannotRun(f"{path} has {len(ggufs)} .gguf files: say which")
    parts = [part.name for part in sorted(path.iterdir()) if part.is_dir() and (part / "config.json").exists()]
    if parts:
        raise CannotRun(f"{path} is made of parts, to be inspected one by one: {', '.join(parts[:10])}")
    if pickles := [file.name for file in sorted(path.iterdir()) if file.suffix in _PICKLES]:
        raise CannotRun(f"{path} has {pickles[0]}, and reading that would run code in it: save it as .safetensors")
    raise CannotRun(f"{path} has neither config.json nor .safetensors files; TARGET is {_ALLOWED}")


def _checkpoint(found: Found, parts: Parts, config_file: Path, step: Callable[[str], None]) -> Found:
    step("reading the names of tensors")
    tensors: dict[str, Stored] = {}
    files: dict[str, str] = {}
    for file in parts.files:
        for name, stored in read_safetensors(file).items():
            if name in files:
                found.warnings.append(f"{name} is in two files, {files[name]} and {file.name}")
            tensors[name], files[name] = stored, file.name
    found.notes += parts.notes
    found.warnings += parts.warnings
    found.warnings += _lies(parts.index, files)
    step("building the model without its weights")
    configured, model = _model_of(config_file, found)
    if model is not None:
        step("running the norms")
        _with_model(found, model, configured, tensors, parts)
    elif parts.files:
        shapes = {name: t.shape for name, t in tensors.items()}
        names = sorted(norm_weights(shapes), key=natural)
        found.norms = [(Norm(name, tensors[name].count, None, None, None), tensors[name]) for name in names]
        if not names:
            none = f"None of its {len(tensors)} tensors is called like the weight of an RMSNorm."
            found.notes.append(none if tensors else "It has no tensors.")
    elif not found.warnings:
        raise CannotRun(f"{found.source}: {found.notes[-1]}")
    return found


def natural(name: str) -> list[str | int]:
    """A key that sorts numbers in names as numbers."""
    return [int(part[:18]) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]


def _lies(index: Mapping[str, str], files: Mapping[str, str]) -> list[str]:
    """What the index says of tensors and does not hold."""
    wrong = [name for name, file in index.items() if files.get(name) != file]
    if not wrong:
        return []
    where = f"{index[wrong[0]]}, which has no such tensor"
    more = f", and {len(wrong) - 1} more such" if len(wrong) > 1 else ""
    return [f"the index has {wrong[0]} in {where}{more}"]


def _model_of(config_file: Path, found: Found) -> tuple[dict[str, float], nn.Module | None]:
    """Every eps that a configuration names, and its model; what stands in the way is noted."""
    if not regular(config_file):
        there = config_file.exists() or config_file.is_symlink()
        reason = f"{config_file.name} is no regular file" if there else f"No {config_file.name} beside it"
        found.notes.append(f"{reason}: conventions are unknown.")
        return {}, None
    config = read_json(config_file)
    configured = building.eps_values(config)
    found.warnings += [f"{name}: {problem}" for name, eps in configured.items() if (problem := eps_problem(eps))]
    if not is_installed("transformers"):
        found.notes.append('transformers is not installed: conventions are unknown; try: pip install "rmsnorm[demo]"')
        return configured, None
    model = building.build(config_file, config)
    if isinstance(model, str):
        found.notes.append(f"Conventions are unknown: {model}")
        return configured, None
    return configured, model


def _with_model(
    found: Found, model: nn.Module, configured: dict[str, float], tensors: dict[str, Stored], parts: Parts
) -> None:
    surveyed = _surveyed(model, found.source)
    own, loaded = model.state_dict(), models.keys_as_loaded(model, tensors)
    keys: list[str] = [n.key for n in surveyed.norms if n.key is not None]
    used = models.weights_by_key(model, keys, tensors, loaded)
    norms = [models.sized(n, own, used.get(n.key or "")) for n in surveyed.norms]
    norms = models.with_eps_of(norms, configured, surveyed.eps, strict=False)
    found.norms = [(norm, used.get(n.key or "")) for norm, n in zip(norms, surveyed.norms, strict=True)]
    found.notes += _aside(surveyed.aside)
    if not parts.files:
        found.notes.append("There are no weights beside it: conventions alone.")
        return
    missing = sorted((key for key in keys if key in own and key not in used), key=natural)
    if missing:
        text = f"{len(missing)} of the model's norms have no weight in it, {missing[0]} for one"
        (found.warnings if parts.whole else found.notes).append(text)
    taken = {t.name for t in used.values()}
    for name in sorted(norm_weights({name: t.shape for name, t in tensors.items()}), key=natural):
        target = loaded.get(name)
        if name not in taken and (target is None or target.rpartition(".")[0] not in surveyed.aside):
            note = "the model has nothing of this name" if target is None else "no module of its own computes this norm"
            found.norms.append((Norm(name, tensors[name].count, None, None, None, notes=[note]), tensors[name]))


def _aside(classes: Mapping[str, str]) -> list[str]:
    said = ", ".join(f"{count} {name}" for name, count in Counter(classes.values()).items())
    return [f"Not RMSNorms, left aside: {said}."] if said else []


def _surveyed(model: nn.Module, source: str) -> models.Surveyed:
    try:
        return models.survey_norms(model)
    except (Exception, SystemExit) as error:  # modules may raise anything
        raise CannotRun(f"{source}: its norms cannot be run: {_said(error)}") from None


def _gguf(parts: Parts, step: Callable[[str], None]) -> Found:
    step("reading the names of tensors")
    whole = Gguf({}, {})
    for file in parts.files:
        part = read_gguf(file)
        for name in part.tensors.keys() & whole.tensors.keys():
            raise CannotRun(f"{file}: {name} is in another part too")
        whole = Gguf(part.fields | whole.fields, whole.tensors | part.tensors)
    step("reading the configuration")
    architecture = str(whole.fields.get("general.architecture", "unknown"))
    found = Found(parts.source, warnings=list(parts.warnings), notes=list(parts.notes))
    count = whole.fields.get("split.count")
    if len(parts.files) == 1 and isinstance(count, int) and count > 1 and not parts.warnings:
        found.warnings.append(f"this is one part of {count}, and the others are not known by its name")
    eps = _gguf_eps(whole, parts.source)
    if eps is not None and (problem := eps_problem(eps)):
        found.warnings.append(problem)
        eps = eps if math.isfinite(eps) else None
    names = sorted(norm_weights({name: t.shape for name, t in whole.tensors.items()}), key=natural)
    found.norms = [(Norm(name, whole.tensors[name].count, None, eps, 0.0), whole.tensors[name]) for name in names]
    # llama.cpp adds the one of Gemma and its like while converting.
    found.notes.append(f"Architecture {architecture}; GGUF stores gains, offsets folded in.")
    found.offsets_folded = architecture.startswith(_FOLDED) and not architecture.startswith(_NOT_FOLDED)
    return found


def _gguf_eps(file: Gguf, source: str) -> float | None:
    for key, value in file.fields.items():
        if key.endswith(_GGUF_EPS):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise CannotRun(f"{source}: {printable(key)} must be a number, got {printable(repr(value))}")
            return float(value)
    return None


def _callable(target: str, step: Callable[[str], None]) -> Found:
    module_name, _, name = target.partition(":")
    step(f"building {target}")
    sys.path.insert(0, "")
    # What a stranger's code prints is not part of our report, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            made = getattr(importlib.import_module(module_name), name)
        except (Exception, SystemExit) as error:  # a stranger's module may raise anything
            raise CannotRun(f"{target} cannot be imported: {_said(error)}") from None
        finally:
            sys.path.pop(0)
        try:
            model = made if isinstance(made, nn.Module) else made()
        except (Exception, SystemExit) as error:  # and so may its function
            raise CannotRun(f"{target} fails: {_said(error)}") from None
        if not isinstance(model, nn.Module):
            raise CannotRun(f"{target} returns {type(model).__name__}, not a torch.nn.Module")
        step("running the norms")
        surveyed = _surveyed(model, target)
        found = Found(target, notes=_aside(surveyed.aside))
        config: Any = getattr(model, "config", None)
        configured = building.eps_values(config.to_dict()) if hasattr(config, "to_dict") else {}
    found.warnings += [f"{key}: {problem}" for key, eps in configured.items() if (problem := eps_problem(eps))]
    strict = not type(model).__module__.startswith("transformers.")
    norms = models.with_eps_of([n.norm for n in surveyed.norms], configured, surveyed.eps, strict)
    found.norms = [(norm, n.stored) for norm, n in zip(norms, surveyed.norms, strict=True)]
    return found


def _said(error: BaseException) -> str:
    """What an exception says, in one line, and where in other people's code."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text
