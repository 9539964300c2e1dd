"""The Triton kernels for CUDA and ROCm, and whether they run.

Triton is no dependency: GPU builds of PyTorch bring it. It is imported by the first call on a GPU, not before.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

# The first of NVIDIA's architectures that Triton compiles for.
OLDEST = 70
# The operators that have kernels, by the modules that have them.
OPERATORS = {
    "operators": ("forward", "forward_train", "forward_out", "add_forward", "backward"),
    "gated_operators": ("gated_forward", "gated_forward_train", "gated_backward"),
}


def missing() -> str | None:
    """Why tensors on a GPU are computed by the reference; None where they have kernels."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this PyTorch is built for the CPU alone"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, though PyTorch's own GPU builds require it"
    return None


def too_old() -> str | None:
    """Why the current GPU, where there is one, is left to the reference; asking initialises CUDA."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor >= OLDEST:
        return None
    return f"Triton compiles for sm_{OLDEST} and later, and this GPU is sm_{major}{minor}"


def triton_version() -> str | None:
    """The release that is installed, found without importing it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def register(library: torch.library.Library, module: str, key: str = "CUDA", **options: Any) -> None:
    """Gives the operators of a module their implementations for CUDA, which is also what ROCm is called."""
    for name in OPERATORS[module]:
        library.impl(name, _imported_when_called(name), key, **options)


def implementation(name: str) -> Callable[..., Any]:
    """The function that an operator is on a GPU; imports Triton."""
    (module,) = (module for module, names in OPERATORS.items() if name in names)
    return getattr(importlib.import_module(f"rmsnorm.gpu.{module}"), name)  # type: ignore[no-any-return]


def _imported_when_called(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal function
        if function is None:
            function = implementation(name)
        return function(*arguments)

    return call
