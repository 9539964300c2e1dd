"""How a function, a class or a module is called as an RMSNorm: found from its signature, and by trying."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.conformance.implementation import CannotCheck, Implementation, Raised
from rmsnorm.conformance.modules import weight_name, with_weight
from rmsnorm.conformance.styles import (
    EPS,
    GROUP_COUNTS,
    GROUP_SIZES,
    OFFSETS,
    SHAPES,
    SWITCHES,
    WEIGHTS,
    Others,
    Style,
    may_be_eps,
    named,
    signature,
)

# Of whole blocks, where a result is quantised by blocks.
_WIDTH = 128
# A result that is this near, relatively, is meant to be an RMSNorm, though it may have faults.
_NEAR = 0.1
_TRIED = (torch.float32, torch.bfloat16, torch.float16)


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
    x = torch.randn(5, _WIDTH, generator=generator)
    weight = torch.empty(_WIDTH).uniform_(0.5, 2.0, generator=generator)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    for implementation in candidates:
        try:
            got = _first_result(implementation, x, weight if implementation.has_weight else None)
        except Raised as error:
            tried.append(f"{implementation.calls}: {error}")
            continue
        gains = (weight, weight + 1) if implementation.has_weight else (torch.ones(_WIDTH),)
        found = replace(implementation, quantized=_is_quantized(implementation, x))
        near = _NEAR * (2 if found.quantized else 1)  # powers of two as scales cut off an eighth
        if any(bool(((got - y * gain).abs() <= near * (y * gain).abs().max()).all()) for gain in gains):
            return found
        runs = runs or found
    return runs


def _is_quantized(implementation: Implementation, x: Tensor) -> bool:
    weight = torch.ones(_WIDTH) if implementation.has_weight else None
    for dtype in _TRIED:
        with contextlib.suppress(Raised):
            eps = 1e-5 if implementation.takes_eps else None
            norm = implementation.norm(None if weight is None else weight.to(dtype), eps)
            with torch.no_grad():
                norm.quantized(x.to(dtype, copy=True))
            return True
    return False


def _first_result(implementation: Implementation, x: Tensor, weight: Tensor | None) -> Tensor:
    """Its result in float32, or in 16 bits if it takes nothing else.

    Raises:
        Raised: none comes, and why not in float32.
    """
    first: Raised | None = None
    for dtype in _TRIED:
        try:
            norm = implementation.norm(
                None if weight is None else weight.to(dtype), 1e-5 if implementation.takes_eps else None
            )
            with torch.no_grad():  # a quantised result has no gradient
                return norm(x.to(dtype, copy=True))
        except Raised as error:
            first = first or error
    assert first is not None  # noqa: S101 - there are dtypes
    raise first


def _functions(function: Callable[..., Any], name: str) -> Iterator[Implementation]:
    parameters = signature(function)
    styles = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind in kinds for p in parameters.values()):
        roles = {"shape": SHAPES, "weight": WEIGHTS, "eps": EPS}
        keywords = {role: found for role, names in roles.items() if (found := named(parameters, names))}
        if keywords:
            styles.append(Style(("x",), keywords))
    eps = named(parameters, EPS) or "eps"
    if may_be_eps(parameters, 2):
        styles.append(Style(("x", "weight", "eps"), {}))
    styles += [Style(("x", "weight"), {"eps": eps}), Style(("x", "weight"), {})]
    if may_be_eps(parameters, 1):
        styles.append(Style(("x", "eps"), {}))
    styles += [
        Style(("x",), {"eps": eps}),
        Style(("x", "shape", "weight", "eps"), {}),
        Style(("out", "x", "weight", "eps"), {}),
        Style(("x",), {}),
    ]
    others = Others.of(parameters)
    beside = {**_settings(parameters), **others.names}
    for style in styles:
        style = replace(style, keywords={**style.keywords, **beside})
        yield _function(function, name, style, others)
        if "residual" in others.required:
            yield _function(function, name, replace(style, over=True), others)


def _settings(parameters: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """What an offset and groups are called."""
    known = {"offset": OFFSETS, "group": GROUP_SIZES + GROUP_COUNTS}
    return {role: name for role, names in known.items() if (name := named(parameters, names))}


def _function(
    function: Callable[..., Any], name: str, style: Style, others: Others, group: int | None = None
) -> Implementation:
    parameters = signature(function)
    # What is made here takes a residual and a gate by their roles.
    others = replace(others, names={role: role for role in others.names})

    def bound(
        weight: Tensor | None, eps: float | None, offset: float | None, width: int
    ) -> tuple[Callable[..., Any], Tensor | None]:
        leaf = None if weight is None else weight.requires_grad_()
        fixed = {
            "shape": (width,),
            "weight": leaf,
            "eps": eps,
            "offset": style.setting(parameters, "offset", offset, width),
            "group": style.setting(parameters, "group", group, width),
        }

        def call(x: Tensor, **given: Tensor) -> Any:
            out = torch.empty_like(x) if "out" in style.positional else None
            if style.over:
                x, given = x.clone(), {role: tensor.clone() for role, tensor in given.items()}
            positional, by_name = style.arguments({**fixed, **given, "x": x, "out": out})
            result = function(*positional, **by_name)
            if style.over:
                return (x, given["residual"]) if result is None else result
            return out if out is not None else result

        return call, leaf

    if "gate" in others.required:
        with contextlib.suppress(Exception):  # said when it is run
            others = others.measured(bound(torch.ones(_WIDTH), 1e-5, None, _WIDTH)[0], _WIDTH)

    def make(
        weight: Tensor | None, eps: float | None, offset: float | None, width: int
    ) -> tuple[Callable[..., Any], Tensor | None]:
        call, leaf = bound(weight, eps, offset, width)
        return others.completed(call), leaf

    return Implementation(
        name,
        make,
        f"{name.rpartition(':')[2]}({style}){', which writes over x and residual' if style.over else ''}",
        has_weight="weight" in style.roles(),
        takes_eps="eps" in style.roles(),
        takes_offset="offset" in style.roles(),
        takes=others.names,
        in_place=style.over,
        plain=others.gate != "before",
        grouped=partial(_function, function, name, style, others) if "group" in style.roles() else None,
        offsets=(1.0,) if style.keywords.get("offset") in SWITCHES else (1.0, 0.5),
    )


def _classes(cls: Callable[..., Any], name: str) -> Iterator[Implementation]:
    parameters = signature(cls)
    eps = named(parameters, EPS)
    styles = [Style(("width",), {"eps": eps or "eps"}), Style(("width",), {}), Style(("shape",), {"eps": eps or "eps"})]
    if may_be_eps(parameters, 1):
        styles.insert(1, Style(("width", "eps"), {}))
    for style in styles:
        yield _class(cls, name, replace(style, keywords={**style.keywords, **_settings(parameters)}))


def _class(cls: Callable[..., Any], name: str, style: Style, group: int | None = None) -> Implementation:
    parameters = signature(cls)

    def build(width: int, eps: float | None, offset: float | None) -> nn.Module:
        values = {
            "width": width,
            "shape": (width,),
            "eps": eps,
            "offset": style.setting(parameters, "offset", offset, width),
            "group": style.setting(parameters, "group", group, width),
        }
        positional, by_name = style.arguments(values)
        module = cls(*positional, **by_name)
        if not isinstance(module, nn.Module):
            raise TypeError(f"it made {type(module).__name__}, not a torch.nn.Module")
        return module

    has_weight, others = True, Others()
    with contextlib.suppress(Exception):  # said when it is run
        module = build(_WIDTH, None, None)
        has_weight = weight_name(module, _WIDTH) is not None
        others = Others.of(signature(module.forward))
        others = others.measured(module, _WIDTH)

    def make(
        weight: Tensor | None, eps: float | None, offset: float | None, width: int
    ) -> tuple[Callable[..., Any], Tensor | None]:
        module, leaf = with_weight(build(width, eps, offset), weight, width)
        return others.completed(module), leaf

    return Implementation(
        name,
        make,
        f"{name.rpartition(':')[2]}({style})({', '.join(['x', *(f'{n}={role}' for role, n in others.names.items())])})",
        has_weight=has_weight,
        takes_eps="eps" in style.roles(),
        takes_offset="offset" in style.roles(),
        takes=others.names,
        plain=others.gate != "before",
        grouped=partial(_class, cls, name, style) if "group" in style.roles() else None,
        offsets=(1.0,) if style.keywords.get("offset") in SWITCHES else (1.0, 0.5),
    )


def _instance(module: nn.Module, name: str) -> Implementation:
    widths = [t.numel() for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if t.numel() > 1]
    width = widths[0] if widths else None
    others = Others.of(signature(module.forward))
    with contextlib.suppress(Exception):  # said when it is run
        others = others.measured(module, width or _WIDTH)

    def make(
        weight: Tensor | None, eps: float | None, offset: float | None, width: int
    ) -> tuple[Callable[..., Any], Tensor | None]:
        call, leaf = with_weight(copy.deepcopy(module), weight, width)
        return others.completed(call), leaf

    implementation = Implementation(
        name,
        make,
        f"{name.rpartition(':')[2]}({', '.join(['x', *(f'{n}={role}' for role, n in others.names.items())])})",
        bool(widths),
        takes_eps=False,
        takes=others.names,
        plain=others.gate != "before",
        width=width,
    )
    try:
        implementation.norm(None if width is None else torch.ones(width))(torch.ones(2, width or _WIDTH))
    except Raised as error:
        raise CannotCheck(f"{name} could not be called as an RMSNorm; tried {implementation.calls}: {error}") from None
    return implementation
