"""Calls like an earlier one: what was decided for it is kept, and they go straight to the launch.

A call on a GPU is often over before the host has made the next, so that a small model waits for the host. The operators
keep what they decide for tensors of the same dtypes, shapes, strides, alignment and device, and the same options; and
where PyTorch's dispatcher would do nothing but call them, they are called without it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# A server sees ever new shapes. A plan is a few kilobytes, and is made again in 20 to 30 us.
MOST = 4096

_plans: dict[Any, Any] = {}
find = _plans.get
clear = _plans.clear


def keep(key: tuple[Any, ...], plan: Any, *tensors: Tensor | None) -> None:
    """For calls with this key, if their tensors are memory, and not of subclasses, which may want to see calls."""
    if all(t is None or (type(t) in (Tensor, torch.nn.Parameter) and t.data_ptr() and not t.is_neg()) for t in tensors):
        if len(_plans) >= MOST:
            _plans.clear()
        _plans[key] = plan


def normalization(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    train: bool,
) -> tuple[Any, ...]:
    """The key of a forward."""
    return _kind(x), _kind(residual), _kind(weight), eps, weight_offset, rounding, train


def gradients(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    dh: Tensor | None,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Any, ...]:
    """The key of a backward."""
    return _kind(dy), _kind(x), _kind(rstd), _kind(weight), weight_offset, _kind(dh), need_dx, need_dweight


def _kind(t: Tensor | None) -> tuple[Any, ...] | None:
    """What a plan depends on.

    Tensors that are more than memory are of no kind that has a plan: they have no address (zeros), raise for it (nested
    and batched ones), or are negated when read.
    """
    if t is None:
        return None
    address = t.data_ptr()
    return type(t), t.dtype, t.shape, t.stride(), t.device, address % 16 if address else None, t.is_neg()


# ---------------------------------------------------------------- without the dispatcher

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_active, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_profiler = torch.autograd.profiler


def _planned(key: Callable[..., tuple[Any, ...]], *arguments: Any) -> Callable[..., Any] | None:
    """The plan of a call that is nobody's business but ours: no mode, transform, tracer or profiler is to see it."""
    if _dispatch_modes() or _function_modes() or _functorch_active() or _profiler._is_profiler_enabled or _tracing():
        return None
    try:
        return find(key(*arguments))
    except RuntimeError:  # no address
        return None


def replaying(direct: SimpleNamespace) -> SimpleNamespace:
    """The operators, which go by the dispatcher where a call has no plan."""

    def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0) -> Any:
        plan = _planned(normalization, x, None, weight, eps, weight_offset, rounding, False)
        if plan is None:
            return direct.forward(x, weight, eps, weight_offset, rounding)
        return plan(x, None, weight)[0]

    def forward_train(
        x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
    ) -> Any:
        plan = _planned(normalization, x, None, weight, eps, weight_offset, rounding, True)
        if plan is None:
            return direct.forward_train(x, weight, eps, weight_offset, rounding)
        y, _, rstd = plan(x, None, weight)
        return y, rstd

    def add_forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
    ) -> Any:
        plan = _planned(normalization, x, residual, weight, eps, weight_offset, rounding, True)
        if plan is None:
            return direct.add_forward(x, residual, weight, eps, weight_offset, rounding)
        return plan(x, residual, weight)

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
    ) -> Any:
        plan = None
        if rebuilt_dtype is None:
            plan = _planned(gradients, dy, x, rstd, weight, weight_offset, dh, need_dx, need_dweight)
        if plan is None:
            return direct.backward(dy, x, rstd, weight, weight_offset, dh, rebuilt_dtype, need_dx, need_dweight)
        return plan(dy, x, dh, rstd, weight)

    planned = {"forward": forward, "forward_train": forward_train, "add_forward": add_forward, "backward": backward}
    return SimpleNamespace(**vars(direct) | planned)
