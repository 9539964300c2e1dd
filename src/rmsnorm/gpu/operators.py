"""The operators `torch.ops.rmsnorm.*` for CUDA and ROCm: from tensors to launches.

The checks here guard memory, as those in csrc/ops/ops.cpp do; the messages a user sees come from functional.py. Memory
comes from PyTorch's allocator, launches go to the current stream of the tensors' device, and nothing waits for either:
calls can be captured in a graph once each of their kernels has been compiled.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from rmsnorm import checks
from rmsnorm.gpu import backward as backward_launches
from rmsnorm.gpu import call_cache, configurations, layout
from rmsnorm.gpu.forward import Normalization
from rmsnorm.gpu.forward import prepare as prepare_forward
from rmsnorm.gpu.launching import target
from rmsnorm.numerics import reference
from rmsnorm.ops import fallback, layouts
from rmsnorm.spec import ROUNDINGS, NormSpec

_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _dtypes_of_results() -> dict[tuple[Any, ...], tuple[torch.dtype, Any]]:
    """For x's dtype, the weight's and the rounding: y's dtype, and what x_hat is rounded to."""
    found = {}
    for x, weight, code in product(_TRITON, (None, *_TRITON), range(len(ROUNDINGS))):
        rounding = ROUNDINGS[code]
        w = None if weight is None else torch.empty(0, dtype=weight)
        x_hat = {"once": torch.float32, "before_scale": x, "weight_dtype": weight or torch.float32}[rounding]
        found[x, weight, code] = reference.result_dtype(x, w, NormSpec(0.0, 0.0, code)), _TRITON[x_hat]
    return found


_RESULTS = _dtypes_of_results()


def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0) -> Tensor:
    return _normalize(x, None, weight, eps, weight_offset, rounding, None, False)[0]


def forward_train(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    y, _, rstd = _normalize(x, None, weight, eps, weight_offset, rounding, None, True)
    return y, rstd  # type: ignore[return-value]


def forward_out(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, weight_offset: float = 0.0, rounding: int = 0
) -> None:
    y_dtype, _ = _checked(x, weight, rounding)
    checks.check_out(out, x, weight, y_dtype)
    if not all(t is None or _adjacent(t) for t in (x, weight, out)):
        raise RuntimeError("expected adjacent columns")
    _normalize(x, None, weight, eps, weight_offset, rounding, out, False)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    _require(
        residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device,
        "residual must have x's shape, dtype and device",
    )
    return _normalize(x, residual, weight, eps, weight_offset, rounding, None, True)  # type: ignore[return-value]


def backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    dh: Tensor | None,
    rebuilt_dtype: torch.dtype | None,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    key = None
    if rebuilt_dtype is None:
        key = call_cache.gradients(dy, x, rstd, weight, weight_offset, dh, need_dx, need_dweight)
        if (kept := call_cache.find(key)) is not None:
            return kept(dy, x, dh, rstd, weight)  # type: ignore[no-any-return]
    _checked(x, weight, 0)
    x_dtype = rebuilt_dtype or x.dtype
    cols, device = x.shape[-1], x.device
    _require(x_dtype in _TRITON, "rmsnorm kernels take float32, bfloat16 and float16")
    _require(dy.shape == x.shape and dy.dtype in _TRITON and dy.device == device, "dy must have x's shape and device")
    _require(
        dh is None or (dh.shape == x.shape and dh.dtype == x_dtype and dh.device == device),
        "dh must have x's shape, dtype and device",
    )
    _require(
        rstd.dtype == torch.float32 and rstd.numel() * cols == x.numel() and rstd.device == device,
        "rstd must have one float32 per row",
    )
    if not _in_reach(x):
        return fallback.backward(dy, x, rstd, weight, weight_offset, dh, rebuilt_dtype, need_dx, need_dweight)
    given, offset, original = x, weight_offset or None, (dy, x, dh, rstd, weight)
    rstd, weight = rstd.contiguous(), None if weight is None else weight.contiguous()
    dy, x = _with_adjacent_columns(dy), _with_adjacent_columns(x)
    dh = None if dh is None else _with_adjacent_columns(dh)
    if rebuilt_dtype is not None:
        x = backward_launches.rebuild(x, rstd, weight, offset, rebuilt_dtype)
    dx = layouts.like(given, x_dtype) if need_dx else None
    place = layout.rows(dy, x, dh, dx)
    copied = place is None
    if place is None:
        dy, x, dh = dy.contiguous(), x.contiguous(), None if dh is None else dh.contiguous()
        dx = torch.empty_like(x) if need_dx else None
        place = layout.rows(dy, x, dh, dx)
        assert place is not None  # noqa: S101 - contiguous tensors
    dweight = torch.empty(cols, dtype=backward_launches.dweight_dtype(weight), device=device) if need_dweight else None
    if place.number:
        plan = backward_launches.prepare(place, dy, x, dh, dx, rstd, weight, dweight, offset)
        plan.fill(dy, x, dh, dx, rstd, weight, dweight)
        if key is not None and all(a is b for a, b in zip(original, (dy, x, dh, rstd, weight), strict=True)):
            call_cache.keep(key, plan, *original)
    elif dweight is not None:
        dweight.zero_()
    if copied and dx is not None:
        dx = layouts.laid_out_like(given, dx)
    return dx, dweight


# ---------------------------------------------------------------- checks


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _checked(x: Tensor, weight: Tensor | None, rounding: int) -> tuple[torch.dtype, Any]:
    """y's dtype and what x_hat is rounded to, for arguments that fit together."""
    try:
        found = _RESULTS[x.dtype, None if weight is None else weight.dtype, rounding]
    except KeyError:
        raise RuntimeError("rmsnorm kernels take float32, bfloat16 and float16, and a known rounding") from None
    if x.dim() == 0 or x.shape[-1] == 0:
        raise RuntimeError("expected at least one dimension, the last not empty")
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != x.shape[-1] or weight.device != x.device):
        raise RuntimeError("weight must have one element per column, on x's device")
    return found


def _in_reach(x: Tensor) -> bool:
    """Whether there are kernels for x's device, and grids and 32-bit column numbers can count what is in x."""
    cols: int = x.shape[-1]
    if cols > configurations.MOST_COLS or x.numel() > configurations.MOST_ROWS * cols:
        return False
    return configurations.supported(target(x.device))


def _adjacent(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def _with_adjacent_columns(t: Tensor) -> Tensor:
    return t if _adjacent(t) else t.contiguous()


# ---------------------------------------------------------------- forward


def _normalize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    out: Tensor | None,
    train: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, h where there is a residual, rstd where wanted."""
    key = None
    if out is None:
        key = call_cache.normalization(x, residual, weight, eps, weight_offset, rounding, train)
        if (kept := call_cache.find(key)) is not None:
            return kept(x, residual, weight)  # type: ignore[no-any-return]
    y_dtype, x_hat = _checked(x, weight, rounding)
    _require(math.isfinite(eps) and math.isfinite(weight_offset), "eps and weight_offset must be finite")
    if not _in_reach(x):
        return _by_reference(x, residual, weight, eps, weight_offset, rounding, out)
    given, original = x, (x, residual, weight)
    x = _with_adjacent_columns(x)
    if weight is not None:
        weight = weight.contiguous()
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) if train else None
    h = None
    if residual is not None:
        residual, h = _with_adjacent_columns(residual), layouts.like(x, x.dtype)
    y = layouts.like(x, y_dtype) if out is None else out
    place = layout.rows(x, residual, y, h)
    copied = place is None
    if place is None:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        y, h = torch.empty_like(x, dtype=y_dtype), None if residual is None else torch.empty_like(x)
        place = layout.rows(x, residual, y, h)
        assert place is not None  # noqa: S101 - contiguous tensors
    if place.number:
        launch = prepare_forward(place, x, residual, weight, y, h, rstd, eps, weight_offset or None, x_hat, rounding)
        launch(x, residual, weight, y, h, rstd)
        if key is not None and all(a is b for a, b in zip(original, (x, residual, weight), strict=True)):
            makers = [None if t is None else layout.maker(t, x) for t in (h, rstd)]
            call_cache.keep(key, Normalization(launch, layout.maker(y, x), *makers), *original)
    if copied and out is not None:
        y = out.copy_(y)
    elif copied:
        y, h = layouts.laid_out_like(given, y), None if h is None else layouts.laid_out_like(given, h)
    return y, h, rstd


def _by_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if residual is not None:
        return fallback.add_forward(x, residual, weight, eps, weight_offset, rounding)
    y, rstd = fallback.forward_train(x, weight, eps, weight_offset, rounding)
    return (y if out is None else out.copy_(y)), None, rstd
