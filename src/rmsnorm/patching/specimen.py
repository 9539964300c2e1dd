"""Runs a module on tensors of our choosing, without touching it."""

from __future__ import annotations

import contextvars
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rmsnorm.patching.outward import no_outward_calls
from rmsnorm.patching.reason import NotRMSNorm as NotRMSNorm
from rmsnorm.patching.state import Snapshot
from rmsnorm.patching.surroundings import random_state

COMPUTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def require_module(name: str, module: nn.Module) -> None:
    """Raise TypeError if it is anything else."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {type(module).__name__}")


def unfit(module: nn.Module) -> NotRMSNorm | None:
    """Why a module cannot be run as a specimen, if so."""
    own = {**module._parameters, **module._buffers}
    parametrized = getattr(module, "parametrizations", None)
    if isinstance(module, torch.jit.ScriptModule):
        return NotRMSNorm("it is compiled by TorchScript: patch before")
    if "forward" in vars(module):
        return NotRMSNorm("its forward was replaced on the instance, as accelerate's hooks do: patch before")
    if isinstance(parametrized, nn.ModuleDict):
        return NotRMSNorm(f"its {', '.join(parametrized)} is parametrized: patch before, or remove that")
    for inside in module.modules():
        for name, t in {**inside._parameters, **inside._buffers, **vars(inside)}.items():
            if isinstance(t, Tensor) and type(t).__name__ == "FakeTensor":
                return NotRMSNorm(f"its {name} is a fake tensor: patch a model with values, or on the meta device")
            if type(t) in (Tensor, nn.Parameter) and is_freed(t):
                reason = f"its {name} has no memory, its storage was freed: patch before the model is sharded"
                return NotRMSNorm(reason, inside is module)
    if any(t is not None and is_lazy(t) for t in own.values()):
        return NotRMSNorm("its tensors have no shape yet: run the model once before")
    for name, t in own.items():
        if t is not None and t.is_floating_point() and t.dtype not in COMPUTED:
            return NotRMSNorm(f"its {name} is {str(t.dtype).removeprefix('torch.')}: nothing is proved in that")
    if any(True for child in module.children() for _ in (*child.parameters(), *child.buffers())):
        return NotRMSNorm("it has submodules with parameters of their own")
    if hooked := next((name for name, child in module.named_modules() if name and _has_hooks(child)), None):
        return NotRMSNorm(f"a hook of its {hooked} would fire no more", True)
    if iterator := _iterator(module):
        return NotRMSNorm(f"its {iterator} is used up by reading it")
    return None


def is_freed(t: Tensor) -> bool:
    """Whether its storage was given back, as sharding and offloading do between calls."""
    return t.numel() > 0 and not t.is_meta and t.layout == torch.strided and t.untyped_storage().nbytes() == 0


class Specimen:
    """A stand-in for a module: its class and attributes, with other tensors, without its hooks.

    The class's own `forward` is called, on a copy: no hook fires, no counter counts, no parameter changes.
    """

    def __init__(
        self, module: nn.Module, cls: type[nn.Module] | None = None, running: type[nn.Module] | None = None
    ) -> None:
        if reason := unfit(module):
            raise reason
        cls = cls or type(module)
        own = {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
        self.tensors = {name: t for name, t in own.items() if t.is_floating_point()}
        self.attributes = {name: t for name, t in vars(module).items() if isinstance(t, Tensor)}
        # What a probe does not choose the values of: single numbers, integers, tensors that are only attributes.
        self.constants = {name: t for name, t in own.items() if not t.is_floating_point() or t.numel() == 1}
        self.constants |= self.attributes
        self.learned = [name for name in self.constants if name in module._parameters]
        self.scalars: list[str] = []  # constants that take part in the result, once that is known
        self.unknown = [name for name, t in self.constants.items() if t.is_meta]
        for name in self.unknown:
            self.constants[name] = torch.ones_like(self.constants[name], device="cpu")
            if name in self.tensors:
                self.tensors[name] = self.constants[name] * 1e-3
        self._instead: dict[str, Any] = {}
        self._module, self._class, self._running = module, cls, running or cls
        on = next((t.device for t in own.values()), torch.device("cpu"))
        self.device = torch.device("cpu") if on.type == "meta" else on
        self.inputs = self.input_names(cls)

    @staticmethod
    def input_names(cls: type[nn.Module]) -> list[str]:
        """The parameters of forward that a caller fills by position; a gate is the second."""
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        more = [f"*{p.name}" for p in parameters if p.kind == p.VAR_POSITIONAL]
        return names + (more * 2)[: 2 - len(names)] if more and len(names) < 2 else names

    def has(self, name: str) -> bool:
        """Whether the module has an attribute of that name."""
        return hasattr(self._module, name)

    def own_shape(self, name: str) -> torch.Size:
        """Of a tensor of the module."""
        return self.tensors[name].shape

    def attribute(self, name: str) -> Any:
        """An attribute of the module, or None."""
        return getattr(self._module, name, None)

    def numbers(self) -> dict[str, float]:
        """The numbers among its attributes: one of them is likely its eps."""
        return {name: float(value) for name, value in vars(self._module).items() if type(value) in (int, float)}

    def sizes(self) -> list[int]:
        """The whole numbers among its attributes: one of them is likely its width."""
        values = [value[-1] if isinstance(value, (tuple, list)) and value else value for value in self._values()]
        return list(dict.fromkeys(value for value in values if type(value) is int))

    def _values(self) -> Iterator[Any]:
        yield from vars(self._module).values()
        for cls in self._class.__mro__[: self._class.__mro__.index(nn.Module)]:
            yield from vars(cls).values()

    @contextmanager
    def narrowed(self, width: int, to: int) -> Iterator[None]:
        """Inside, the module is a sibling: its tensors and numbers of a width have another, smaller one."""
        tensors = dict(self.tensors)
        for name, t in tensors.items():
            if width in t.shape:
                self.tensors[name] = t.narrow(list(t.shape).index(width), 0, to)
        for name, value in vars(self._module).items():
            if type(value) is int and value == width:
                self._instead[name] = to
            elif isinstance(value, (tuple, list)) and list(value) == [width]:
                self._instead[name] = type(value)([to])
        try:
            yield
        finally:
            self.tensors, self._instead = tensors, {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Inside, runs may write to what the module refers to: afterwards it is as it was, and the writing a reason.

        Raises:
            NotRMSNorm: something was written, or drawn at random.
        """
        snapshot = Snapshot(self._module, self._class)
        state = random_state()
        changed: str | None = None
        try:
            yield
            if random_state() != state:
                raise NotRMSNorm("it draws random numbers", True)
        finally:
            changed = snapshot.restore()
        if changed is not None:
            raise NotRMSNorm(f"it changes its {changed} as it runs", True)

    def run(
        self, *inputs: Tensor, tensors: Mapping[str, Tensor] | None = None, training: bool = False, grad: bool = False
    ) -> Tensor:
        """The module's result, with `tensors` for some of its own and the others in the first input's dtype."""
        # Copies, because it may write to them.
        values = {name: t.detach().to(inputs[0].dtype, copy=True) for name, t in self.tensors.items()}
        values |= {name: t.detach().clone() for name, t in self.constants.items() if name not in values}
        values |= tensors or {}
        clone = _clone(self._module, self._running, {**values, **self._instead}, training)
        before, written = _variables(clone), _versions(clone)
        given = [*inputs, *values.values()]
        pristine = [t.detach().clone() for t in given]
        versions = [t._version for t in inputs]
        variables, context = dict(contextvars.copy_context()), contextvars.copy_context()
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with no_outward_calls():
                    y = context.run(self._running.forward, clone, *inputs)
            except NotRMSNorm:
                raise
            except Exception as error:  # a stranger's code may raise anything
                shape = "x".join(map(str, inputs[0].shape))
                message = str(error).strip().partition("\n")[0]
                raise NotRMSNorm(f"it does not run on an input of {shape}: {type(error).__name__}: {message}") from None
        if not isinstance(y, Tensor):
            raise NotRMSNorm(f"it returns {type(y).__name__}, not a tensor")
        if type(y) is not Tensor or vars(y) or any(map(vars, inputs)):
            raise NotRMSNorm("it gives its input or result a class or attributes", True)
        if any(variables.get(variable, variables) is not value for variable, value in context.items()):
            raise NotRMSNorm("it sets a context variable", True)
        if y.shape != inputs[0].shape or not y.is_floating_point():
            raise NotRMSNorm("its result has another shape or kind than its input")
        changed = [name for name, value in _variables(clone).items() if before.get(name) is not value]
        changed += [name for name, at in _versions(clone).items() if written.get(name) != at]
        if changed:
            raise NotRMSNorm(f"it changes its {changed[0]} as it runs", True)
        if versions != [t._version for t in inputs]:
            raise NotRMSNorm("it writes to its input", True)
        # A write through `.data` is counted nowhere.
        for name, now, was in zip([*("input" for _ in inputs), *values], given, pristine, strict=True):
            if not _equal(now.detach(), was):
                raise NotRMSNorm(f"it writes to its {name}", True)
        return y


def _iterator(module: nn.Module) -> str | None:
    """The name of an attribute that is used up by reading it, such as a generator or an open file."""
    return next((name for name, v in vars(module).items() if hasattr(type(v), "__next__")), None)


def _equal(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b):
        return True
    return a.shape == b.shape and a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _variables(module: nn.Module) -> dict[str, Any]:
    """What it and its children have for attributes."""
    own = dict(object.__getattribute__(module, "__dict__"))
    for name, child in own["_modules"].items():
        if child is not None:
            own |= {f"{name}.{key}": value for key, value in _variables(child).items()}
    return own


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensors a module has, and how often each was written to."""
    variables = object.__getattribute__(module, "__dict__")
    own = {**variables, **variables["_parameters"], **variables["_buffers"]}
    return {name: (id(t), t._version) for name, t in own.items() if isinstance(t, Tensor)}


def _has_hooks(module: nn.Module) -> bool:
    return any(hooks for name, hooks in vars(module).items() if name in _HOOKS_OF_CALLS)


_HOOKS_OF_CALLS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _clone(module: nn.Module, cls: type[nn.Module], instead: Mapping[str, Any], training: bool) -> nn.Module:
    clone = object.__new__(cls)  # some classes, FSDP's for one, build a whole module in their own
    state: dict[str, Any] = {}
    for name, value in vars(module).items():
        hooks = name.endswith(("_hooks", "_hooks_with_kwargs")) and isinstance(value, dict)
        state[name] = instead.get(name, OrderedDict() if hooks else value)
    for kind in ("_parameters", "_buffers"):
        state[kind] = {name: instead.get(name, t) for name, t in state[kind].items()}
    state["_modules"] = {
        name: child if child is None else _clone(child, type(child), {}, training)
        for name, child in module._modules.items()
    }
    state["training"] = training
    object.__getattribute__(clone, "__dict__").update(state)
    return clone
