"""What the operators' arguments may be: checks that guard memory, as those in csrc/ops do."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from rmsnorm import checks
from rmsnorm.gpu import configurations
from rmsnorm.gpu.launching import target
from rmsnorm.numerics import reference
from rmsnorm.spec import ACTIVATIONS, ROUNDINGS, NormSpec

Call = dict[str, Any]  # an operator's arguments by name

TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _dtypes_of_norms() -> dict[tuple[Any, ...], tuple[torch.dtype, Any]]:
    """For x's dtype, the weight's and the rounding: the norm's dtype, and what x_hat is rounded to."""
    found = {}
    for x, weight, code in product(TRITON, (None, *TRITON), range(len(ROUNDINGS))):
        rounding = ROUNDINGS[code]
        w = None if weight is None else torch.empty(0, dtype=weight)
        x_hat = {"once": torch.float32, "before_scale": x, "weight_dtype": weight or torch.float32}[rounding]
        found[x, weight, code] = reference.result_dtype(x, w, NormSpec(0.0, 0.0, code)), TRITON[x_hat]
    return found


_DTYPES_OF_NORMS = _dtypes_of_norms()


def adjacent(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check(call: Call, spec: NormSpec) -> None:
    """Of every call: x and the weight, and that every tensor has memory."""
    x, weight = call["x"], call["weight"]
    _require(
        x.dtype in TRITON and (weight is None or weight.dtype in TRITON),
        "rmsnorm kernels take float32, bfloat16 and float16",
    )
    _require(x.dim() > 0 and x.shape[-1] > 0, "expected at least one dimension, the last not empty")
    _require(
        weight is None or (weight.shape == x.shape[-1:] and weight.device == x.device),
        "weight must have one element per column, on x's device",
    )
    group_size = spec.group_size
    _require(
        group_size == 0 or (group_size > 0 and x.shape[-1] % group_size == 0), "group_size must divide the columns"
    )
    _require(spec.activation in range(len(ACTIVATIONS)), "unknown activation")
    _require(math.isfinite(spec.weight_offset), "weight_offset must be finite")
    for name in ("residual", "gate", "dy", "dh"):
        if (t := call.get(name)) is not None:
            _require(
                t.shape == x.shape and t.dtype in TRITON and t.device == x.device,
                f"{name} must have x's shape and device, and a dtype that kernels take",
            )
    for name, t in call.items():
        if isinstance(t, Tensor) and t.numel() and not t.data_ptr():
            raise RuntimeError(f"{name} has no memory: its storage was freed")


def check_forward(call: Call, spec: NormSpec) -> tuple[torch.dtype, Any]:
    """The norm's dtype and what x_hat is rounded to, for arguments that fit together."""
    _check(call, spec)
    _require(math.isfinite(spec.eps) and math.isfinite(spec.alpha), "eps and alpha must be finite")
    _require(spec.rounding in range(len(ROUNDINGS)), "unknown rounding")
    x, weight, residual = call["x"], call["weight"], call.get("residual")
    _require(residual is None or "alpha" in call or residual.dtype == x.dtype, "residual must have x's dtype")
    return _DTYPES_OF_NORMS[x.dtype, None if weight is None else weight.dtype, spec.rounding]


def check_backward(call: Call, spec: NormSpec) -> None:
    _check(call, spec)
    x, gate, dh, rstd = call["x"], call.get("gate"), call["dh"], call["rstd"]
    x_dtype = call.get("rebuilt_dtype") or x.dtype
    _require(x_dtype in TRITON, "rmsnorm kernels take float32, bfloat16 and float16")
    _require(dh is None or dh.dtype == x_dtype, "dh must have x's dtype")
    _require(dh is None or gate is None, "there is no gate where there is a residual")
    _require(
        gate is None or spec.gate_first or call["dy"].dtype == x.dtype, "dy must have x's dtype where the gate is last"
    )
    _require(gate is not None or not call.get("need_dgate"), "there is no gate to have a gradient")
    groups = x.shape[-1] // (spec.group_size or x.shape[-1])
    _require(
        rstd.dtype == torch.float32 and rstd.numel() * x.shape[-1] == x.numel() * groups and rstd.device == x.device,
        "rstd must have one float32 per group of a row",
    )


def check_out(call: Call, dtype: torch.dtype) -> None:
    checks.check_out(call["out"], call["x"], call["weight"], dtype)
    if (gate := call.get("gate")) is not None:
        checks.check_apart(call["out"], gate, "gate")
    _require(
        all(adjacent(t) for n, t in call.items() if isinstance(t, Tensor) and n != "weight")
        and (call["weight"] is None or adjacent(call["weight"])),
        "expected adjacent columns",
    )


def out_is_apart(parameters: tuple[str, ...], call: Call) -> Callable[[tuple[Any, ...]], bool]:
    """Whether `out` is x, or begins after, or ends before, every other tensor, for tensors of these shapes."""
    at = {n: i for i, n in enumerate(parameters) if isinstance(call[n], Tensor)}
    bytes_of = {n: _extent(call[n]) for n in at}
    others = [(at[n], bytes_of[n]) for n in at if n != "out"]
    out_at, out_bytes, x_at = at["out"], bytes_of["out"], at["x"]
    like_x = call["out"].stride() == call["x"].stride() and call["out"].dtype == call["x"].dtype

    def apart(arguments: tuple[Any, ...]) -> bool:
        out = arguments[out_at]
        if out.is_inference() and not torch.is_inference_mode_enabled():
            return False  # what is refused is refused again
        begin = out.data_ptr()
        for index, extent in others:
            address = arguments[index].data_ptr()
            if address == begin and index == x_at and like_x:
                continue
            if begin < address + extent and address < begin + out_bytes:
                return False
        return True

    return apart


def _extent(t: Tensor) -> int:
    """Bytes from the first element to past the last."""
    return t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))


def in_reach(x: Tensor, spec: NormSpec) -> bool:
    """Whether there are kernels for x's device, and grids and 32-bit column numbers can count what is in x."""
    width: int = x.shape[-1]
    if width > configurations.MOST_COLS or x.numel() > configurations.MOST_ROWS * (spec.group_size or width):
        return False
    return configurations.supported(target(x.device))
