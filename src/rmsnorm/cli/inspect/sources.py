"""From a target to its norms: their conventions where there is code to run, their weights where there are any."""

from __future__ import annotations

import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.cli.inspect.findings import Norm
from rmsnorm.cli.inspect.tensors import GGUF_EPS, read_gguf, read_safetensors
from rmsnorm.cli.requirements import CannotRun, is_installed
from rmsnorm.patching.convention import Convention
from rmsnorm.patching.survey import survey

# What configurations call the eps of their RMSNorms.
_EPS_NAMES = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "layernorm_epsilon")
_ALLOWED = "a checkpoint folder, a .safetensors or .gguf file, a config.json, or module:callable"


@dataclass(frozen=True)
class Found:
    """The norms of a target with their weights, and every eps that its configuration names."""

    source: str
    norms: list[tuple[Norm, Tensor | None]]
    eps_of_config: list[float]
    notes: list[str]


def read(target: str, step: Callable[[str], None]) -> Found:
    """Whatever the target is.

    Raises:
        CannotRun: it is nothing of what is allowed, or cannot be read.
    """
    path = Path(target)
    if path.is_dir():
        return _folder(path, step)
    if path.suffix == ".safetensors" and path.is_file():
        return _files(path, [path], path.with_name("config.json"), step)
    if path.suffix == ".json" and path.is_file():
        return _files(path, [], path, step)
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path, step)
    if ":" in target and not path.exists():
        return _callable(target, step)
    problem = "is no file that can be inspected" if path.exists() else "does not exist"
    raise CannotRun(f"{target} {problem}; TARGET is {_ALLOWED}")


def _folder(path: Path, step: Callable[[str], None]) -> Found:
    weights = sorted(path.glob("*.safetensors"))
    config = path / "config.json"
    if not weights and not config.is_file():
        raise CannotRun(f"{path} has neither config.json nor .safetensors files; TARGET is {_ALLOWED}")
    _check_shards(path, weights)
    return _files(path, weights, config, step)


def _check_shards(path: Path, weights: list[Path]) -> None:
    """All that the index names are there; without an index, as many as their own names say."""
    there = {file.name for file in weights}
    for index in sorted(path.glob("*.safetensors.index.json")):
        named = _json(index).get("weight_map")
        if not isinstance(named, dict):
            raise CannotRun(f"{index} has no weight_map")
        if missing := sorted(set(map(str, named.values())) - there):
            raise CannotRun(f"{path} is not complete: {index.name} names {', '.join(missing)}")
    for file in weights:
        if match := re.fullmatch(r"(.*-)(\d+)-of-(\d+)(\..*)", file.name):
            stem, number, count, suffix = match.groups()
            others = (f"{stem}{i:0{len(number)}}-of-{count}{suffix}" for i in range(1, int(count) + 1))
            if missing := [name for name in others if name not in there][:3]:
                raise CannotRun(f"{path} is not complete: {file.name} is there, {missing[0]} is not")


def _files(source: Path, weights: list[Path], config: Path, step: Callable[[str], None]) -> Found:
    step("reading the weights of norms")
    tensors: dict[str, Tensor] = {}
    for file in weights:
        tensors |= read_safetensors(file)
    notes: list[str] = []
    step("building the model without its weights")
    model, eps = None, []
    if not config.is_file():
        notes.append("No config.json beside it: conventions are unknown.")
    else:
        eps = _eps_values(_json(config))
        if is_installed("transformers"):
            model = _model_of(config, notes)
        else:
            notes.append('transformers is not installed: conventions are unknown; try: pip install "rmsnorm[demo]"')
        if not weights:
            notes.append("There are no .safetensors files: weights are unknown.")
    if model is None and not tensors:
        raise CannotRun(f"{source}: {notes[0]}")
    if model is None:
        return Found(str(source), [(_unknown(n, t), t) for n, t in tensors.items()], eps, notes)
    used = [(norm, _weight_named(tensors, key), key) for norm, key, _ in _norms_of(model)]
    if weights and any(t is None and key is not None for _, t, key in used):
        notes.append("Some norms of the model have no weight of their name in the checkpoint.")
    return Found(str(source), [(_sized(norm, t), t) for norm, t, _ in used], eps, notes)


def _sized(norm: Norm, t: Tensor | None) -> Norm:
    if t is None or norm.width in (None, t.numel()):
        return norm
    text = f"the checkpoint's weight has {t.numel()} elements, the model's norm {norm.width}"
    return replace(norm, warnings=[*norm.warnings, text])


def _gguf(path: Path, step: Callable[[str], None]) -> Found:
    step("reading the weights of norms")
    tensors, fields = read_gguf(path)
    step("reading the configuration")
    eps = [value for key, value in fields.items() if key.endswith(GGUF_EPS)]
    norms: list[tuple[Norm, Tensor | None]] = []
    for name, t in tensors.items():
        norms.append((Norm(name, t.numel(), None, eps[0] if eps else None, 0.0), t))
    # llama.cpp adds the one of Gemma and its like while converting.
    notes = [f"Architecture {fields.get('general.architecture', 'unknown')}; GGUF stores gains, offsets folded in."]
    return Found(str(path), norms, eps, notes)


def _callable(target: str, step: Callable[[str], None]) -> Found:
    module_name, _, name = target.partition(":")
    step(f"building {target}")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a stranger's module may raise anything
        raise CannotRun(f"{target} cannot be imported: {_said(error)}") from None
    finally:
        sys.path.pop(0)
    try:
        model = made if isinstance(made, nn.Module) else made()
    except Exception as error:  # and so may its function
        raise CannotRun(f"{target} fails: {_said(error)}") from None
    if not isinstance(model, nn.Module):
        raise CannotRun(f"{target} returns {type(model).__name__}, not a torch.nn.Module")
    step("running the norms")
    config: Any = getattr(model, "config", None)
    eps = _eps_values(config.to_dict()) if hasattr(config, "to_dict") else []
    return Found(target, [(norm, weight) for norm, _, weight in _norms_of(model)], eps, [])


def _said(error: Exception) -> str:
    """What an exception says, in one line, and where in other people's code."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text


def _norms_of(model: nn.Module) -> list[tuple[Norm, str | None, Tensor | None]]:
    """Each norm with the name of its weight in the state dict, and the weight if the model has it."""
    found = []
    for finding in survey(model):
        entry, module, convention = finding.entry, finding.module, finding.entry.convention
        if convention is None:
            continue
        eps = torch.finfo(torch.float32).eps if convention.eps is None else convention.eps
        norm = Norm(
            entry.name or "(the model itself)", convention.width, _words(convention), eps, convention.weight_offset
        )
        key = None if convention.weight is None else f"{entry.name}.{convention.weight}".lstrip(".")
        weight = None if convention.weight is None else getattr(module, convention.weight)
        found.append((norm, key, None if weight is None or weight.is_meta else weight))
    return found


def _words(convention: Convention) -> str:
    """The convention without what other columns say."""
    return ", ".join(part for part in str(convention).split(", ") if not part.startswith(("width", "any width", "eps")))


def _unknown(name: str, t: Tensor) -> Norm:
    return Norm(name, t.numel(), None, None, None)


def _weight_named(tensors: dict[str, Tensor], key: str | None) -> Tensor | None:
    """The tensor of that name, or the only one whose name is a part of it or has it as a part: prefixes come and go."""
    if key is None or key in tensors:
        return None if key is None else tensors[key]
    near = [t for name, t in tensors.items() if name.endswith("." + key) or key.endswith("." + name)]
    return near[0] if len(near) == 1 else None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CannotRun(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CannotRun(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _eps_values(config: dict[str, Any]) -> list[float]:
    """Every eps in a configuration, those of its parts included."""
    found = []
    for name in _EPS_NAMES:
        value = config.get(name)
        if value is None:
            continue
        try:
            found.append(float(value))
        except (TypeError, ValueError):
            raise CannotRun(f"{name} in the configuration must be a number, got {value!r}") from None
    for part in config.values():
        if isinstance(part, dict):
            found += _eps_values(part)
    return list(dict.fromkeys(found))


def _model_of(config_file: Path, notes: list[str]) -> nn.Module | None:
    """The model of a configuration, without memory for its weights; None, with a note, if it cannot be built."""
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        # Code beside the weights is never run; left open, transformers would ask on the terminal.
        config = transformers.AutoConfig.from_pretrained(
            str(config_file), local_files_only=True, trust_remote_code=False
        )
        cls = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
        with torch.device("meta"):
            return cls(config) if cls is not None else transformers.AutoModel.from_config(config)  # type: ignore[no-any-return]
    except Exception as error:  # a model's constructor may raise anything
        first = str(error).strip().partition("\n")[0]
        notes.append(f"transformers does not build this model, conventions are unknown: {first}")
        return None
