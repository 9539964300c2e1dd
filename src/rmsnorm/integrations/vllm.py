"""vLLM: the provider "rmsnorm" of its operations rms_norm and fused_add_rms_norm.

vLLM finds the plugin by the entry point `vllm.general_plugins` of this package and calls `register` in each of its
processes. Chosen by `--ir-op-priority.rms_norm rmsnorm --ir-op-priority.fused_add_rms_norm rmsnorm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm.functional import add_rms_norm, rms_norm

PROVIDER = "rmsnorm"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def register() -> None:
    """Adds the provider; a second call changes nothing."""
    from vllm import ir

    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_supported)(normalize)
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_supported_add)(add_and_normalize)


# vLLM compares the signatures with those of its operations, and passes arguments by position.


def normalize(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """The norm of x, rounded to a 16-bit weight's dtype before it is scaled."""
    return rms_norm(x, weight, epsilon, rounding="weight_dtype").to(x.dtype)


def add_and_normalize(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of the sum before it is rounded, and the sum rounded."""
    y, h = add_rms_norm(x, x_residual, weight, epsilon, rounding="weight_dtype", sum="exact")
    return y.to(x.dtype), h


def _supported(x: Any, weight: Any, epsilon: Any, variance_size: Any = None) -> bool:
    return variance_size is None and x.dtype in _DTYPES and (weight is None or weight.dtype in _DTYPES)


def _supported_add(x: Any, x_residual: Any, weight: Any, epsilon: Any, variance_size: Any = None) -> bool:
    return x_residual.dtype is x.dtype and _supported(x, weight, epsilon, variance_size)
