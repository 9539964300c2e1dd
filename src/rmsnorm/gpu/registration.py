"""The operators that have Triton kernels, registered with PyTorch's dispatcher."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

DOORS = (
    "forward",
    "forward_train",
    "forward_out",
    "add_forward",
    "residual_forward",
    "gated_forward",
    "gated_forward_train",
    "gated_forward_out",
    "backward",
    "gated_backward",
)


def register(library: torch.library.Library, key: str = "CUDA", **options: Any) -> None:
    """Gives the operators their implementations for CUDA, which is also what ROCm is called."""
    for name in DOORS:
        library.impl(name, _imported_when_called(name), key, **options)


def implementation(name: str) -> Callable[..., Any]:
    """The function that an operator is on a GPU; imports Triton."""
    return getattr(importlib.import_module("rmsnorm.gpu.operators"), name)  # type: ignore[no-any-return]


def _imported_when_called(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal function
        if function is None:
            function = implementation(name)
        return function(*arguments)

    return call
