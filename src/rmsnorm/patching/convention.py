"""What a norm computes: in words, as arguments, and as the call that computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rmsnorm import functional


def short(dtype: torch.dtype | None) -> str:
    """`bfloat16` for torch.bfloat16."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Evidence:
    """How a module and its replacement compare on random rows of one pair of dtypes.

    Args:
        x, weight: the dtypes; weight None without one.
        apart: the largest distance of two results, in units in the last place.
        equal: the share of results that are equal.
        theirs, ours: the largest distance from exact arithmetic, in roundings (relative, half a unit of the precision).
    """

    x: torch.dtype
    weight: torch.dtype | None
    apart: int
    equal: float
    theirs: float
    ours: float

    def __str__(self) -> str:
        if self.equal == 1.0:
            return "equal"
        if self.apart <= 1:
            return f"1 ulp ({self.equal:.0%} equal)"
        return f"{self.apart} ulp ({self.theirs:.1f} roundings from exact, now {self.ours:.1f})"


@dataclass(frozen=True)
class Convention:
    """One norm's conventions.

    Args:
        shape: of the row, the dimensions it normalises and scales; None if it takes any width.
        weight: the name of the parameter or buffer that scales; None without one.
        eps: None means finfo(computation dtype).eps.
        eps_name: the attribute that holds it, if one does.
        autocast: the kinds of devices whose autocast leaves its results as they are.
        square: whether inputs were tried in which another dimension has the size of a row.
        weight_offset, rounding, group_size: as for `rmsnorm.rms_norm`.
        activation, norm_before_gate: as for `rmsnorm.gated_rms_norm`; activation None without a gate.
        evidence: what each pair of dtypes showed; pairs that are missing are not replaced.
        dims: of images, whose channels are the rows, 4, or 5 for videos; None where rows are the last dimension.
    """

    shape: tuple[int, ...] | None
    weight: str | None
    eps: float | None
    weight_offset: float = 0.0
    rounding: str = "once"
    group_size: int | None = None
    activation: str | None = None
    norm_before_gate: bool = True
    eps_name: str | None = None
    autocast: frozenset[str] = field(default=frozenset(), compare=False)
    square: bool = field(default=True, compare=False)
    evidence: tuple[Evidence, ...] = field(default=(), compare=False)
    dims: int | None = None

    @property
    def width(self) -> int | None:
        """The number of elements of the row; None if any will do."""
        return None if self.shape is None else torch.Size(self.shape).numel()

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `rms_norm` or `gated_rms_norm` that are not their defaults, eps aside."""
        chosen: dict[str, Any] = {}
        if self.activation is not None:
            chosen |= {"activation": self.activation, "norm_before_gate": self.norm_before_gate}
        if self.group_size is not None:
            chosen["group_size"] = self.group_size
        if self.weight_offset:
            chosen["weight_offset"] = self.weight_offset
        if self.rounding != "once":
            chosen["rounding"] = self.rounding
        return chosen

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments with which `RMSNorm` (or `GatedRMSNorm`, with an activation) reproduces it."""
        shape = self.shape
        dim = shape[0] if shape is not None and len(shape) == 1 else shape
        affine = {} if self.weight is not None else {"elementwise_affine": False}
        axis = {} if self.dims is None else {"axis": 1}
        return {"dim": dim, "eps": self.eps, **affine, **self.options, **axis}

    def apply(self, x: Tensor, weight: Tensor | None, gate: Tensor | None = None) -> Tensor:
        """The norm of the rows of x by this library, in this convention."""
        shape = x.shape
        rows = 1 if self.shape is None else len(self.shape)
        if weight is not None and weight.shape != self.shape:
            weight = weight.reshape(self.shape or ())
        if rows > 1 and (self.group_size is not None or self.activation is not None):
            x, gate = x.flatten(-rows), None if gate is None else gate.flatten(-rows)
            weight = None if weight is None else weight.flatten()
        if self.activation is None:
            whole = self.shape if rows > 1 and weight is None and self.group_size is None else None
            y = functional.rms_norm(x, weight, self.eps, normalized_shape=whole, **self.options)
        else:
            assert gate is not None  # noqa: S101 - callers of a gated convention give one
            y = functional.gated_rms_norm(x, gate, weight, self.eps, **self.options)
        return y if y.shape == shape else y.view(shape)

    def apply_to_images(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """The norm of the channels."""
        weight = None if weight is None else weight.flatten()
        return functional.rms_norm(x, weight, self.eps, axis=1, **self.options)

    def __str__(self) -> str:
        width = "any width" if self.shape is None else f"width {'x'.join(map(str, self.shape))}"
        parts = [width, f"eps {'finfo' if self.eps is None else format(self.eps, '.6g')}"]
        if self.weight is None:
            parts.append("no weight")
        elif self.weight_offset:
            parts.append(f"{self.weight} + {self.weight_offset:g}")
        else:
            parts.append(self.weight)
        parts.append(self.rounding)
        if self.dims is not None:
            parts.append(f"channels of {self.dims} dimensions")
        if self.group_size is not None:
            parts.append(f"groups of {self.group_size}")
        if self.activation is not None:
            parts.append(f"{self.activation} gate {'after' if self.norm_before_gate else 'before'} the norm")
        return ", ".join(parts)

    def proof(self) -> str:
        """What the evidence says, dtype by dtype, and for how many pairs of different dtypes there is some."""
        plain = [e for e in self.evidence if e.weight in (None, e.x)]
        mixed = len(self.evidence) - len(plain)
        said = "; ".join(f"{short(e.x)}: {e}" for e in plain)
        return f"{said}; {mixed} mixed pairs" if mixed else said
