"""From a kernel and its arguments to a launch: one compilation for each set of types, constants and alignment.

Kernels are compiled here rather than by calling them, for two reasons. What a kernel may assume of its arguments is
then one bit, which is in the dictionary's key; and what is checked without a GPU is what runs on one (tests/gpu).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from rmsnorm.gpu import configurations

# Triton's interpreter takes tensors on the CPU.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# 16 bytes are one access, and Triton proves that a pointer is a multiple of them from multiples of 16 alone.
ALIGNMENT = 16

_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
_SCALARS = {"int32": "i32", "int64": "i64", "fp32": "fp32", "fp64": "fp64"}

# torch.cuda's own functions look first whether CUDA is initialised: there are tensors on it.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)

# Releases of Triton of which `compiled[grid](*arguments)` is known to come to `compiled.run(...)`. What is between, for
# profilers that set hooks, takes 2 us of each launch.
_SHORT_WAY = triton.__version__.startswith(("3.6.", "3.7."))
_hooks = triton.knobs.runtime

_targets: dict[int | None, Any] = {}
_compiled: dict[Any, Any] = {}


class Kernel:
    """A Triton function: tensors first, then scalars, all annotated, because a Python float would become a float32."""

    def __init__(self, function: Any) -> None:
        self.function = function
        annotations = {name: p.annotation for name, p in inspect.signature(function.fn).parameters.items()}
        self.name = function.fn.__name__
        self.constants = {name for name, a in annotations.items() if a is triton.language.constexpr}
        self.scalars = {
            name: _SCALARS[a.name] for name, a in annotations.items() if isinstance(a, triton.language.dtype)
        }
        self.names = list(annotations)
        self.tensors = len(self.names) - len(self.scalars) - len(self.constants)
        self._constant = [name in self.constants for name in self.names[self.tensors :]]
        if not self.scalars.keys().isdisjoint(self.names[: self.tensors]):
            raise TypeError(f"{self.name}: tensors must be its first parameters")

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

    def key(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `source` depends on, beside alignment: the tensors' types, the constants, and what is absent."""
        types = [None if t is None else t.dtype for t in arguments[: self.tensors]]
        rest = zip(arguments[self.tensors :], self._constant, strict=True)
        return *types, *[value if constant else value is None for value, constant in rest]


def compile_for(target: Any, kernel: Kernel, arguments: tuple[Any, ...], aligned: bool, warps: int) -> Any:
    """The compiled kernel. A multiplication and an addition contracted into one would change bits."""
    named = dict(zip(kernel.names, arguments, strict=True))
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    options |= configurations.compiler_options(target, warps, named.get("gate") is not None, named.get("FORM"))
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


class Launch:
    """A kernel, ready to run with other tensors of the same kinds: everything else about the launch is decided."""

    __slots__ = ("_compiled", "_device", "_grid", "_handles", "_rest", "_run")

    def __init__(self, compiled: Any, device: torch.device, grid: tuple[int, int, int], rest: tuple[Any, ...]) -> None:
        self._compiled, self._device, self._grid, self._rest = compiled, device.index, grid, rest
        self._run = None
        if _SHORT_WAY and isinstance(compiled, CompiledKernel):
            self._run, self._handles = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)

    def __call__(self, *tensors: Tensor | None) -> None:
        """On the current stream of the tensors' device, whichever device is current."""
        device = self._device
        if INTERPRETED:
            self._compiled[self._grid](*tensors, *self._rest)
        elif device != _current_device():
            with torch.cuda.device(device):
                self(*tensors)
        elif self._run is None or getattr(_hooks.launch_enter_hook, "calls", _hooks.launch_enter_hook):
            self._compiled[self._grid](*tensors, *self._rest, stream=_current_stream(device))
        else:
            self._run(*self._grid, _current_stream(device), *self._handles, *tensors, *self._rest)


def prepare(
    kernel: Kernel,
    device: torch.device,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    aligned: bool,
    warps: int,
) -> Launch:
    """A kernel compiled for its arguments.

    Args:
        arguments: one for each parameter of the kernel, tensors first, None for what is absent.
        aligned: whether every pointer, stride and `cols` is a multiple of ALIGNMENT.
    """
    rest = arguments[kernel.tensors :]
    if INTERPRETED:
        return Launch(kernel.function, device, grid, rest)
    key = kernel, device.index, aligned, warps, *kernel.key(arguments)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = compile_for(target(device), kernel, arguments, aligned, warps)
        with torch.cuda.device(device.index):
            compiled[grid]  # loads it
        _compiled[key] = compiled
    return Launch(compiled, device, grid, rest)
