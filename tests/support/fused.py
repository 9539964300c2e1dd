"""Every function that fuses the norm with what stands around it, in every rounding, beside the steps it stands for.

A fused function has the bits of its steps, forward and backward. A function more is a row more here, and is then held
to all promises by tests/torch/test_fused.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rmsnorm import (
    add_rms_norm,
    modulated_rms_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_add_rms_norm,
    rms_norm_rotary,
)
from rmsnorm.ops.sharing import expand
from rmsnorm.spec import ROUNDINGS
from tests.support.forms import incoming_gradient

COLS = 24


@dataclass(frozen=True)
class Fused:
    """A function, its steps, and the tensors that it takes: some of x's shape, then vectors of a row."""

    name: str
    function: Callable[..., Any]
    steps: Callable[..., Any]
    rows: tuple[str, ...]
    vectors: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of tensors that have not x's
    pairs: bool = False  # columns come in pairs, which the order of the row's dimensions makes

    def __str__(self) -> str:
        return f"{self.name}-{self.options['rounding']}"

    def tensors(self, shape: tuple[int, ...] = (6, COLS), dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Rows, then vectors."""
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator).to(self.dtypes.get(name, dtype)) for name in self.rows]
        vectors = [torch.rand(shape[-1], generator=generator).add(0.5) for name in self.vectors]
        return made + [
            v.to(self.dtypes.get(name, torch.float32)) for name, v in zip(self.vectors, vectors, strict=True)
        ]

    def is_rows(self) -> list[bool]:
        return [True] * len(self.rows) + [False] * len(self.vectors)

    def each_row(self, function: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """The tensors, those of x's shape changed."""
        return [function(t) if is_rows else t for t, is_rows in zip(tensors, self.is_rows(), strict=True)]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _tuple(self.function(*tensors, **self.options))

    def by_steps(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _tuple(self.steps(*tensors, **self.options))

    def gradients(self, tensors: list[Tensor], function: Callable[..., Any] | None = None) -> list[Tensor]:
        """The results, and the gradients of all tensors."""
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        results = (function or self)(*leaves)
        found = torch.autograd.grad(results, leaves, [incoming_gradient(r) for r in results])
        return [*(r.detach() for r in results), *found]

    def expected(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.gradients(tensors, self.by_steps)


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def add(n: Tensor, residual: Tensor) -> Tensor:
    return (n.to(torch.promote_types(n.dtype, torch.float32)) + residual).to(residual.dtype)


def norm_then_add(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return add(rms_norm(x, weight, **options), residual)


def norm_then_add_norm(x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, **options: Any) -> Any:
    next_eps = options.pop("next_eps")
    n = rms_norm(x, weight, **options)
    return add_rms_norm(n, residual, next_weight, **(options | {"eps": next_eps}))


def rotated(norm: Callable[..., Tensor], x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """By angles that the width alone says, in x's dtype or in float32."""
    cols, device = (x.shape[-1], x.device) if isinstance(x, Tensor) else (COLS, None)
    width = options.get("rotary_dim", cols) // options.pop("columns_to_an_angle")
    angles = torch.linspace(-3, 3, width, dtype=torch.float32, device=device)
    dtype = torch.float32 if options["rotary_rounding"] == "once" or device is None else x.dtype
    return norm(x, weight, angles.cos().to(dtype), angles.sin().to(dtype), **options)


def fused_rotation(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return rotated(rms_norm_rotary, x, weight, **options)


def norm_then_rotation(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return rotated(norm_then_angles, x, weight, **options)


def angles_of_rows(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return rms_norm_rotary(x, weight, cos, sin, **options)


def angles_of_rows_by_steps(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return norm_then_angles(x, weight, cos, sin, **options)


def norm_then_angles(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    """Pairs as complex numbers have them: each operation rounded to n's dtype, or only the sum."""
    dim = options.pop("rotary_dim", None) or x.shape[-1]
    interleaved, each = options.pop("interleaved", False), options.pop("rotary_rounding", "once") == "each"
    n = rms_norm(x, weight, **options)
    wide = torch.promote_types(n.dtype, torch.float32)
    dtype = n.dtype if each else wide
    # As in norm_then_modulate.
    cos, sin = (expand(t.to(wide), (*n.shape[:-1], t.shape[-1])) for t in (cos, sin))
    pairs = (-1, (dim // 2, 2)) if interleaved else (-1, (2, dim // 2))
    place = -1 if interleaved else -2
    turned, rest = n.split((dim, n.shape[-1] - dim), -1)
    a, b = turned.to(dtype).unflatten(*pairs).unbind(place)
    (cos_a, cos_b), (sin_a, sin_b) = (
        t.unflatten(*pairs).unbind(place) if t.shape[-1] == dim else (t, t) for t in (cos.to(dtype), sin.to(dtype))
    )
    o = torch.stack((a * cos_a - b * sin_a, b * cos_b + a * sin_b), place).flatten(-2).to(n.dtype)
    return torch.cat((o, rest), -1)


def norm_then_modulate(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Gradients of scale and shift are trees over the rows that share them, be it one: never -0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    n = rms_norm(x.to(wide) if options["rounding"] == "once" else x, weight, **options)
    y = n.to(wide) * (1 + expand(scale.to(wide), x.shape)) + expand(shift.to(wide), x.shape)
    return y.to(x.dtype if options["rounding"] == "once" else n.dtype)


_STREAM = ("x", "residual")
_ROWS = (
    ("norm add", rms_norm_add, norm_then_add, _STREAM, ("weight",), {}, {}),
    ("norm add to float32", rms_norm_add, norm_then_add, _STREAM, ("weight",), {}, {"residual": torch.float32}),
    ("norm add offset", rms_norm_add, norm_then_add, _STREAM, ("weight",), {"weight_offset": 1.0}, {}),
    (
        *("norm add norm", rms_norm_add_rms_norm, norm_then_add_norm, _STREAM, ("weight", "next_weight")),
        *({"next_eps": 1e-5}, {"next_weight": torch.bfloat16}),
    ),
    (
        *("norm add norm in float32", rms_norm_add_rms_norm, norm_then_add_norm, _STREAM, ("weight", "next_weight")),
        *({"next_eps": 1e-2, "weight_offset": 1.0}, {"residual": torch.float32}),
    ),
    *(
        (name, fused_rotation, norm_then_rotation, ("x",), ("weight",), options, dtypes)
        for name, options, dtypes in (
            ("rotary", {"rotary_rounding": "once", "columns_to_an_angle": 2}, {}),
            ("rotary full width", {"rotary_rounding": "once", "columns_to_an_angle": 1}, {"weight": torch.bfloat16}),
            ("rotary each", {"rotary_rounding": "each", "columns_to_an_angle": 1, "weight_offset": 1.0}, {}),
            ("rotary pairs", {"rotary_rounding": "once", "columns_to_an_angle": 2, "interleaved": True}, {}),
            ("rotary pairs each", {"rotary_rounding": "each", "columns_to_an_angle": 1, "interleaved": True}, {}),
            ("rotary part", {"rotary_rounding": "each", "columns_to_an_angle": 2, "rotary_dim": 2}, {}),
        )
    ),
    ("rotary angles", angles_of_rows, angles_of_rows_by_steps, ("x", "cos", "sin"), ("weight",), {}, {}),
)
_ROWS += (
    ("modulation", modulated_rms_norm, norm_then_modulate, ("x", "scale", "shift"), ("weight",), {}, {}),
    (
        *("modulation of all rows", modulated_rms_norm, norm_then_modulate, ("x",), ("scale", "shift", "weight")),
        *({"weight_offset": 1.0}, {"shift": torch.bfloat16}),
    ),
)
FUSED = [
    Fused(
        *(name, function, steps, rows, vectors, {"eps": 1e-6, **options, "rounding": rounding}, dtypes),
        pairs="rotary" in name,
    )
    for name, function, steps, rows, vectors, options, dtypes in _ROWS
    for rounding in ROUNDINGS
]
