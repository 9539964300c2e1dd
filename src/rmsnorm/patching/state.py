"""What a forward may write to besides its result: found, compared, and put back.

From a module lead its attributes, its class, and the functions of its class with what they refer to. A snapshot keeps
the contents of all of them; what compiled extensions keep to themselves is out of reach.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from threading import local
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# Further away from the module than this many objects, nothing is looked at: a module may hold its whole model.
MOST_OBJECTS = 2000
# Tensors beyond are told by their version alone, which writes through `.data` do not count; containers by their length.
LARGEST_COPY = 2**16
# Their functions change nothing of ours, and their own state is large.
_FOREIGN = {"torch", "numpy", "builtins", *sys.stdlib_module_names}
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.Size)
_SIZED = (dict, list, deque, set, bytearray, array)
_MISSING = object()


def _is_foreign(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _FOREIGN and module != "__main__"


class Snapshot:
    """The contents of everything that a module's forward can reach by names."""

    def __init__(self, module: nn.Module, cls: type[nn.Module]) -> None:
        self._kept: list[tuple[str, Callable[[], bool], Callable[[], None]]] = []
        self._seen: dict[int, object] = {}
        self._waiting: deque[tuple[str, Any]] = deque()
        own = {*module._parameters, *module._buffers}
        for name, value in vars(module).items():
            if name not in own and not isinstance(value, Tensor) and name not in _BOOKKEEPING:
                self._waiting.append((name, value))
        for name, child in module._modules.items():
            self._waiting.append((name, child))
        self._waiting.append((f"class {cls.__name__}", cls))
        while self._waiting and len(self._seen) < MOST_OBJECTS:
            name, value = self._waiting.popleft()
            if not issubclass(type(value), _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value  # kept alive: another object at its address would be taken for it
                self._look(name, value)

    def restore(self) -> str | None:
        """Puts back what has changed; returns the name of the first such thing, seen from the module."""
        changed = None
        for name, is_same, put_back in self._kept:
            if not is_same():
                put_back()
                changed = changed or name
        return changed

    def _look(self, name: str, value: Any) -> None:
        kind = type(value)  # an object may say otherwise of itself
        if issubclass(kind, Tensor):
            self._keep_tensor(name, value)
        elif issubclass(kind, _SIZED) and len(value) > LARGEST_COPY:
            self._keep_length(name, value)
        elif issubclass(kind, dict):
            self._keep_dict(name, value)
        elif issubclass(kind, _SIZED):
            self._keep_items(name, value)
        elif issubclass(kind, (tuple, frozenset)):
            self._waiting.extend((name, item) for item in value)
        elif issubclass(kind, type):
            if not _is_foreign(value.__module__):
                self._keep_class(name, value)
        elif issubclass(kind, FunctionType):
            self._keep_function(value)
        elif issubclass(kind, MethodType):
            self._waiting.extend([(name, value.__func__), (name, value.__self__)])
        elif issubclass(kind, (staticmethod, classmethod)):
            self._waiting.append((name, value.__func__))
        elif issubclass(kind, property):
            self._waiting.extend((name, f) for f in (value.fget, value.fset) if f is not None)
        elif not issubclass(kind, (ModuleType, BuiltinFunctionType, CodeType)):
            self._keep_object(name, value)
            self._waiting.append((f"class {kind.__name__}", kind))

    def _keep(self, name: str, is_same: Callable[[], bool], put_back: Callable[[], None]) -> None:
        self._kept.append((name, is_same, put_back))

    def _keep_tensor(self, name: str, t: Tensor) -> None:
        if type(t) not in (Tensor, nn.Parameter) or t.is_meta or t.layout != torch.strided or t.is_inference():
            return
        version, content = t._version, t.detach().clone() if t.numel() <= LARGEST_COPY else None

        def is_same() -> bool:
            return t._version == version and (content is None or _same_bytes(t.detach(), content))

        def put_back() -> None:
            if content is not None and t.shape == content.shape:
                t.detach().copy_(content)

        self._keep(name, is_same, put_back)

    def _keep_length(self, name: str, value: Any) -> None:
        length = len(value)
        self._keep(name, lambda: len(value) == length, lambda: None)

    def _keep_dict(self, name: str, value: dict[Any, Any]) -> None:
        content = dict(dict.items(value))  # not its own, which may do anything

        def put_back() -> None:
            dict.clear(value)
            dict.update(value, content)

        self._keep(name, lambda: _same_variables(dict(dict.items(value)), content), put_back)
        self._waiting.extend((name, item) for item in content.values())

    def _keep_items(self, name: str, value: Any) -> None:
        content = list(value)

        def is_same() -> bool:
            return len(value) == len(content) and all(map(_same, value, content))

        def put_back() -> None:
            value.clear() if hasattr(value, "clear") else value.__delitem__(slice(None))
            value.update(content) if isinstance(value, set) else value.extend(content)

        self._keep(name, is_same, put_back)
        self._waiting.extend((name, item) for item in content)

    def _keep_class(self, name: str, cls: type) -> None:
        content = {key: value for key, value in vars(cls).items() if key not in _OF_CLASSES}
        self._keep_variables(name, cls, content, lambda: {k: v for k, v in vars(cls).items() if k not in _OF_CLASSES})
        self._waiting.extend((name, value) for value in content.values())
        self._waiting.extend((f"class {base.__name__}", base) for base in cls.__bases__)

    def _keep_object(self, name: str, value: Any) -> None:
        get, put = _state_functions(value)
        if get is not None and put is not None:
            state = get()
            self._keep(name, lambda: _same_state(get(), state), lambda: put(state))
        variables = _variables(value)
        if isinstance(value, nn.Module):
            variables = {key: kept for key, kept in variables.items() if key not in _HOOKS}
        content = dict(variables)
        if content or _has_variables(value):
            self._keep_variables(name, value, content, lambda: _without(_variables(value), _HOOKS, value))
            self._waiting.extend((name, item) for item in content.values())

    def _keep_function(self, function: FunctionType) -> None:
        if _is_foreign(function.__module__):
            return
        called = f"{function.__name__}()"
        variables = function.__globals__
        names = set(_names(function.__code__))
        used = {name: variables[name] for name in names if name in variables}
        for name, value in used.items():
            self._keep_variable(f"global {name}", variables, name, value)
            if isinstance(value, ModuleType) and not _is_foreign(value.__name__):
                inside = vars(value)
                for attribute in names & inside.keys():
                    self._keep_variable(f"{name}.{attribute}", inside, attribute, inside[attribute])
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._keep_cell(f"{free} of {called}", cell)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._waiting.append((f"a default of {called}", value))
        self._waiting.append((called, vars(function)))

    def _keep_variable(self, name: str, variables: dict[str, Any], key: str, value: Any) -> None:
        self._keep(name, lambda: _same(variables.get(key, _MISSING), value), lambda: variables.__setitem__(key, value))
        self._waiting.append((name, value))

    def _keep_cell(self, name: str, cell: CellType) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # empty: nothing was assigned yet
            return
        self._keep(name, lambda: _same(cell.cell_contents, content), lambda: setattr(cell, "cell_contents", content))
        self._waiting.append((name, content))

    def _keep_variables(
        self, name: str, owner: Any, content: dict[str, Any], now: Callable[[], dict[str, Any]]
    ) -> None:
        def put_back() -> None:
            current = now()
            for key in current.keys() - content.keys():
                _delete(owner, key)
            for key, value in content.items():
                if not _same(current.get(key, _MISSING), value):
                    _assign(owner, key, value)

        self._keep(name, lambda: _same_variables(now(), content), put_back)


_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs")))
_BOOKKEEPING = _HOOKS | {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl"})


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _variables(value: Any) -> dict[str, Any]:
    """What an object's __dict__ and slots hold."""
    try:
        found = dict(vars(value) if type(value) is local else object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        found = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = vars(cls).get(name)
            if descriptor is not None and hasattr(type(descriptor), "__get__"):
                try:
                    found[name] = descriptor.__get__(value, cls)
                except AttributeError:
                    continue  # a slot without a value
    return found


def _has_variables(value: Any) -> bool:
    if type(value) is local:
        return True
    try:
        return isinstance(object.__getattribute__(value, "__dict__"), dict)
    except (AttributeError, TypeError):
        return False


def _without(variables: dict[str, Any], names: frozenset[str], owner: Any) -> dict[str, Any]:
    return {k: v for k, v in variables.items() if k not in names} if isinstance(owner, nn.Module) else variables


def _assign(owner: Any, key: str, value: Any) -> None:
    if type(owner) is local:
        setattr(owner, key, value)
    elif isinstance(owner, type):
        type.__setattr__(owner, key, value)
    else:
        object.__setattr__(owner, key, value)


def _delete(owner: Any, key: str) -> None:
    if type(owner) is local:
        delattr(owner, key)
    elif isinstance(owner, type):
        type.__delattr__(owner, key)
    else:
        object.__delattr__(owner, key)


def _state_functions(value: Any) -> tuple[Callable[[], Any] | None, Callable[[Any], Any] | None]:
    """How the state of a random generator is read and set."""
    kind = type(value)
    if issubclass(kind, random.Random):
        return value.getstate, value.setstate
    if issubclass(kind, torch.Generator):
        return value.get_state, value.set_state
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.random.Generator):
        value = value.bit_generator
        kind = type(value)
    if numpy is not None and issubclass(kind, numpy.random.BitGenerator):
        return lambda: value.state, lambda state: setattr(value, "state", state)
    if numpy is not None and issubclass(kind, numpy.random.RandomState):
        return value.get_state, value.set_state
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return value.copy, lambda state: numpy.copyto(value, state)
    return None, None


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b) or _same_with_nan(a, b))


def _same_with_nan(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return repr(a) == repr(b) if not hasattr(a, "tobytes") else a.tobytes() == b.tobytes()


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and issubclass(type(a), _ATOMS) and (a == b or a != a))


def _same_variables(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
