"""Runs a module on tensors of our choosing, without touching it."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

COMPUTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class NotRMSNorm(Exception):
    """Why a module is left alone.

    Args:
        reason: in words, after the module's name.
        normalises: whether it is a norm of another kind, which a report mentions.
        convention: what it computes now, where it is known and only cannot be relied on.
    """

    def __init__(self, reason: str, normalises: bool = False, convention: Any = None) -> None:
        super().__init__(reason)
        self.normalises, self.convention = normalises, convention


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
    for name, t in {**own, **vars(module)}.items():
        if isinstance(t, Tensor) and type(t).__name__ == "FakeTensor":
            return NotRMSNorm(f"its {name} is a fake tensor: patch a model with values, or on the meta device")
        if type(t) in (Tensor, nn.Parameter) and is_freed(t):
            return NotRMSNorm(f"its {name} has no memory, its storage was freed: patch before the model is sharded", True)
    if any(t is not None and is_lazy(t) for t in own.values()):
        return NotRMSNorm("its tensors have no shape yet: run the model once before")
    for name, t in own.items():
        if t is not None and t.is_floating_point() and t.dtype not in COMPUTED:
            return NotRMSNorm(f"its {name} is {str(t.dtype).removeprefix('torch.')}: nothing is proved in that")
    if any(True for child in module.children() for _ in (*child.parameters(), *child.buffers())):
        return NotRMSNorm("it has submodules with parameters of their own")
    return None


def is_freed(t: Tensor) -> bool:
    """Whether its storage was given back, as sharding and offloading do between calls."""
    return t.numel() > 0 and not t.is_meta and t.layout == torch.strided and t.untyped_storage().nbytes() == 0


class Specimen:
    """A stand-in for a module: its class and attributes, with other tensors, without its hooks.

    The class's own `forward` is called, on a copy: no hook fires, no counter counts, no parameter changes.
    """

    def __init__(self, module: nn.Module, cls: type[nn.Module] | None = None) -> None:
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
        self._module, self._class = module, cls
        on = next((t.device for t in own.values()), torch.device("cpu"))
        self.device = torch.device("cpu") if on.type == "meta" else on
        self.inputs = self.input_names(cls)

    @staticmethod
    def input_names(cls: type[nn.Module]) -> list[str]:
        """The parameters of forward that a caller fills by position; a gate is the second."""
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
        return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]

    def has(self, name: str) -> bool:
        """Whether the module has an attribute of that name."""
        return hasattr(self._module, name)

    def attribute(self, name: str) -> Any:
        """An attribute of the module, or None."""
        return getattr(self._module, name, None)

    def numbers(self) -> dict[str, float]:
        """The numbers among its attributes: one of them is likely its eps."""
        return {name: float(value) for name, value in vars(self._module).items() if type(value) in (int, float)}

    def run(
        self, *inputs: Tensor, tensors: Mapping[str, Tensor] | None = None, training: bool = False, grad: bool = False
    ) -> Tensor:
        """The module's result, with `tensors` for some of its own and the others in the first input's dtype."""
        devices = [self.device] if self.device.type == "cuda" else []
        # Copies, because it may write to them.
        values = {name: t.detach().to(inputs[0].dtype, copy=True) for name, t in self.tensors.items()}
        values |= {name: t.detach().clone() for name, t in self.constants.items() if name not in values}
        clone = _clone(self._module, self._class, {**values, **(tensors or {})}, training)
        before, written = dict(vars(clone)), _versions(clone)
        versions = [t._version for t in inputs]
        with (
            torch.random.fork_rng(devices),
            torch.set_grad_enabled(grad),
            torch.autocast(self.device.type, enabled=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                y = self._class.forward(clone, *inputs)
            except Exception as error:  # a stranger's code may raise anything
                shape = "x".join(map(str, inputs[0].shape))
                message = str(error).strip().partition("\n")[0]
                raise NotRMSNorm(f"it does not run on an input of {shape}: {type(error).__name__}: {message}") from None
        if not isinstance(y, Tensor):
            raise NotRMSNorm(f"it returns {type(y).__name__}, not a tensor")
        if y.shape != inputs[0].shape or not y.is_floating_point():
            raise NotRMSNorm("its result has another shape or kind than its input")
        if versions != [t._version for t in inputs]:
            raise NotRMSNorm("it writes to its input", True)
        changed = [name for name, value in vars(clone).items() if before.get(name) is not value]
        changed += [name for name, at in _versions(clone).items() if written.get(name) != at]
        if changed:
            raise NotRMSNorm(f"it changes its {changed[0]} as it runs", True)
        return y


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensors a module has, and how often each was written to."""
    own = {**vars(module), **module._parameters, **module._buffers}
    return {name: (id(t), t._version) for name, t in own.items() if isinstance(t, Tensor)}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, new tensors are what a probe expects them to be, whatever the caller has set."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # Every call of torch pays for a device that is set, so it is only where it must be.
        cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        with torch.inference_mode(False), cpu:
            yield
    finally:
        torch.set_default_dtype(dtype)


def _clone(module: nn.Module, cls: type[nn.Module], tensors: Mapping[str, Tensor], training: bool) -> nn.Module:
    clone = object.__new__(cls)  # some classes, FSDP's for one, build a whole module in their own
    state: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, (dict, list, set)):
            value = OrderedDict() if name.endswith(("_hooks", "_hooks_with_kwargs")) else value.copy()
        state[name] = tensors.get(name, value)
    for kind in ("_parameters", "_buffers"):
        state[kind] = {name: tensors.get(name, t) for name, t in state[kind].items()}
    state["_modules"] = {
        name: child if child is None else _clone(child, type(child), {}, training)
        for name, child in module._modules.items()
    }
    state["training"] = training
    clone.__dict__.update(state)
    return clone
