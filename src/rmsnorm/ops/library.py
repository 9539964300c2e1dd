"""The operators `torch.ops.rmsnorm.*`: compiled kernels on the CPU, Triton's on GPUs, the reference everywhere else.

Narrow schemas, whose calls cost least, for a norm of whole rows; wide ones, with the fields of NormSpec in its order,
for everything else. doors.py chooses between them. They normalise the last dimension and know no autograd. With
`rebuilt_dtype`, `backward` is given y for x and rebuilds x from it. What is not needed of gradients is None. PyTorch's
dispatcher picks the implementation by device; there is no other registry.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rmsnorm.gpu import availability, call_cache, registration
from rmsnorm.ops import fakes, fallback, vmap

_SCHEMAS = """
forward(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> Tensor
forward_train(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor rstd)
forward_out(Tensor x, Tensor? weight, float eps, Tensor(a!) out, float weight_offset=0.0, int rounding=0) -> ()
add_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor h, Tensor rstd)
backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, Tensor? dh, ScalarType? rebuilt_dtype, bool need_dx, bool need_dweight) -> (Tensor? dx, Tensor? dweight)
gated_forward(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool gate_first) -> Tensor
gated_forward_train(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool gate_first) -> (Tensor y, Tensor rstd)
gated_forward_out(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool gate_first, Tensor(a!) out) -> ()
residual_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, bool exact_sum, float alpha) -> (Tensor y, Tensor h, Tensor rstd)
quantized_forward(Tensor x, Tensor? residual, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool gate_first, bool exact_sum, float alpha, Tensor? scale, int type, int scale_kind, int block_size, float largest, float most, float smallest, float lowest, bool need_norm) -> (Tensor q, Tensor scale, Tensor? norm, Tensor? h)
norm_add_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, int rounding=0) -> (Tensor h, Tensor rstd)
norm_add_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? next_weight, float eps, float next_eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor h, Tensor rstd, Tensor next_rstd)
gated_backward(Tensor dy, Tensor x, Tensor? gate, Tensor rstd, Tensor? weight, Tensor? dh, float weight_offset, int group_size, int activation, bool gate_first, bool need_dx, bool need_dgate, bool need_dweight) -> (Tensor? dx, Tensor? dgate, Tensor? dweight)
partial_forward(Tensor x, Tensor? weight, float eps, float weight_offset, int rounding, int partial) -> Tensor
partial_forward_train(Tensor x, Tensor? weight, float eps, float weight_offset, int rounding, int partial) -> (Tensor y, Tensor rstd)
partial_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, int partial, bool need_dx, bool need_dweight) -> (Tensor? dx, Tensor? dweight)
modulated_forward(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, float weight_offset=0.0, int rounding=0) -> Tensor
modulated_forward_train(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor rstd)
modulated_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? scale, float weight_offset, int rounding, int shared, bool need_dx, bool need_dweight, ScalarType? dscale_dtype, ScalarType? dshift_dtype) -> (Tensor? dx, Tensor? dweight, Tensor? dscale, Tensor? dshift)
rotary_forward(Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, float weight_offset, int rounding, int rotary_dim, bool interleaved, bool each) -> (Tensor y, Tensor rstd)
rotary_forward_out(Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, float weight_offset, int rounding, int rotary_dim, bool interleaved, bool each, Tensor(a!) out) -> ()
rotary_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor cos, Tensor sin, float weight_offset, int rotary_dim, bool interleaved, bool each, bool need_dx, bool need_dweight) -> (Tensor? dx, Tensor? dweight)
"""  # noqa: E501
NAMES = tuple(schema.partition("(")[0] for schema in _SCHEMAS.strip().splitlines())


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


_FLOAT64, _compiling = torch.float64, torch.compiler.is_compiling  # looked up once: every call asks
_status = _load()
_library = torch.library.Library("rmsnorm", "FRAGMENT")


def status() -> Status:
    """What `rmsnorm info` reports of the kernels."""
    return _status


_announcements: list[str] = []


def _announced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; the first call of any says that there are no kernels."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not _announcements:
            _announcements.append(
                "rmsnorm has no compiled kernels here and computes in plain PyTorch: the same bits, several times "
                f"slower where tensors fit a cache. Reason: {_status.reason}. See docs/install.md"
            )
            warnings.warn(_announcements[0], RuntimeWarning, stacklevel=2)
        return function(*arguments, **options)

    return call


class Operators:
    """All operators by name, in the ways to call them.

    Attributes:
        reference: the functions of fallback.py.
        traced: as torch.compile needs to see them.
        direct: without OpOverload's Python frame, which is 0.3 us of a call of 2.5.
        gpu: `direct`, and calls that repeat go to the launch at once.
        distributed: on DTensors; rmsnorm.distributed sets it when it is imported.
    """

    def __init__(self) -> None:
        if not _status.compiled:
            for schema in _SCHEMAS.strip().splitlines():
                _library.define(schema)
        self.traced = SimpleNamespace(**{name: getattr(torch.ops.rmsnorm, name).default for name in NAMES})
        self.direct = SimpleNamespace(**{name: getattr(op, "_op", op) for name, op in vars(self.traced).items()})
        self.reference = SimpleNamespace(**{name: getattr(fallback, name) for name in NAMES})
        self.gpu = self.direct
        self.distributed: SimpleNamespace | None = None
        for name, op in vars(self.traced).items():
            _library.impl(name, getattr(fallback, name), "CompositeExplicitAutograd")
            torch.library.register_fake(f"rmsnorm::{name}", getattr(fakes, name), lib=_library)
            if not op._schema.is_mutable:
                torch.library.register_vmap(f"rmsnorm::{name}", vmap.rule(op), lib=_library)
                _library.impl(name, vmap.older_rule(op), "Batched")
            if not _status.compiled:
                _library.impl(name, _announced(getattr(fallback, name)), "CPU")
        if availability.missing() is None:
            registration.register(_library)
            self.gpu = call_cache.fast(self.direct)

    def __call__(self, x: Tensor) -> SimpleNamespace:
        """Those for x. The kernels know no float64, which the reference computes on every device."""
        if x.dtype is _FLOAT64:
            return self.reference
        if self.distributed is not None and type(x).__name__ == "DTensor":
            return self.distributed
        if _compiling():
            return self.traced
        return self.gpu if x.is_cuda else self.direct


operators = Operators()
