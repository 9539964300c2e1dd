"""From what a user types to an implementation: a known name, module:callable, or a .py file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from rmsnorm.conformance import named
from rmsnorm.conformance.calling import understand
from rmsnorm.conformance.implementation import CannotCheck, Implementation, described

_ALLOWED = "a name that --list shows, module:callable, module:Class, or file.py:callable"


def load(target: str) -> Implementation:
    """The implementation of that name.

    Raises:
        CannotCheck: there is none, it cannot be imported, or it cannot be called as an RMSNorm; and why.
    """
    if target in named.NAMES:
        return named.load(target)
    file, colon, name = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    if file.endswith(".py"):
        module = _from_file(Path(file))
        return understand(_attribute(module, name, target) if colon else _only_norm(module, target), target)
    if not colon:
        near = difflib.get_close_matches(target, named.NAMES, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; it must be {_ALLOWED}"
        raise CannotCheck(f"{target!r} is no known RMSNorm{hint}")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(file)
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None and file.startswith(error.name)
        raise CannotCheck(
            f"{file} {'is not installed' if missing else f'raises on import: {described(error)}'}"
        ) from None
    finally:
        sys.path.remove("")
    return understand(_attribute(module, name, target), target)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CannotCheck(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - of a .py file there is one
    module = importlib.util.module_from_spec(spec)
    # Where torch.compile, pickle and dataclasses look for it; and its neighbours can be imported.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CannotCheck(f"{path} raises on import: {described(error)}") from None
    finally:
        sys.path.remove(str(path.parent))
    return module


def _attribute(module: ModuleType, name: str, target: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise CannotCheck(f"{target}: there is no {part!r} in {getattr(found, '__name__', found)}{hint}")
        found = getattr(found, part)
    return found


def _only_norm(module: ModuleType, target: str) -> Any:
    """The one thing in a file that can be a norm: by name, or because there is no other."""
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and callable(value)
    }
    kinds = {n: v for n, v in own.items() if not inspect.isclass(v) or issubclass(v, nn.Module)}
    norms = {name: value for name, value in kinds.items() if "norm" in name.lower() or "rms" in name.lower()} or kinds
    if len(norms) != 1:
        choice = ", ".join(f"{target}:{name}" for name in norms)
        raise CannotCheck(
            f"{target} has {len(norms)} candidates; say which: {choice}" if norms else f"{target} is empty"
        )
    return next(iter(norms.values()))
