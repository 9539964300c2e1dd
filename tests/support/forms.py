"""Every form of the norm, each in every rounding: the list that tests of one promise walk through.

A form more is a row more here, and is then held to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rmsnorm import add_rms_norm, gated_rms_norm, rms_norm
from rmsnorm.numerics import reference
from rmsnorm.numerics.stages import scale_branch
from rmsnorm.spec import ROUNDINGS, make_spec

COLS = 24


@dataclass(frozen=True)
class Form:
    """One function and its options; `beside` names the tensor that it takes beside x."""

    name: str
    function: Callable[..., Any]
    beside: str | None
    options: dict[str, Any] = field(default_factory=dict)
    beside_dtype: torch.dtype | None = None  # None: x's

    def __str__(self) -> str:
        return f"{self.name}-{self.options['rounding']}"

    def tensors(self, shape: tuple[int, ...] = (6, COLS), dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
        """x, what lies beside it, and a weight."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator).to(dtype)
        other = torch.randn(shape, generator=generator).to(self.beside_dtype or dtype)
        weight = torch.rand(shape[-1], generator=generator).add(0.5)
        return [x, None if self.beside is None else other, weight]

    def __call__(self, x: Tensor, beside: Tensor | None, weight: Tensor | None, **more: Any) -> tuple[Tensor, ...]:
        """All results."""
        tensors = (x, weight) if beside is None else (x, beside, weight)
        results = self.function(*tensors, **self.options, **more)
        return results if isinstance(results, tuple) else (results,)

    def gradients(self, tensors: list[Tensor | None], **more: Any) -> list[Tensor]:
        """The results, and the gradients of what there is, for incoming gradients that depend on their places alone."""
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
        results = self(*leaves, **more)
        incoming = [incoming_gradient(r) for r in results]
        found = torch.autograd.grad(results, [t for t in leaves if t is not None], incoming)
        return [*(r.detach() for r in results), *found]

    def expected(self, tensors: list[Tensor | None]) -> list[Tensor]:
        """What `gradients` gives, by the reference."""
        x, beside, weight = tensors
        spec = make_spec(**self.options)
        if self.beside == "residual":
            y, h, rstd = reference.add_forward(x, beside, weight, spec)  # type: ignore[arg-type]
            dy, dh = incoming_gradient(y), incoming_gradient(h)
            dresidual, _, dweight = reference.backward(dy, h, None, rstd, weight, dh, spec)
            dx = scale_branch(dresidual.to(x.dtype), spec)  # type: ignore[union-attr]
            return [y, h, dx, dresidual, dweight]
        y, rstd = reference.forward(x, beside, weight, spec)  # type: ignore[arg-type]
        dx, dgate, dweight = reference.backward(incoming_gradient(y), x, beside, rstd, weight, None, spec)  # type: ignore[arg-type]
        return [y, dx, dweight] if dgate is None else [y, dx, dgate, dweight]


def incoming_gradient(result: Tensor) -> Tensor:
    """Of a result's shape and dtype, the same for a row wherever it stands."""
    row = torch.linspace(-1.0, 2.0, result.shape[-1]).to(result.dtype)
    return row.expand(result.shape).contiguous()


_ROWS = (
    ("plain", rms_norm, None, {}, None),
    ("groups", rms_norm, None, {"group_size": 8}, None),
    ("add", add_rms_norm, "residual", {}, None),
    ("add to float32", add_rms_norm, "residual", {}, torch.float32),
    ("add exactly", add_rms_norm, "residual", {"sum": "exact"}, None),
    ("add scaled", add_rms_norm, "residual", {"alpha": 0.22, "weight_offset": 1.0}, None),
    ("add in groups", add_rms_norm, "residual", {"group_size": 6, "sum": "exact", "alpha": 0.5}, torch.float32),
    ("gate last", gated_rms_norm, "gate", {}, None),
    ("gate first", gated_rms_norm, "gate", {"norm_before_gate": False, "activation": "sigmoid"}, None),
    ("gate in groups", gated_rms_norm, "gate", {"norm_before_gate": False, "group_size": 12}, None),
    ("float32 gate", gated_rms_norm, "gate", {"group_size": 4}, torch.float32),
)
FORMS = [
    Form(name, function, beside, {"eps": 1e-6, **options, "rounding": rounding}, dtype)
    for name, function, beside, options, dtype in _ROWS
    for rounding in ROUNDINGS
]
