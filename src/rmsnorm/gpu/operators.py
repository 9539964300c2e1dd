"""The operators `torch.ops.rmsnorm.*` for CUDA and ROCm: from tensors to launches.

The checks here guard memory, as those in csrc/ops do; the messages a user sees come from functional. Memory comes
from PyTorch's allocator, launches go to the current stream of the tensors' device, and nothing waits for either: calls
can be captured in a graph once each of their kernels has been compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm.gpu.calls import backward_call, forward_call
from rmsnorm.spec import NormSpec


def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0) -> Tensor:
    spec = NormSpec(eps, weight_offset, rounding)
    return forward_call("forward", (x, weight, eps, weight_offset, rounding), spec)  # type: ignore[no-any-return]


def forward_train(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    spec = NormSpec(eps, weight_offset, rounding)
    return forward_call("forward_train", (x, weight, eps, weight_offset, rounding), spec)  # type: ignore[no-any-return]


def forward_out(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, weight_offset: float = 0.0, rounding: int = 0
) -> None:
    spec = NormSpec(eps, weight_offset, rounding)
    forward_call("forward_out", (x, weight, eps, out, weight_offset, rounding), spec)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = x, residual, weight, eps, weight_offset, rounding
    return forward_call("add_forward", arguments, NormSpec(*arguments[3:]))  # type: ignore[no-any-return]


def residual_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    eps, weight_offset, rounding, group_size, exact_sum, alpha = options
    spec = NormSpec(eps, weight_offset, rounding, group_size, exact_sum=exact_sum, alpha=alpha)
    return forward_call("residual_forward", (x, residual, weight, *options), spec)  # type: ignore[no-any-return]


def gated_forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    return forward_call("gated_forward", (x, gate, weight, *options), NormSpec(*options))  # type: ignore[no-any-return]


def gated_forward_train(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    arguments = x, gate, weight, *options
    return forward_call("gated_forward_train", arguments, NormSpec(*options))  # type: ignore[no-any-return]


def gated_forward_out(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> None:
    forward_call("gated_forward_out", (x, gate, weight, *options), NormSpec(*options[:-1]))


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
    arguments = dy, x, rstd, weight, weight_offset, dh, rebuilt_dtype, need_dx, need_dweight
    return backward_call("backward", arguments, NormSpec(0.0, weight_offset))  # type: ignore[no-any-return]


def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    weight_offset: float,
    group_size: int,
    activation: int,
    gate_first: bool,
    need_dx: bool,
    need_dgate: bool,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    spec = NormSpec(0.0, weight_offset, 0, group_size, activation, gate_first)
    arguments = dy, x, gate, rstd, weight, dh, *spec[1:2], *spec[3:6], need_dx, need_dgate, need_dweight
    return backward_call("gated_backward", arguments, spec)  # type: ignore[no-any-return]
