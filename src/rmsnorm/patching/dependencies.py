"""What a module's forward depends on beside its inputs: which names its code reads, and where they lead.

Names come from two sides: what a run of forward reads of `self` (`recording`), and what its code names, branches
included that no run took (`named_by`). A name is looked for in the instance, in the classes along the MRO, and, for
code, in its globals and closures.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rmsnorm.patching.specimen import NotRMSNorm

ABSENT = type(
    "Absent", (), {"__repr__": lambda self: "absent", "__reduce__": lambda self: "ABSENT", "__module__": __name__}
)()
"""The value of a name that is nowhere."""

# What every module has in its instance; both modes of training are proved, and tensors are probed.
INTERNAL = frozenset(vars(nn.Module()))
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.layout)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_CONTAINERS = (tuple, list, set, frozenset, torch.Size)
# Code of these is taken to stay what it is.
_FOUNDATIONS = {"torch", "numpy", *sys.stdlib_module_names}
_LARGEST_CONTAINER = 64
_MOST_FUNCTIONS = 200


class _Globals:
    """The globals of code that belongs to no module."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def recording(cls: type[nn.Module], reads: set[str]) -> type[nn.Module]:
    """A subclass whose forward adds to `reads` every name that it looks up in self."""
    running: list[bool] = []

    def __getattribute__(self: nn.Module, name: str) -> Any:  # noqa: N807 - a method of the class below
        if running:
            reads.add(name)
        return super(made, self).__getattribute__(name)

    def __getattr__(self: nn.Module, name: str) -> Any:  # noqa: N807 - a method of the class below
        # PyTorch's looks into `__dict__` on its way, which is not the module's own interest in all of its attributes.
        known = "__dict__" in reads or cls.__getattr__ is not nn.Module.__getattr__
        try:
            return cls.__getattr__(self, name)
        finally:
            if not known:
                reads.discard("__dict__")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running.append(True)
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            running.pop()

    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__getattribute__": __getattribute__,
        "__getattr__": __getattr__,
        "forward": functools.wraps(cls.forward)(forward),
    }
    made = subclass(cls, body)
    return made


class _Quiet(nn.Module):
    """Ends what classes do when they are subclassed: registries keep the class that its author wrote."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def subclass(cls: type[nn.Module], body: dict[str, Any]) -> type[nn.Module]:
    """A subclass of a stranger's class that its author's code does not notice: neither metaclass nor registry runs."""
    return type.__new__(type(cls), cls.__name__, (_Quiet, cls), body)


def lineage(cls: type) -> tuple[type, ...]:
    """The classes along the MRO that are somebody's own."""
    return tuple(c for c in cls.__mro__ if c not in nn.Module.__mro__ and c is not _Quiet)


def plain(value: Any, depth: int = 3) -> bool:
    """Whether a value cannot change but by being replaced, or is a small container that can be compared as a whole."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, (enum.Enum, *_CODE)):
        return True
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and getattr(value, "shape", None) == ():
        return True
    if kind in _CONTAINERS and depth:
        return len(value) <= _LARGEST_CONTAINER and all(plain(v, depth - 1) for v in value)
    if kind in (dict, OrderedDict) and depth:
        return len(value) <= _LARGEST_CONTAINER and all(plain(v, depth - 1) for pair in value.items() for v in pair)
    if kind is functools.partial:
        return plain(value.func) and plain(value.args) and plain(value.keywords)
    if kind is types.MethodType:
        return isinstance(value.__self__, type)
    return _package(kind) in ("torch", "triton") and not isinstance(value, nn.Module)


def named_by(code: types.CodeType) -> Iterator[str]:
    """Every name that code may look up in something, as an attribute, a global, or text given to getattr."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from named_by(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


class Surroundings:
    """What the code of a class depends on outside its instances.

    Args:
        cls: the class; its forward is where the code begins.
        reads: names that a run of it read of self.

    Attributes:
        names: all names that may be read of an instance.
        absent: those that were read and are in none of its classes.
        entries: owner, name, and the value that was found.
    """

    def __init__(self, cls: type[nn.Module], reads: frozenset[str]) -> None:
        self._cls = cls
        self._lineage = lineage(cls)
        self.names = {"forward", "__getattr__", "__getattribute__", *reads} - {"__dict__", "__class__"}
        self.absent = frozenset(name for name in reads if not any(name in vars(c) for c in cls.__mro__))
        self.entries: list[tuple[Any, str, Any]] = []
        self._met: set[tuple[int, str]] = set()
        self._seen: set[int] = set()
        looked: set[str] = set()
        while self.names - looked:
            for name in sorted(self.names - looked):
                looked.add(name)
                owners = [c for c in self._lineage if name in vars(c)]
                for owner in owners:
                    # Through the class itself, whatever comes before the owner later.
                    self._meet(cls if owner is owners[0] else owner, name, vars(owner)[name])

    def _meet(self, owner: Any, name: str, value: Any) -> None:
        """Note one entry, and follow its code."""
        found = getattr(owner, name, ABSENT)
        if not self._note(owner, name, found):
            return
        if not self._follow(value) and not isinstance(value, torch.Tensor) and not plain(found):
            raise depends_on_object(name, value)
        if isinstance(value, torch.Tensor):
            raise NotRMSNorm(f"its result may depend on {name}, a tensor outside of it", True)

    def _note(self, owner: Any, name: str, value: Any) -> bool:
        """Add an entry; whether it is new. Of what may be written to, the contents are kept."""
        new = (id(owner), name) not in self._met
        if new:
            self._met.add((id(owner), name))
            written = type(value) in (list, set, dict, OrderedDict, tuple)
            self.entries.append((owner, name, copy.deepcopy(value) if written else value))
        return new

    def _follow(self, value: Any) -> bool:
        """Follow the code in a value; whether it is code."""
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            return self._follow(value.__func__)
        if isinstance(value, property):
            return all(f is None or self._follow(f) for f in (value.fget,))
        if isinstance(value, functools.cached_property):
            return self._follow(value.func)
        if isinstance(value, functools.partial):
            return plain(value) and self._follow(value.func)
        if isinstance(value, types.FunctionType):
            # A class's own methods are followed wherever they are; what they call, within their own package.
            self._function(value)
        return isinstance(value, _CODE)

    def _function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        if len(self._seen) >= _MOST_FUNCTIONS:
            raise NotRMSNorm("its forward calls more code than can be watched", True)
        self._seen.add(id(function))
        names = set(named_by(function.__code__))
        self.names |= names
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if value not in self._lineage if isinstance(value, type) else True:
                self._outside(cell, "cell_contents", value, names)
        known = function.__globals__
        module = sys.modules.get(known.get("__name__", ""))
        owner: Any = module if module is not None and vars(module) is known else _Globals(known)
        for name in sorted(names & known.keys()):
            self._outside(owner, name, known[name], names)

    def _outside(self, owner: Any, name: str, value: Any, names: set[str]) -> None:
        """What code reads outside its class: a value, a function, a class, or a module and what it reads of that."""
        if isinstance(value, types.ModuleType):
            if _is_foundation(value.__name__) or id(value) in self._seen:
                return
            self._seen.add(id(value))
            for inner in sorted(names & vars(value).keys()):
                self._outside(value, inner, vars(value)[inner], names)
            return
        if _is_foundation(_package(self._cls)) and not isinstance(owner, types.CellType):
            return
        if isinstance(value, type) and value not in self._lineage and not _is_foundation(value.__module__):
            for inner in sorted(names & vars(value).keys()):
                self._outside(value, inner, vars(value)[inner], names)
        # What other packages offer to call is theirs; that it is still the same is enough.
        maker = value if isinstance(value, types.FunctionType) else type(value)
        followed = (type, nn.Module, types.BuiltinFunctionType, functools.partial, types.MethodType)
        if callable(value) and not isinstance(value, followed) and _package(maker) != _package(self._cls):
            self._note(owner, name, value)
            return
        if isinstance(value, dict) and all(map(_is_code, dict.values(value))):
            self._note(owner, name, value)  # a registry
            return
        if value is ABSENT or (isinstance(value, type) and _is_foundation(value.__module__)):
            return
        self._meet(owner, name, value)


def depends_on_object(name: str, value: object) -> NotRMSNorm:
    """That a result may depend on something that changes without being replaced."""
    return NotRMSNorm(f"its result may depend on {name}, a {type(value).__name__}, which can change unseen", True)


def _is_code(value: Any) -> bool:
    return isinstance(value, _CODE) or (type(value) is tuple and bool(value) and _is_code(value[0]) and plain(value))


def _package(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _is_foundation(name: str) -> bool:
    return name.partition(".")[0] in _FOUNDATIONS and name != "__main__"
