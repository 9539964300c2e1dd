"""The operators `torch.ops.rmsnorm.*`: compiled kernels on the CPU, Triton's on GPUs, the reference everywhere else.

    forward(x, weight, eps, weight_offset, rounding) -> y
    forward_train(...) -> (y, rstd)
    forward_out(x, weight, eps, out, weight_offset, rounding) -> ()
    add_forward(x, residual, ...) -> (y, h, rstd)
    backward(dy, x, rstd, weight, weight_offset, dh, rebuilt_dtype, need_dx, need_dweight) -> (dx, dweight)

They normalise the last dimension, take `rounding` as an index into `reference.ROUNDINGS`, and know no autograd:
that is functional.py's. With `rebuilt_dtype`, `backward` is given y for x and rebuilds x from it. PyTorch's
dispatcher picks the implementation by device; there is no other registry.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rmsnorm import batching, checks, gpu, reference

_SCHEMAS = """
forward(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> Tensor
forward_train(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor rstd)
forward_out(Tensor x, Tensor? weight, float eps, Tensor(a!) out, float weight_offset=0.0, int rounding=0) -> ()
add_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor h, Tensor rstd)
backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, Tensor? dh, ScalarType? rebuilt_dtype, bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)
"""  # noqa: E501


@dataclass(frozen=True)
class Status:
    """Whether the compiled kernels run, and why not; the instruction set chosen, and those this machine has."""

    compiled: bool
    reason: str | None = None
    isa: str | None = None
    isas: list[str] = field(default_factory=list)


def _load() -> Status:
    """Loads the compiled library, or says why it cannot be."""
    # Through the import system: in an editable install the library does not lie beside this file.
    spec = importlib.util.find_spec("rmsnorm._C")
    if spec is None or spec.origin is None:
        return Status(
            False, "this installation has none: no C++ compiler was found, or no wheel exists for this platform"
        )
    try:
        torch.ops.load_library(spec.origin)
    except (OSError, RuntimeError) as error:
        return Status(False, f"the library does not load into torch {torch.__version__}: {error}".splitlines()[0])
    try:
        return Status(True, None, torch.ops.rmsnorm.isa(), torch.ops.rmsnorm.isas().split(","))
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


# ---------------------------------------------------------------- the reference, with the operators' signatures


def _check(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> None:
    """What the kernels check: plain PyTorch would broadcast, truncate and go on."""
    checks.check_inputs(x, weight, None)
    checks.check_eps(eps)
    checks.check_weight_offset(weight_offset)


def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0) -> Tensor:
    return forward_train(x, weight, eps, weight_offset, rounding)[0]


def forward_train(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    _check(x, weight, eps, weight_offset)
    y, rstd = reference.forward(x, weight, eps, weight_offset, reference.ROUNDINGS[rounding])
    return _laid_out_like(x, y), rstd.contiguous()


def forward_out(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, weight_offset: float = 0.0, rounding: int = 0
) -> None:
    y = forward(x, weight, eps, weight_offset, rounding)
    checks.check_out(out, x, weight, y.dtype)
    out.copy_(y)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    y, h, rstd = reference.add_forward(x, residual, weight, eps, weight_offset, reference.ROUNDINGS[rounding])
    return _laid_out_like(x, y), _laid_out_like(x, h), rstd.contiguous()


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
) -> tuple[Tensor, Tensor]:
    given = x
    if rebuilt_dtype is not None:
        x = reference.rebuild(x, rstd, weight, weight_offset, rebuilt_dtype)
    dx, dweight = reference.backward(dy, x, rstd, weight, weight_offset, dh)
    return (
        _laid_out_like(given, dx) if need_dx else dx.new_empty(0),
        dweight if need_dweight else dweight.new_empty(0),
    )


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    wanted = _like(x, result.dtype)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


# ---------------------------------------------------------------- shapes, for tracing


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Laid out as x if x is dense with adjacent columns, else contiguous; csrc/ops.cpp does the same."""
    like = torch.empty_like(x, dtype=dtype)  # keeps the strides of a dense tensor, and of no other
    if like.stride() == x.stride() and (x.stride(-1) == 1 or x.shape[-1] == 1):
        return like
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake_forward(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> Tensor:
    # The dispatcher comes here when any argument is on the meta device: without the kernel's checks.
    if x.is_meta or (weight is not None and weight.is_meta):
        _check(x, weight, eps, weight_offset)
    return _like(x, reference.result_dtype(x, weight, reference.ROUNDINGS[rounding]))


def _rstd_like(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=reference.compute_dtype(x))


def _fake_forward_train(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    return _fake_forward(x, weight, eps, weight_offset, rounding), _rstd_like(x)


def _fake_forward_out(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, weight_offset: float = 0.0, rounding: int = 0
) -> None:
    _fake_forward(x, weight, eps, weight_offset, rounding)


def _fake_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_forward(x, weight, eps, weight_offset, rounding), _like(x, x.dtype), _rstd_like(x)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    dh: Tensor | None,
    rebuilt_dtype: torch.dtype | None,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx = _like(x, rebuilt_dtype or x.dtype) if need_dx else x.new_empty(0, dtype=rebuilt_dtype or x.dtype)
    dweight = x.new_empty(x.shape[-1] if need_dweight else 0, dtype=rstd.dtype if weight is None else weight.dtype)
    return dx, dweight


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "forward": (forward, _fake_forward),
    "forward_train": (forward_train, _fake_forward_train),
    "forward_out": (forward_out, _fake_forward_out),
    "add_forward": (add_forward, _fake_add_forward),
    "backward": (backward, _fake_backward),
}

_status = _load()
_library = torch.library.Library("rmsnorm", "FRAGMENT")
if not _status.compiled:
    for _schema in _SCHEMAS.strip().splitlines():
        _library.define(_schema)
for _name, (_function, _fake) in _IMPLEMENTATIONS.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rmsnorm::{_name}", _fake, lib=_library)
if gpu.missing() is None:
    gpu.register(_library)
for _name in ("forward", "forward_train", "add_forward", "backward"):
    _op = getattr(torch.ops.rmsnorm, _name).default
    torch.library.register_vmap(f"rmsnorm::{_name}", batching.rule(_op), lib=_library)

_reference = SimpleNamespace(**{name: function for name, (function, _) in _IMPLEMENTATIONS.items()})
_traced = SimpleNamespace(**{name: getattr(torch.ops.rmsnorm, name).default for name in _IMPLEMENTATIONS})
# The same without OpOverload's Python frame, which is 0.3 us of a call of 2.5 and which torch.compile needs to see.
direct = SimpleNamespace(**{name: getattr(op, "_op", op) for name, op in vars(_traced).items()})


def operators(x: Tensor) -> SimpleNamespace:
    """The operators by name. The kernels know no float64, which the reference computes on every device."""
    if x.dtype == torch.float64:
        return _reference
    return _traced if torch.compiler.is_compiling() else direct


def status() -> Status:
    """What `rmsnorm info` reports of the kernels."""
    return _status
