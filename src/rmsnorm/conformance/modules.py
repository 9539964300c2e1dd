"""A module with another weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rmsnorm.conformance.styles import WEIGHTS


def weight_name(module: nn.Module, width: int) -> str | None:
    """The name of the parameter or buffer that scales: one of the usual names, else the first of the row's size."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    fitting = [name for name, t in own.items() if t is not None and t.numel() == width and t.is_floating_point()]
    return next((name for name in WEIGHTS if name in fitting), fitting[0] if fitting else None)


def with_weight(module: nn.Module, weight: Tensor | None, width: int) -> tuple[Callable[..., Any], Tensor | None]:
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
