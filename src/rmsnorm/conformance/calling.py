"""How a function, a class or a module is called as an RMSNorm: found from its signature, and by trying."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.conformance.implementation import CannotCheck, Implementation, Raised, checked

# What other people call them.
WEIGHTS = ("weight", "w", "gamma", "g", "scale", "gain", "norm_weight", "W")
EPS = ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_eps", "layernorm_epsilon", "rms_norm_eps")
SHAPES = ("normalized_shape", "shape", "dim", "hidden_size", "size")
OFFSETS = ("weight_offset", "offset", "unit_offset", "add_unit_offset", "zero_centered_gamma", "zero_centered_weight")
# These are switches: either an offset of one, or none.
SWITCHES = ("unit_offset", "add_unit_offset", "zero_centered_gamma", "zero_centered_weight")
_WIDTH = 64
# A result that is this near, relatively, is meant to be an RMSNorm, though it may have faults.
_NEAR = 0.1


@dataclass(frozen=True)
class Style:
    """One way to call: the roles in order, and those that go by keyword. Roles: out, x, shape, weight, eps, offset."""

    positional: tuple[str, ...]
    keywords: Mapping[str, str]

    def roles(self) -> tuple[str, ...]:
        return (*self.positional, *self.keywords)

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What to pass; a keyword whose value is None is left to its default."""
        named = {name: values[role] for role, name in self.keywords.items() if values.get(role) is not None}
        positional = [values[role] for role in self.positional]
        while positional and positional[-1] is None:
            positional.pop()
        return positional, named

    def __str__(self) -> str:
        return ", ".join([*self.positional, *(f"{name}={role}" for role, name in self.keywords.items())])


def understand(target: Any, name: str) -> Implementation:
    """How to call it.

    Raises:
        CannotCheck: no way to call it gave a tensor of the input's shape, and what was tried.
    """
    if isinstance(target, nn.Module):
        return _instance(target, name)
    if not callable(target):
        raise CannotCheck(f"{name} is {type(target).__name__}: neither a function, a class nor a module")
    tried: list[str] = []
    if not inspect.isclass(target):
        found = _best(_functions(target, name), tried)
        if found is not None:
            return found
    found = _best(_classes(target, name), tried)
    if found is not None:
        return found
    raise CannotCheck(f"{name} could not be called as an RMSNorm; tried " + "; ".join(tried))


def _best(candidates: Iterator[Implementation], tried: list[str]) -> Implementation | None:
    """The first whose result is near an RMSNorm's, else the first that runs at all."""
    runs: Implementation | None = None
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, _WIDTH, generator=generator)
    weight = torch.empty(_WIDTH).uniform_(0.5, 2.0, generator=generator)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    for implementation in candidates:
        try:
            got = implementation.norm(
                weight if implementation.has_weight else None, 1e-5 if implementation.takes_eps else None
            )(x.clone())
        except Raised as error:
            tried.append(f"{implementation.calls}: {error}")
            continue
        gains = (weight, weight + 1) if implementation.has_weight else (torch.ones(_WIDTH),)
        if any(bool(((got - y * gain).abs() <= _NEAR * (y * gain).abs().max()).all()) for gain in gains):
            return implementation
        runs = runs or implementation
    return runs


def _signature(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}  # built-in functions and operators have none


def _named(parameters: Mapping[str, inspect.Parameter], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in parameters), None)


def _may_be_eps(parameters: Mapping[str, inspect.Parameter], index: int) -> bool:
    """Whether what is given at this position may be an eps: it is called so, or has a small default, or none."""
    listed = list(parameters.values())
    if len(listed) <= index or any(p.kind is p.VAR_POSITIONAL for p in listed[: index + 1]):
        return len(listed) <= 1  # nothing is known
    name, default = listed[index].name, listed[index].default
    small = isinstance(default, float) and 0 <= default < 1e-2
    return name in EPS or (name not in (*OFFSETS, *WEIGHTS, *SHAPES) and (small or default is inspect.Parameter.empty))


def _functions(function: Callable[..., Any], name: str) -> Iterator[Implementation]:
    parameters = _signature(function)
    offset = _named(parameters, OFFSETS)
    styles = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind in kinds for p in parameters.values()):
        roles = {"shape": SHAPES, "weight": WEIGHTS, "eps": EPS}
        keywords = {role: found for role, names in roles.items() if (found := _named(parameters, names))}
        if keywords:
            styles.append(Style(("x",), keywords))
    eps = _named(parameters, EPS) or "eps"
    if _may_be_eps(parameters, 2):
        styles.append(Style(("x", "weight", "eps"), {}))
    styles += [Style(("x", "weight"), {"eps": eps}), Style(("x", "weight"), {})]
    if _may_be_eps(parameters, 1):
        styles.append(Style(("x", "eps"), {}))
    styles += [
        Style(("x",), {"eps": eps}),
        Style(("x", "shape", "weight", "eps"), {}),
        Style(("out", "x", "weight", "eps"), {}),
        Style(("x",), {}),
    ]
    for style in styles:
        if offset:
            style = replace(style, keywords={**style.keywords, "offset": offset})
        yield _function(function, name, style)


def _function(function: Callable[..., Any], name: str, style: Style) -> Implementation:
    switch = style.keywords.get("offset") in SWITCHES

    def make(
        weight: Tensor | None, eps: float | None, offset: float | None, width: int
    ) -> tuple[Callable[[Tensor], Any], Tensor | None]:
        leaf = None if weight is None else weight.requires_grad_()
        amount: Any = bool(offset) if switch and offset is not None else offset
        values = {"shape": (width,), "weight": leaf, "eps": eps, "offset": amount}

        def call(x: Tensor) -> Any:
            out = torch.empty_like(x) if "out" in style.positional else None
            positional, named = style.arguments({**values, "x": x, "out": out})
            result = function(*positional, **named)
            return out if out is not None else result

        return call, leaf

    return Implementation(
        name,
        make,
        f"{name.rpartition(':')[2]}({style})",
        has_weight="weight" in style.roles(),
        takes_eps="eps" in style.roles(),
        takes_offset="offset" in style.roles(),
        offsets=(1.0,) if switch else (1.0, 0.5),
    )


def _classes(cls: Callable[..., Any], name: str) -> Iterator[Implementation]:
    parameters = _signature(cls)
    offset, eps = _named(parameters, OFFSETS), _named(parameters, EPS)
    styles = [Style(("width",), {"eps": eps or "eps"}), Style(("width",), {}), Style(("shape",), {"eps": eps or "eps"})]
    if _may_be_eps(parameters, 1):
        styles.insert(1, Style(("width", "eps"), {}))
    for style in styles:
        if offset:
            style = replace(style, keywords={**style.keywords, "offset": offset})
        yield _class(cls, name, style)


def _class(cls: Callable[..., Any], name: str, style: Style) -> Implementation:
    switch = style.keywords.get("offset") in SWITCHES

    def build(width: int, eps: float | None, offset: float | None) -> nn.Module:
        amount: Any = bool(offset) if switch and offset is not None else offset
        values = {"width": width, "shape": (width,), "eps": eps, "offset": amount}
        positional, named = style.arguments(values)
        module = cls(*positional, **named)
        if not isinstance(module, nn.Module):
            raise TypeError(f"it made {type(module).__name__}, not a torch.nn.Module")
        return module

    try:
        has_weight = weight_name(build(_WIDTH, None, None), _WIDTH) is not None
    except Exception:  # said when it is run
        has_weight = True

    def make(
        weight: Tensor | None, eps: float | None, offset: float | None, width: int
    ) -> tuple[Callable[[Tensor], Any], Tensor | None]:
        return with_weight(build(width, eps, offset), weight, width)

    return Implementation(
        name,
        make,
        f"{name.rpartition(':')[2]}({style})(x)",
        has_weight=has_weight,
        takes_eps="eps" in style.roles(),
        takes_offset="offset" in style.roles(),
        offsets=(1.0,) if switch else (1.0, 0.5),
    )


def _instance(module: nn.Module, name: str) -> Implementation:
    widths = [t.numel() for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if t.numel() > 1]
    width = widths[0] if widths else None

    def make(
        weight: Tensor | None, eps: float | None, offset: float | None, width: int
    ) -> tuple[Callable[[Tensor], Any], Tensor | None]:
        return with_weight(copy.deepcopy(module), weight, width)

    implementation = Implementation(
        name, make, f"{name.rpartition(':')[2]}(x)", bool(widths), takes_eps=False, width=width
    )
    try:
        checked(implementation.norm(None if width is None else torch.ones(width)).call, torch.ones(2, width or _WIDTH))
    except Raised as error:
        raise CannotCheck(f"{name} could not be called as an RMSNorm; tried {implementation.calls}: {error}") from None
    return implementation


def weight_name(module: nn.Module, width: int) -> str | None:
    """The name of the parameter or buffer that scales: one of the usual names, else the first of the row's size."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    fitting = [name for name, t in own.items() if t is not None and t.numel() == width and t.is_floating_point()]
    return next((name for name in WEIGHTS if name in fitting), fitting[0] if fitting else None)


def with_weight(module: nn.Module, weight: Tensor | None, width: int) -> tuple[Callable[[Tensor], Any], Tensor | None]:
    """A module's call, with this weight in the place of its own and the rest in its dtype and on its device."""
    if weight is None:
        return module, None
    name = weight_name(module, width)
    if name is None:
        raise TypeError(f"it has no parameter or buffer of {width} elements")
    module = module.to(device=weight.device, dtype=weight.dtype)
    own = getattr(module, name)
    leaf = nn.Parameter(weight.view(own.shape))
    (module._buffers if name in module._buffers else module._parameters)[name] = leaf
    return module, leaf
