"""Whether a proof still stands: what a module's result depended on when it was proved is what it is now.

A watch holds for every module of its class whose attributes have the same values, so that one proof serves all layers
of a model, and one class all patched modules of a kind. It is looked at in every call of a patched module, and costs a
few hundred nanoseconds there: names are looked up and compared in C, and no code of the module runs.
"""

from __future__ import annotations

import copy
import hashlib
import types
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.patching.dependencies import (
    ABSENT,
    INTERNAL,
    Surroundings,
    depends_on_object,
    lineage,
    plain,
)
from rmsnorm.patching.specimen import NotRMSNorm

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SLOTS = ("_parameters", "_buffers", "_modules")


class Watch:
    """What the result of a module depends on, its inputs and its tensors aside.

    Args:
        module: the module, as it was proved.
        reads: the names that runs of its forward read of it.
        scalars: the names of its tensors whose one value takes part in the result.

    Raises:
        NotRMSNorm: something in it may change without being replaced, a configuration for instance.
    """

    def __init__(self, module: nn.Module, reads: frozenset[str], scalars: tuple[str, ...] = ()) -> None:
        self.cls = getattr(type(module), "_rmsnorm_original", type(module))
        self.reads = reads
        surroundings = Surroundings(self.cls, reads)
        state = vars(module)
        slots = [state[slot] for slot in _SLOTS]
        values: dict[str, Any] = {}
        wanted = (state.keys() if "__dict__" in reads else surroundings.names & state.keys()) - INTERNAL
        for name in sorted(wanted):
            if isinstance(state[name], Tensor):
                continue
            if not plain(state[name]):
                raise depends_on_object(name, state[name])
            values[name] = copy.deepcopy(state[name])
        # Names of the class would be hidden by one in the instance.
        for name in sorted(reads - state.keys() - INTERNAL - {"__dict__", "__class__"}):
            if not any(name in slot for slot in slots):
                values[name] = ABSENT
        self.values = values
        # A parameter that is not there may come later.
        self.vacant = tuple(
            name
            for name in sorted(surroundings.names)
            if (name in slots[0] or name in slots[1] or values.get(name) is ABSENT)
            and all(slot.get(name) is None for slot in slots)
            and not hasattr(self.cls, name)
        )
        self.scalars = {name: float(getattr(module, name)) for name in scalars}
        self.children = {}
        for name, child in slots[2].items():
            if name in surroundings.names and child is not None:
                if any(vars(child).get(hooks) for hooks in _HOOKS):
                    raise NotRMSNorm(f"there are hooks on its {name}", True)
                self.children[name] = Watch(child, frozenset({"forward"}))
        self._prepare(surroundings)

    def _prepare(self, surroundings: Surroundings) -> None:
        """The lists that calls go through."""
        self._values = tuple(self.values.items())
        self._entries = tuple(surroundings.entries)
        self._names = frozenset(surroundings.names)
        self._absent = surroundings.absent
        self._classes = tuple((vars(c), len(vars(c))) for c in lineage(self.cls))
        self._more = bool(self.vacant or self.children or self.scalars)

    def holds(self, module: nn.Module) -> bool:
        """Whether all of it is as it was, in this module."""
        state = module.__dict__
        for name, value in self._values:
            now = state.get(name, ABSENT)
            if now is not value and not _same(now, value):
                return False
        for owner, name, value in self._entries:
            now = getattr(owner, name, ABSENT)
            if now is not value and not _same(now, value):
                return False
        for names, size in self._classes:
            # Names that the classes did not have are looked for only where they have others.
            if len(names) != size and any(hasattr(self.cls, name) for name in self._absent):
                return False
        return not self._more or self._inside(module)

    def holds_in(self, cls: type, made: type, aside: str | None) -> bool:
        """Whether a further subclass of the patched class says nothing of its own about what is watched.

        Of tensors it may: a parametrisation makes the weight (`aside`) and numbers properties, which are read anew.
        """
        for c in cls.__mro__:
            if c not in made.__mro__:
                for name in c.__dict__:
                    if name in self._names and name != aside and name not in self.scalars:
                        return False
        return True

    def _inside(self, module: nn.Module) -> bool:
        """The same of vacant places, of children and their hooks, and of numbers that it keeps in tensors."""
        for slot in _SLOTS:
            present = module.__dict__[slot]
            if any(present.get(name) is not None for name in self.vacant):
                return False
        for name, watch in self.children.items():
            child = module._modules.get(name)
            if child is None or type(child) is not watch.cls or any(vars(child).get(hooks) for hooks in _HOOKS):
                return False
            if not watch.holds(child):
                return False
        if self.scalars and torch.compiler.is_compiling():
            return False  # a graph has no value to compare
        for name, value in self.scalars.items():
            t = getattr(module, name, None)
            # The value of a tensor elsewhere would have to be waited for.
            if not isinstance(t, Tensor) or t.device.type != "cpu" or t.numel() != 1 or float(t) != value:
                return False
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Watch):
            return NotImplemented
        if self.cls is not other.cls or len(self._entries) != len(other._entries):
            return False
        if any(
            a is not b
            for mine, its in zip(self._entries, other._entries, strict=True)
            for a, b in zip(mine, its, strict=True)
        ):
            return False
        return (
            _same(self._values, other._values)
            and (self.vacant, self.scalars, self.children) == (other.vacant, other.scalars, other.children)
            and self._absent == other._absent
        )

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("cls", "reads", "values", "vacant", "scalars", "children")}
        return {**state, "digest": self._digest()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        digest = state.pop("digest")
        vars(self).update(state)
        try:
            self._prepare(Surroundings(self.cls, self.reads))
            same = self._digest() == digest
        except NotRMSNorm:
            same = False
        if not same:
            # Here the class is another: none of its modules is what was proved.
            self._values, self._entries, self._classes, self._more = (("forward", True),), (), (), False
            self._names = self._absent = frozenset()

    def _digest(self) -> str:
        """Of the code and the values around, the same in every process."""
        parts = sorted(f"{name}={_described(value)}" for _, name, value in self._entries)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _same(now: Any, value: Any) -> bool:
    """Whether a value is another of the same kind that equals it."""
    return type(now) is type(value) and bool(now == value)


def _described(value: Any) -> str:
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        return _described_code(code)
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return name + (repr(value) if _simple(value) else "")


def _described_code(code: types.CodeType) -> str:
    constants = [_described_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _simple(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, bytes, tuple, torch.dtype, type(None)))
