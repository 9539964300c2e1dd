"""What other people call the arguments of a norm, and in which ways a call can be made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

WEIGHTS = ("weight", "w", "gamma", "g", "scale", "gain", "norm_weight", "W")
EPS = ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_eps", "layernorm_epsilon", "rms_norm_eps")
SHAPES = ("normalized_shape", "shape", "dim", "hidden_size", "size")
OFFSETS = ("weight_offset", "offset", "unit_offset", "add_unit_offset", "zero_centered_gamma", "zero_centered_weight")
# These are switches: either an offset of one, or none.
SWITCHES = ("unit_offset", "add_unit_offset", "zero_centered_gamma", "zero_centered_weight")
RESIDUALS = ("residual", "residual_in", "res", "skip")
GATES = ("gate", "z", "gate_states", "gating")
GROUP_SIZES = ("group_size", "norm_group_size", "groupsize")
GROUP_COUNTS = ("num_groups", "n_groups", "ngroups", "groups")
OTHERS = {"residual": RESIDUALS, "gate": GATES}
# silu of this is this, and sigmoid of it is one, in every dtype.
_WIDE_OPEN = 64.0


def signature(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}  # built-in functions and operators have none


def named(parameters: Mapping[str, inspect.Parameter], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in parameters), None)


def may_be_eps(parameters: Mapping[str, inspect.Parameter], index: int) -> bool:
    """Whether what is given at this position may be an eps: it is called so, or has a small default, or none."""
    listed = list(parameters.values())
    if len(listed) <= index or any(p.kind is p.VAR_POSITIONAL for p in listed[: index + 1]):
        return len(listed) <= 1  # nothing is known
    name, default = listed[index].name, listed[index].default
    small = isinstance(default, float) and 0 <= default < 1e-2
    return name in EPS or (name not in (*OFFSETS, *WEIGHTS, *SHAPES) and (small or default is inspect.Parameter.empty))


@dataclass(frozen=True)
class Others:
    """What goes into a call beside x: a residual, a gate.

    Args:
        names: by role, what they are called.
        required: the roles that every call must have.
        gate: how a required gate that is open is undone: "after" where it multiplies the result, "before" where it
            multiplies x, and nothing where it is a sigmoid.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    gate: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, inspect.Parameter]) -> Others:
        """As a signature has them."""
        names = {role: name for role, known in OTHERS.items() if (name := named(parameters, known))}
        required = {role for role, name in names.items() if parameters[name].default is inspect.Parameter.empty}
        return cls(names, frozenset(required))

    def completed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with a residual of zeros or an open gate where one is required and not given."""
        if not self.required:
            return call

        def complete(x: Tensor, **given: Tensor) -> Any:
            given = dict(given)
            if "residual" in self.required:
                given.setdefault(self.names["residual"], torch.zeros_like(x))
            gate = self.names.get("gate", "")
            if "gate" not in self.required or gate in given:
                return call(x, **given)
            opened = torch.full_like(x, _WIDE_OPEN)
            if self.gate == "before":
                return call(x / _WIDE_OPEN, **given, **{gate: opened})
            result = call(x, **given, **{gate: opened})
            return result / _WIDE_OPEN if self.gate == "after" and isinstance(result, Tensor) else result

        return complete

    def measured(self, call: Callable[..., Any], width: int) -> Others:
        """With the kind of a required gate, from what it does to large rows and to tiny ones when it is doubled.

        Raises whatever the call raises.
        """
        if "gate" not in self.required:
            return self
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(6))
        ratios = []
        for scale in (1e3, 1e-15):
            rows = replace(self, required=self.required - {"gate"}).completed(call)
            whole, half = (
                rows(x * scale, **{self.names["gate"]: torch.full_like(x, value)})
                for value in (_WIDE_OPEN, _WIDE_OPEN / 2)
            )
            ratios.append(float((whole.detach().double() / half.detach().double()).median()))
        kinds = {(2.0, 2.0): "after", (1.0, 2.0): "before"}
        return replace(self, gate=kinds.get((round(ratios[0], 2), round(ratios[1], 2)), ""))


@dataclass(frozen=True)
class Style:
    """One way to call: the roles in order, and those that go by keyword.

    Roles: out, x, shape, width, weight, eps, offset, group, residual, gate. `over` says that the result is written over
    x, and the sum over the residual.
    """

    positional: tuple[str, ...]
    keywords: Mapping[str, str]
    over: bool = False

    def roles(self) -> tuple[str, ...]:
        return (*self.positional, *self.keywords)

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What to pass; a keyword whose value is None is left to its default."""
        by_name = {name: values[role] for role, name in self.keywords.items() if values.get(role) is not None}
        positional = [values[role] for role in self.positional]
        while positional and positional[-1] is None:
            positional.pop()
        return positional, by_name

    def __str__(self) -> str:
        return ", ".join([*self.positional, *(f"{name}={role}" for role, name in self.keywords.items())])

    def setting(self, parameters: Mapping[str, inspect.Parameter], role: str, value: Any, width: int) -> Any:
        """An offset, or the size of groups, as what takes it wants it: a switch, a number of groups."""
        name = self.keywords.get(role, "")
        if value is None and name in parameters and parameters[name].default is inspect.Parameter.empty:
            value = {"offset": 0.0, "group": width}[role]
        if value is None:
            return None
        return bool(value) if name in SWITCHES else width // value if name in GROUP_COUNTS else value
