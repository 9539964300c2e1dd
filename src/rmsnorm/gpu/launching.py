"""From a kernel and its arguments to a launch: one compilation for each set of types, constants and alignment.

Kernels are compiled here rather than by calling them, for two reasons. What a kernel may assume of its arguments is
then one bit, which is in the dictionary's key; and what is checked without a GPU is what runs on one (tests/gpu).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Triton's interpreter takes tensors on the CPU.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# 16 bytes are one access, and Triton proves that a pointer is a multiple of them from multiples of 16 alone.
ALIGNMENT = 16

_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
_SCALARS = {"int32": "i32", "int64": "i64", "fp32": "fp32", "fp64": "fp64"}

_targets: dict[int | None, Any] = {}
_compiled: dict[Any, Any] = {}


class Kernel:
    """A Triton function whose scalar parameters are all annotated: a Python float would become a float32 otherwise."""

    def __init__(self, function: Any) -> None:
        self.function = function
        annotations = {name: p.annotation for name, p in inspect.signature(function.fn).parameters.items()}
        self.name = function.fn.__name__
        self.constants = {name for name, a in annotations.items() if a is triton.language.constexpr}
        self.scalars = {
            name: _SCALARS[a.name] for name, a in annotations.items() if isinstance(a, triton.language.dtype)
        }
        self.names = list(annotations)

    def source(self, arguments: tuple[Any, ...], aligned: bool) -> Any:
        """What is compiled: the types of the arguments, the constants, and what is known to be a multiple of 16."""
        signature, constants, attributes = {}, {}, {}
        for index, (name, value) in enumerate(zip(self.names, arguments, strict=True)):
            if name in self.constants or value is None:
                signature[name] = "constexpr"
                constants[index,] = value
                continue
            signature[name] = self.scalars.get(name) or _POINTERS[value.dtype]
            multiple = name == "cols" or name.endswith(("_outer", "_inner")) or name not in self.scalars
            if aligned and multiple:
                attributes[index,] = [["tt.divisibility", ALIGNMENT]]
        return ASTSource(fn=self.function, signature=signature, constexprs=constants, attrs=attributes)


def compile_for(target: Any, kernel: Kernel, arguments: tuple[Any, ...], aligned: bool, warps: int) -> Any:
    """The compiled kernel. A multiplication and an addition contracted into one would change bits."""
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(kernel.source(arguments, aligned), target=target, options=options)


def target(device: torch.device) -> Any:
    """What is compiled for: backend, architecture, threads in a warp."""
    if device.index not in _targets:
        if INTERPRETED:
            _targets[device.index] = GPUTarget("interpreter", "", 32)
        else:
            with torch.cuda.device(device):
                _targets[device.index] = triton.runtime.driver.active.get_current_target()
    return _targets[device.index]


def launch(
    kernel: Kernel,
    device: torch.device,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    key: tuple[Any, ...],
    aligned: bool,
    warps: int,
) -> None:
    """Runs a kernel on the device, on its current stream.

    Args:
        arguments: one for each parameter of the kernel, None for what is absent.
        key: what, with the kernel, the device and `aligned`, determines the types and constants among the arguments.
        aligned: whether every pointer, stride and `cols` is a multiple of ALIGNMENT.
        warps: also determined by `key`.
    """
    if INTERPRETED:
        kernel.function[grid](*arguments)
        return None
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, device, grid, arguments, key, aligned, warps)
    key = (kernel, device.index, aligned, *key)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = compile_for(target(device), kernel, arguments, aligned, warps)
    compiled[grid](*arguments)
    return None
