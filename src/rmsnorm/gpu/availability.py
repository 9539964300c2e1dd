"""Whether the Triton kernels for CUDA and ROCm run here.

Triton is no dependency: GPU builds of PyTorch bring it. It is imported by the first call on a GPU, not before.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

# The first of NVIDIA's architectures that Triton compiles for.
OLDEST = 70


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
