"""SGLang: a hook around its RMSNorm in plain PyTorch, which is what it has for CPUs without AMX.

SGLang finds the plugin by the entry point `sglang.srt.plugins` of this package and calls `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rmsnorm.functional import add_rms_norm, rms_norm

TARGET = "sglang.srt.layers.layernorm.RMSNorm.forward_native"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def register() -> None:
    """Registers the hook; SGLang puts it in place when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, around, HookType.AROUND)


def around(
    original: Callable[..., Any],
    norm: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """What the original computes: a sum is normalised before it is rounded. What it alone can do it does."""
    if (
        post_residual_addition is not None
        or quant_linear is not None
        or norm.variance_size_override is not None
        or norm.override_orig_dtype is not None
        or x.dtype not in _DTYPES
        or norm.weight.dtype not in _DTYPES
        or (residual is not None and (norm.fp32_residual or residual.dtype is not x.dtype))
        or x.shape[-1] != norm.hidden_size
        or (norm.cast_x_before_out_mul and norm.weight.dtype is not x.dtype)
    ):
        return original(norm, x, residual, post_residual_addition, quant_linear)
    rounding = "before_scale" if norm.cast_x_before_out_mul else "once"
    if residual is None:
        return rms_norm(x, norm.weight, norm.variance_epsilon, rounding=rounding)
    return add_rms_norm(x, residual, norm.weight, norm.variance_epsilon, rounding=rounding, sum="exact")
