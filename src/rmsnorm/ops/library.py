"""The operators `torch.ops.rmsnorm.*`: compiled kernels on the CPU, Triton's on GPUs, the reference everywhere else.

    forward(x, weight, eps, weight_offset, rounding) -> y
    forward_train(...) -> (y, rstd)
    forward_out(x, weight, eps, out, weight_offset, rounding) -> ()
    add_forward(x, residual, ...) -> (y, h, rstd)
    backward(dy, x, rstd, weight, weight_offset, dh, rebuilt_dtype, need_dx, need_dweight) -> (dx, dweight)

They normalise the last dimension, take `rounding` as an index into `reference.ROUNDINGS`, and know no autograd:
that is functional.py's. What is not needed of the backward is None. With `rebuilt_dtype`, `backward` is given y for x
and rebuilds x from it. PyTorch's dispatcher picks the implementation by device; there is no other registry.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rmsnorm import checks, gpu
from rmsnorm.gpu import call_cache
from rmsnorm.numerics import reference
from rmsnorm.ops import vmap

_SCHEMAS = """
forward(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> Tensor
forward_train(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor rstd)
forward_out(Tensor x, Tensor? weight, float eps, Tensor(a!) out, float weight_offset=0.0, int rounding=0) -> ()
add_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor h, Tensor rstd)
backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, Tensor? dh, ScalarType? rebuilt_dtype, bool need_dx, bool need_dweight) -> (Tensor? dx, Tensor? dweight)
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
    except RuntimeError as error:  # its message begins with a place in csrc
        raise ValueError("RMSNORM_ISA=" + str(error).splitlines()[0].partition("RMSNORM_ISA=")[2]) from None


# ---------------------------------------------------------------- the reference, with the operators' signatures


def check(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> None:
    """What the kernels check: plain PyTorch would broadcast, truncate and go on."""
    checks.check_inputs(x, weight, None)
    checks.check_eps(eps)
    checks.check_weight_offset(weight_offset)


def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0) -> Tensor:
    return forward_train(x, weight, eps, weight_offset, rounding)[0]


def forward_train(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    check(x, weight, eps, weight_offset)
    y, rstd = reference.forward(x, weight, eps, weight_offset, reference.ROUNDINGS[rounding])
    return laid_out_like(x, y), rstd.contiguous()


def forward_out(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, weight_offset: float = 0.0, rounding: int = 0
) -> None:
    y = forward(x, weight, eps, weight_offset, rounding)
    checks.check_out(out, x, weight, y.dtype)
    out.copy_(y)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, weight, eps, weight_offset)
    checks.check_residual(x, residual)
    y, h, rstd = reference.add_forward(x, residual, weight, eps, weight_offset, reference.ROUNDINGS[rounding])
    return laid_out_like(x, y), laid_out_like(x, h), rstd.contiguous()


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
) -> tuple[Tensor | None, Tensor | None]:
    given = x
    if rebuilt_dtype is not None:
        x = reference.rebuild(x, rstd, weight, weight_offset, rebuilt_dtype)
    dx, dweight = reference.backward(dy, x, rstd, weight, weight_offset, dh)
    return (
        laid_out_like(given, dx) if need_dx else None,
        dweight if need_dweight else None,
    )


def laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    wanted = like(x, result.dtype)
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


# ---------------------------------------------------------------- shapes, for tracing


def like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Laid out as x if x is dense with adjacent columns, else contiguous; csrc/ops/tensors.h does the same."""
    made = torch.empty_like(x, dtype=dtype)  # keeps the strides of a dense tensor, and of no other
    if made.stride() == x.stride() and (x.stride(-1) == 1 or x.shape[-1] == 1):
        return made
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake_forward(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounding: int = 0
) -> Tensor:
    # The dispatcher comes here when any argument is on the meta device: without the kernel's checks.
    if x.is_meta or (weight is not None and weight.is_meta):
        check(x, weight, eps, weight_offset)
    return like(x, reference.result_dtype(x, weight, reference.ROUNDINGS[rounding]))


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
    if x.is_meta or residual.is_meta:
        check(x, weight, eps, weight_offset)
        checks.check_residual(x, residual)
    return _fake_forward(x, weight, eps, weight_offset, rounding), like(x, x.dtype), _rstd_like(x)


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
) -> tuple[Tensor | None, Tensor | None]:
    dtype = rstd.dtype if weight is None else weight.dtype
    return (
        like(x, rebuilt_dtype or x.dtype) if need_dx else None,
        x.new_empty(x.shape[-1], dtype=dtype) if need_dweight else None,
    )


Implementation = tuple[Callable[..., Any], Callable[..., Any]]  # and its fake
_IMPLEMENTATIONS: dict[str, Implementation] = {
    "forward": (forward, _fake_forward),
    "forward_train": (forward_train, _fake_forward_train),
    "forward_out": (forward_out, _fake_forward_out),
    "add_forward": (add_forward, _fake_add_forward),
    "backward": (backward, _fake_backward),
}

_status = _load()
_library = torch.library.Library("rmsnorm", "FRAGMENT")


class Operators:
    """Operators by name, in the ways to call them; made from schemas, and their implementation and fake by name."""

    def __init__(self, schemas: str, implementations: dict[str, Implementation]) -> None:
        if not _status.compiled:
            for schema in schemas.strip().splitlines():
                _library.define(schema)
        for name, (function, fake) in implementations.items():
            _library.impl(name, function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"rmsnorm::{name}", fake, lib=_library)
        self.reference = SimpleNamespace(**{name: function for name, (function, _) in implementations.items()})
        self.traced = SimpleNamespace(**{name: getattr(torch.ops.rmsnorm, name).default for name in implementations})
        # Without OpOverload's Python frame, which is 0.3 us of a call of 2.5 and which torch.compile needs to see.
        self.direct = SimpleNamespace(**{name: getattr(op, "_op", op) for name, op in vars(self.traced).items()})
        self.gpu = self.direct
        for name, op in vars(self.traced).items():
            if not op._schema.is_mutable:
                torch.library.register_vmap(f"rmsnorm::{name}", vmap.rule(op), lib=_library)
                _library.impl(name, vmap.older_rule(op), "Batched")

    def __call__(self, x: Tensor) -> SimpleNamespace:
        """Those for x. The kernels know no float64, which the reference computes on every device."""
        if x.dtype == torch.float64:
            return self.reference
        if torch.compiler.is_compiling():
            return self.traced
        return self.gpu if x.is_cuda else self.direct


operators = Operators(_SCHEMAS, _IMPLEMENTATIONS)
if gpu.missing() is None:
    gpu.register(_library, "operators")
    operators.gpu = call_cache.replaying(operators.direct)
direct = operators.direct


def status() -> Status:
    """What `rmsnorm info` reports of the kernels."""
    return _status
