"""The RMSNorm classes of other libraries than transformers, out of their own source files.

`make .venv/.wild` puts the libraries into a folder of their own, without what they require: that is a gigabyte, and
their norms use nothing of it but torch. So a file is imported without the `__init__.py` of the packages it is in, and
what it imports that is not installed is a stand-in. diffusers alone has all it requires, from transformers.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import re
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from torch import nn

FOLDER = Path(sys.prefix) / "wild"
WIDTH = 64
_COMPLETE = ("diffusers",)
_ARGUMENTS = {"eps": 1e-6, "norm_eps": 1e-6, "heads": 4, "norm_elementwise_affine": True}


@cache
def norms(package):
    """Every module class with RMS in its name in a package's files, by name; of one name the later file's last."""
    found = {}
    with _complete() if package in _COMPLETE else _alone(package):
        for file in sorted((FOLDER / package).rglob("*.py")):
            names = re.findall(r"^class (\w*(?:RMS|Rms)\w*)\(", file.read_text(), re.MULTILINE)
            if not names:
                continue
            module = importlib.import_module(".".join(file.relative_to(FOLDER).with_suffix("").parts))
            for name in names:
                cls = getattr(module, name)
                if isinstance(cls, type) and issubclass(cls, nn.Module):
                    found[f"{file.stem}.{name}"] = cls
    return found


def build(cls, generator, **arguments):
    """An instance with random weights; what its constructor requires has a value here by its name, or is a width."""
    required = [p for p in inspect.signature(cls.__init__).parameters.values() if p.default is p.empty]
    for p in required[1:]:
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            arguments.setdefault(p.name, _ARGUMENTS.get(p.name, WIDTH))
    module = cls(**arguments)
    with torch.no_grad():
        for t in module.parameters():
            t.copy_(torch.randn(t.shape, generator=generator))
    return module


@contextmanager
def _complete():
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


class _WithoutInit(importlib.abc.MetaPathFinder):
    """Finds the files of one package, whose folders are packages with nothing in their `__init__.py`."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != self.package:
            return None
        file = FOLDER.joinpath(*name.split("."))
        if not file.is_dir():
            return importlib.util.spec_from_file_location(name, file.with_suffix(".py"))
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(file)]
        return spec


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module that nothing else finds."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return mock.MagicMock(__path__=[])

    def exec_module(self, module):
        pass


@contextmanager
def _alone(package):
    """Imports inside are as said above; afterwards no module is left that is half there."""
    first, last = _WithoutInit(package), _StandIns()
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        yield
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(last)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == package or isinstance(module, mock.MagicMock):
                del sys.modules[name]
