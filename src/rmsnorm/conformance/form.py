"""Which RMSNorm an implementation is: offset, eps and its place, rounding. Found by running it, faults and all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from rmsnorm.conformance import exact
from rmsnorm.conformance.implementation import Implementation, Raised
from rmsnorm.numerics import reference
from rmsnorm.patching.probes import measure_gain, probe
from rmsnorm.patching.specimen import NotRMSNorm
from rmsnorm.spec import ROUNDINGS, make_spec

WIDTH = 64
# What every implementation that takes an eps is given, unless a check is about eps.
EPS = 1e-5
# Rows this small show nothing but eps, and their squares are still normal numbers of float32.
_TINY = 1e-15
_MATCH = 1e-3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Form:
    """What an implementation computes.

    Args:
        offset: what it adds to the weight.
        eps: what it was seen to use, and `place` where (exact.PLACES); None if no place explains its small rows.
        rounding: the nearest of spec.ROUNDINGS.
        weighted: whether there is a weight.
    """

    offset: float
    eps: float | None
    place: str
    rounding: str
    weighted: bool

    def gain(self, weight: Tensor | None, offset: float | None = None) -> Tensor | None:
        """What x_hat is multiplied by, in float64."""
        return None if weight is None else weight.double() + (self.offset if offset is None else offset)

    def precision(self, x: torch.dtype, weight: torch.dtype | None, result: torch.dtype) -> torch.dtype:
        """The coarsest dtype that its convention rounds to on the way to the result."""
        on_the_way = {"before_scale": x, "weight_dtype": weight}.get(self.rounding)
        return max((result, on_the_way or result), key=lambda dtype: torch.finfo(dtype).eps)

    def __str__(self) -> str:
        parts = [exact.FORMULAS[self.place].replace("eps", f"{self.eps:.3g}" if self.eps is not None else "?")]
        if self.weighted:
            parts[0] += f" * (w + {self.offset:g})" if self.offset else " * w"
            words = {"once": "rounded once", "before_scale": "rounded before the weight, and after"}
            parts.append(words.get(self.rounding, "rounded to the weight's dtype, and after"))
        return ", ".join(parts)


def find(implementation: Implementation, device: torch.device) -> Form:
    """The form of an implementation, in float32.

    Raises:
        NotRMSNorm: it has none, and why.
        Refused, Crashed: it does not run on ordinary rows of float32.
    """
    width = implementation.width or WIDTH
    generator = torch.Generator().manual_seed(3)
    x = probe((width,), generator, torch.device("cpu"))
    weight = torch.empty(width).uniform_(0.5, 1.5, generator=generator) if implementation.has_weight else None
    norm = implementation.norm(
        None if weight is None else weight.to(device), EPS if implementation.takes_eps else None, width=width
    )

    def run(x: Tensor) -> Tensor:
        # Two dimensions, which everybody has; others are for a check of their own.
        return norm(x.flatten(0, -2).to(device)).detach().cpu().view(x.shape)

    group, name, offset, gain, _ = measure_gain(run, x, (width,), {} if weight is None else {"weight": weight})
    if group != width:
        raise NotRMSNorm(f"it normalises groups of {group} of {width} elements; the suite is for whole rows", True)
    if weight is not None and name is None:
        raise NotRMSNorm("its weight has no effect", True)
    offset = offset if name else 0.0

    def reciprocals(scale: float) -> Tensor:
        rows = x * scale
        return (run(rows).double() / (rows.double() * gain)).flatten(0, 1)

    eps, place = _eps(reciprocals, x.flatten(0, 1), EPS if implementation.takes_eps else None)
    rounding = _rounding(implementation, offset, eps if eps is not None and place == "inside" else EPS, width, device)
    return Form(offset, eps, place or "inside", rounding, weight is not None)


def _eps(reciprocals: Callable[[float], Tensor], x: Tensor, given: float | None) -> tuple[float | None, str | None]:
    """Eps and its place: those that explain rows much smaller than eps, about as large, and larger."""
    smallest = float((1 / reciprocals(_TINY)).median())
    scales = [_TINY, *(factor * smallest for factor in (0.1, 0.3, 1.0, 3.0))]
    seen = [reciprocals(scale).median(-1, keepdim=True).values for scale in scales]
    values = [given] if given is not None else []
    # Where none was given, or not used: whatever the tiny rows show, under each place.
    for eps in (*values, smallest**2, smallest):
        for place in exact.PLACES:
            candidate = float(f"{eps:.2e}") if abs(float(f"{eps:.2e}") - eps) <= _MATCH * eps else eps
            used = 0.0 if place == "nowhere" else candidate
            predicted = [exact.reciprocal(x * scale, used, place) for scale in scales]
            if all(_near(p, s) for p, s in zip(predicted, seen, strict=True)):
                return used, place
    return None, None


def _near(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= _MATCH * b.abs()).all())


def _rounding(implementation: Implementation, offset: float, eps: float, width: int, device: torch.device) -> str:
    """The convention that has most of its 16-bit results to the bit, and their dtypes."""
    if not implementation.has_weight:
        return "once"
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn(64, width, generator=generator)
    gain = torch.randn(width, generator=generator)
    scores = dict.fromkeys(ROUNDINGS, 0.0)
    for x_dtype, weight_dtype in product(DTYPES, DTYPES):
        if x_dtype == weight_dtype == torch.float32:
            continue
        x, weight = wide.to(x_dtype), (gain - offset).to(weight_dtype)
        try:
            norm = implementation.norm(weight.to(device), eps if implementation.takes_eps else None)
            y = norm(x.to(device)).detach().cpu()
        except Raised:
            continue
        for rounding in scores:
            expected, _ = reference.forward(x, None, weight, make_spec(eps, offset, rounding))
            # Values count first: one that returns a wrong dtype has its rounding all the same.
            same = float((y.to(expected.dtype) == expected).double().mean())
            scores[rounding] += same + 0.5 * (y.dtype == expected.dtype)
    return max(scores, key=lambda rounding: scores[rounding])
