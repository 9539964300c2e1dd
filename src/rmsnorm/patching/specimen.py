"""Runs a module on tensors of our choosing, without touching it."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class NotRMSNorm(Exception):
    """Why a module is left alone; `normalises` says whether it is a norm of another kind, which a report mentions."""

    def __init__(self, reason: str, normalises: bool = False) -> None:
        super().__init__(reason)
        self.normalises = normalises


class Specimen:
    """A stand-in for a module: its class and attributes, with other tensors, without its hooks.

    The class's own `forward` is called, on a copy: no hook fires, no counter counts, no parameter changes.
    """

    def __init__(self, module: nn.Module, cls: type[nn.Module] | None = None) -> None:
        cls = cls or type(module)
        if "forward" in vars(module):
            raise NotRMSNorm("its forward was replaced on the instance")
        if any(True for child in module.children() for _ in (*child.parameters(), *child.buffers())):
            raise NotRMSNorm("it has submodules with parameters of their own")
        own = {**module._parameters, **module._buffers}
        self.tensors = {name: t for name, t in own.items() if t is not None and t.is_floating_point()}
        self._module, self._class = module, cls
        on = next((t.device for t in own.values() if t is not None), torch.device("cpu"))
        self.device = torch.device("cpu") if on.type == "meta" else on
        self.inputs = self.input_names(cls)

    @staticmethod
    def input_names(cls: type[nn.Module]) -> list[str]:
        """The parameters of forward that a caller fills by position; a gate is the second."""
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
        return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]

    def attribute(self, name: str) -> Any:
        """An attribute of the module, or None."""
        return getattr(self._module, name, None)

    def numbers(self) -> list[float]:
        """The numbers among its attributes: one of them is likely its eps."""
        return [float(value) for value in vars(self._module).values() if type(value) in (int, float)]

    def run(
        self, *inputs: Tensor, tensors: Mapping[str, Tensor] | None = None, training: bool = False, grad: bool = False
    ) -> Tensor:
        """The module's result, with `tensors` for some of its own and the others in the first input's dtype."""
        values = {name: t.to(inputs[0].dtype) for name, t in self.tensors.items() if name not in (tensors or {})}
        clone = _clone(self._module, self._class, {**values, **(tensors or {})}, training)
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
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
        return y


def _clone(module: nn.Module, cls: type[nn.Module], tensors: Mapping[str, Tensor], training: bool) -> nn.Module:
    clone = cls.__new__(cls)
    state: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, (dict, list, set)):
            value = OrderedDict() if name.endswith(("_hooks", "_hooks_with_kwargs")) else value.copy()
        state[name] = value
    for kind in ("_parameters", "_buffers"):
        state[kind] = {name: tensors.get(name, t) for name, t in state[kind].items()}
    state["_modules"] = {
        name: child if child is None else _clone(child, type(child), {}, training)
        for name, child in module._modules.items()
    }
    state["training"] = training
    clone.__dict__.update(state)
    return clone
