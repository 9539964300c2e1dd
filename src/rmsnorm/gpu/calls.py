"""From an operator's arguments to a prepared call: checks, copies where rows cannot be told by two strides, results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from rmsnorm.gpu import backward as backward_launches
from rmsnorm.gpu import call_cache, layout
from rmsnorm.gpu import forward as forward_launch
from rmsnorm.gpu.arguments import (
    TRITON,
    Call,
    adjacent,
    check_backward,
    check_forward,
    check_out,
    in_reach,
    out_is_apart,
)
from rmsnorm.gpu.call_cache import PreparedCall
from rmsnorm.ops import fallback, layouts
from rmsnorm.spec import NormSpec

Tensors = dict[str, Tensor]

_FORWARD = "eps", "weight_offset", "rounding"
_GATED = *_FORWARD, "group_size", "activation", "gate_first"
PARAMETERS: dict[str, tuple[str, ...]] = {
    "forward": ("x", "weight", *_FORWARD),
    "forward_train": ("x", "weight", *_FORWARD),
    "forward_out": ("x", "weight", "eps", "out", "weight_offset", "rounding"),
    "add_forward": ("x", "residual", "weight", *_FORWARD),
    "residual_forward": ("x", "residual", "weight", *_FORWARD, "group_size", "exact_sum", "alpha"),
    "gated_forward": ("x", "gate", "weight", *_GATED),
    "gated_forward_train": ("x", "gate", "weight", *_GATED),
    "gated_forward_out": ("x", "gate", "weight", *_GATED, "out"),
    "backward": ("dy", "x", "rstd", "weight", "weight_offset", "dh", "rebuilt_dtype", "need_dx", "need_dweight"),
    "gated_backward": (
        *("dy", "x", "gate", "rstd", "weight", "dh", "weight_offset", "group_size", "activation", "gate_first"),
        *("need_dx", "need_dgate", "need_dweight"),
    ),
}
_RESULTS: dict[str, tuple[str, ...]] = {
    "forward": ("y",),
    "forward_train": ("y", "rstd"),
    "forward_out": (),
    "add_forward": ("y", "h", "rstd"),
    "residual_forward": ("y", "h", "rstd"),
    "gated_forward": ("y",),
    "gated_forward_train": ("y", "rstd"),
    "gated_forward_out": (),
    "backward": ("dx", "dweight"),
    "gated_backward": ("dx", "dgate", "dweight"),
}
# ---------------------------------------------------------------- forward


def forward_call(name: str, arguments: tuple[Any, ...], spec: NormSpec) -> Any:
    """Calls one of the forward operators."""
    if (prepared := call_cache.lookup(name, arguments)) is not None:
        return prepared(*arguments)
    call = dict(zip(PARAMETERS[name], arguments, strict=True))
    norm_dtype, x_hat = check_forward(call, spec)
    gate_last = call.get("gate") is not None and not spec.gate_first
    y_dtype = call["x"].dtype if gate_last else norm_dtype
    into = "out" in call
    if into:
        check_out(call, y_dtype)
    if not in_reach(call["x"], spec):
        return getattr(fallback, name)(*arguments)

    def planned(tensors: Tensors) -> Tensors:
        x = tensors["x"]
        found = {} if into else {"y": layout.like(x, y_dtype)}
        if "residual" in tensors:
            found["h"] = layout.like(x, tensors["residual"].dtype)
        if "rstd" in _RESULTS[name]:
            groups = x.shape[-1] // (spec.group_size or x.shape[-1])
            found["rstd"] = layout.planned((*x.shape[:-1], groups), torch.float32)
        return found

    place = _Place(call, planned, (("x", "residual", "gate", "out" if into else "y", "h"),))
    steps, (rows,) = [], place.rows
    if rows.number:
        normed = TRITON[norm_dtype] if gate_last and spec.rounding else tl.float32
        tensors = place.tensors
        tensors = {"y": tensors["out"], **tensors} if into else tensors
        launch, names = forward_launch.prepare(rows, tensors, spec, x_hat, normed)
        steps = [(launch, tuple("out" if n == "y" and into else n for n in names))]
    guard = out_is_apart(PARAMETERS[name], call) if into else None
    prepared = PreparedCall(PARAMETERS[name], place.makers(), steps, _RESULTS[name] or ("",), guard)
    # 0.0 and -0.0 are one key, and as alpha they are two norms.
    return place.run(name, prepared, arguments, rows.number > 0 and spec.alpha != 0)


# ---------------------------------------------------------------- backward


def backward_call(name: str, arguments: tuple[Any, ...], spec: NormSpec) -> Any:
    """Calls one of the backward operators."""
    if (prepared := call_cache.lookup(name, arguments)) is not None:
        return prepared(*arguments)
    call = dict(zip(PARAMETERS[name], arguments, strict=True))
    check_backward(call, spec)
    if not in_reach(call["x"], spec):
        return getattr(fallback, name)(*arguments)
    rebuilt_dtype = call.get("rebuilt_dtype")

    def planned(tensors: Tensors) -> Tensors:
        x = tensors["x"]
        found = {} if rebuilt_dtype is None else {"rebuilt": layout.like(x, rebuilt_dtype)}
        if call["need_dx"]:
            found["dx"] = layout.like(x, rebuilt_dtype or x.dtype)
        if call.get("need_dgate"):
            found["dgate"] = layout.like(x, tensors["gate"].dtype)
        if call["need_dweight"]:
            dtype = tensors["weight"].dtype if "weight" in tensors else torch.float32
            found["dweight"] = layout.planned(x.shape[-1:], dtype)
        return found

    x = "x" if rebuilt_dtype is None else "rebuilt"
    place = _Place(call, planned, (("dy", x, "gate", "dh", "dx", "dgate"), ("x", x)))
    rows, rows_of_y = place.rows
    steps, tensors = [], place.tensors
    scratch: Tensors = {}
    if rows.number:
        backward = backward_launches.Backward(rows, {**tensors, "x": tensors[x]}, spec)
        steps = [(launch, tuple(x if n == "x" else n for n in names)) for launch, names in backward.steps()]
        scratch = backward.scratch
        if rebuilt_dtype is not None:
            steps = [backward_launches.rebuild(rows_of_y, tensors, spec.weight_offset), *steps]
    results = tuple(n if n in tensors else "" for n in _RESULTS[name])
    prepared = PreparedCall(PARAMETERS[name], place.makers() | place.makers(scratch), steps, results)
    found = place.run(name, prepared, arguments, rows.number > 0)
    if rows.number == 0 and found[-1] is not None:
        found[-1].zero_()
    return found


# ---------------------------------------------------------------- where the rows are


class _Place:
    """The tensors of a call whose rows two strides can tell; copies, where those that came are others.

    Attributes:
        tensors: arguments by name, and what is planned of results.
        rows: of each of the groups of tensors that were asked for.
    """

    def __init__(self, call: Call, planned: Callable[[Tensors], Tensors], groups: tuple[tuple[str, ...], ...]) -> None:
        self._call, given = call, {name: t for name, t in call.items() if isinstance(t, Tensor)}
        arguments = {name: _readable(name, t) for name, t in given.items()}
        self._planned = planned(arguments)
        found = self._rows_of(arguments, groups)
        if None in found:
            arguments = {name: _contiguous(name, t) for name, t in arguments.items()}
            self._planned = planned(arguments)
            found = self._rows_of(arguments, groups)
        self.rows = [rows for rows in found if rows is not None]
        self._arguments, self.tensors = arguments, arguments | self._planned

    def _rows_of(self, arguments: Tensors, groups: tuple[tuple[str, ...], ...]) -> list[layout.Rows | None]:
        tensors = arguments | self._planned
        return [layout.rows(*(tensors.get(name) for name in names)) for names in groups]

    def makers(self, tensors: Tensors | None = None) -> dict[str, call_cache.Maker]:
        """What makes planned tensors."""
        x = self._arguments["x"]
        return {n: layout.maker(t, x) for n, t in (self._planned if tensors is None else tensors).items()}

    def run(self, name: str, prepared: PreparedCall, arguments: tuple[Any, ...], repeatable: bool) -> Any:
        """The results, laid out as those of the CPU's kernels; stores a call that can be repeated as it is."""
        found = prepared(*(self._arguments.get(n, value) for n, value in self._call.items()))
        if all(t is self._call[n] for n, t in self._arguments.items()):
            if repeatable:
                call_cache.store(name, arguments, prepared)
        elif "out" in self._call:
            if (out := self._call["out"]) is not self._arguments["out"]:
                out.copy_(self._arguments["out"])
        else:
            x = self._call["x"]
            laid_out = [t if t is None or t.shape != x.shape else layouts.laid_out_like(x, t) for t in _tuple(found)]
            found = tuple(laid_out) if isinstance(found, tuple) else laid_out[0]
        return found


def _tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _readable(name: str, t: Tensor) -> Tensor:
    """With adjacent columns; the weight and rstd are vectors without gaps."""
    if name in ("weight", "rstd"):
        return t.contiguous()
    return t if adjacent(t) else t.contiguous()


def _contiguous(name: str, t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format) if name == "out" else t.contiguous()
