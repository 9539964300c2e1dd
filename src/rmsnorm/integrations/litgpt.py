"""LitGPT: `register()`, before the model is made, is all; its configurations then name this library's norm."""

from __future__ import annotations

from typing import Any

from rmsnorm.module import RMSNorm


class LitRMSNorm(RMSNorm):
    """With the arguments that LitGPT gives: `Config.norm_class(size, eps=...)`."""

    def __init__(self, size: int, dim: int = -1, eps: float = 1e-6, add_unit_offset: bool = False) -> None:
        if dim != -1:
            raise ValueError(f"dim must be -1, the last dimension, got {dim}")
        super().__init__(size, eps, weight_offset=1.0 if add_unit_offset else 0.0)


def register() -> None:
    """Puts `LitRMSNorm` where `litgpt.Config.norm_class` looks."""
    from litgpt import model

    _own.setdefault("RMSNorm", model.RMSNorm)
    model.RMSNorm = LitRMSNorm


def unregister() -> None:
    """Puts LitGPT's own class back; models that exist keep what they have."""
    from litgpt import model

    if _own:
        model.RMSNorm = _own.pop("RMSNorm")


_own: dict[str, Any] = {}
