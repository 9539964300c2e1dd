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
# How near a median over a row comes, by the size of its numbers.
_MATCH = {4: 1e-3, 2: 4e-3}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Form:
    """What an implementation computes.

    Args:
        offset: what it adds to the weight.
        eps: what it was seen to use, and `place` where (exact.PLACES); None if no place explains its small rows.
        rounding: the nearest of spec.ROUNDINGS.
        weighted: whether there is a weight.
        group: the size of the groups that are normalised; None for whole rows.
        quantized: how the result is quantised, in words; nothing if it is not.
    """

    offset: float
    eps: float | None
    place: str
    rounding: str
    weighted: bool
    group: int | None = None
    quantized: str = ""

    def gain(self, weight: Tensor | None, offset: float | None = None) -> Tensor | None:
        """What x_hat is multiplied by, in float64."""
        return None if weight is None else weight.double() + (self.offset if offset is None else offset)

    def normalized(self, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        """y of this form in float64."""
        return exact.normalized(x, gain, eps, self.place, self.group)

    def reciprocal(self, x: Tensor, eps: float) -> Tensor:
        """What each element is multiplied by, in float64."""
        rows = self.grouped(x.double())
        return exact.reciprocal(rows, eps, self.place).expand_as(rows).flatten(-2)

    def mean(self, terms: Tensor) -> Tensor:
        """The mean over its row or group, at each element."""
        rows = self.grouped(terms)
        return rows.mean(-1, keepdim=True).expand_as(rows).flatten(-2)

    def grouped(self, x: Tensor) -> Tensor:
        """(..., d) as (..., groups, size), with one group for a whole row."""
        return exact.grouped(x, self.group)

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
        if self.group:
            parts.append(f"in groups of {self.group}")
        if self.quantized:
            parts[1:] = [self.quantized]
        return ", ".join(parts)


def find(implementation: Implementation, device: torch.device) -> Form:
    """The form of an implementation: in float32, or in 16 bits if it takes nothing else.

    Raises:
        NotRMSNorm: it has none, and why.
        Refused, Crashed: it does not run on ordinary rows.
    """
    first: Raised | None = None
    for dtype in DTYPES:
        try:
            return _find(implementation, device, dtype)
        except Raised as error:
            first = first or error
    assert first is not None  # noqa: S101 - there are dtypes
    raise first


def _find(implementation: Implementation, device: torch.device, dtype: torch.dtype) -> Form:
    width = implementation.width or WIDTH
    generator = torch.Generator().manual_seed(3)
    x = probe((width,), generator, torch.device("cpu"))
    weight = torch.empty(width).uniform_(0.5, 1.5, generator=generator) if implementation.has_weight else None
    norm = implementation.norm(
        None if weight is None else weight.to(device, dtype), EPS if implementation.takes_eps else None, width=width
    )

    def run(x: Tensor) -> Tensor:
        # Two dimensions, which everybody has; others are for a check of their own.
        return norm(x.flatten(0, -2).to(device, dtype)).detach().cpu().view(x.shape)

    if dtype == torch.float32:
        tensors = {} if weight is None else {"weight": weight}
        group, name, offset, gain, _ = measure_gain(run, x, (width,), tensors)
    else:
        group, name, offset, gain = _gain_in_16_bits(run, x.to(dtype), None if weight is None else weight.to(dtype))
    if weight is not None and name is None:
        raise NotRMSNorm("its weight has no effect", True)
    offset = offset if name else 0.0

    def rows(scale: float) -> Tensor:
        return exact.grouped((x * scale).to(dtype), group).flatten(0, -2)

    def reciprocals(scale: float) -> Tensor:
        wide = (x * scale).to(dtype)
        return exact.grouped(run(wide).double() / (wide.double() * gain), group).flatten(0, -2)

    eps, place = _eps(reciprocals, rows, EPS if implementation.takes_eps else None, _MATCH[dtype.itemsize])
    used = eps if eps is not None and place == "inside" else EPS
    whole = group == width
    rounding = _rounding(implementation, offset, used, width, None if whole else group, device)
    return Form(offset, eps, place or "inside", rounding, weight is not None, None if whole else group)


def _gain_in_16_bits(
    run: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None
) -> tuple[int, str | None, float, Tensor]:
    """As `measure_gain`, of whole rows, whose results have a few digits: the offset is none, or one."""
    y = run(x * 64).double()
    for offset in (0.0, 1.0) if weight is not None else (0.0,):
        gain = torch.ones(x.shape[-1]).double() if weight is None else weight.double() + offset
        apart = (y - exact.normalized(x * 64, None, 0.0) * gain).abs()
        if bool((apart <= 2.0**-5 * y.abs().amax()).all()):
            return x.shape[-1], None if weight is None else "weight", offset, gain
    raise NotRMSNorm("its result in 16 bits is not the norm of whole rows", True)


def _eps(
    reciprocals: Callable[[float], Tensor], rows: Callable[[float], Tensor], given: float | None, match: float
) -> tuple[float | None, str | None]:
    """Eps and its place: those that explain rows much smaller than eps, about as large, and larger."""
    smallest = float((1 / reciprocals(_TINY)).median())
    scales = [_TINY, *(factor * smallest for factor in (0.1, 0.3, 1.0, 3.0))]
    seen = [reciprocals(scale).median(-1, keepdim=True).values for scale in scales]
    values = [given] if given is not None else []
    # Where none was given, or not used: whatever the tiny rows show, under each place.
    for eps in (*values, smallest**2, smallest):
        for place in exact.PLACES:
            candidate = float(f"{eps:.2e}") if abs(float(f"{eps:.2e}") - eps) <= match * eps else eps
            used = 0.0 if place == "nowhere" else candidate
            predicted = [exact.reciprocal(rows(scale), used, place) for scale in scales]
            if all(_near(p, s, match) for p, s in zip(predicted, seen, strict=True)):
                return used, place
    return None, None


def _near(a: Tensor, b: Tensor, match: float) -> bool:
    return bool(((a - b).abs() <= match * b.abs()).all())


def _rounding(
    implementation: Implementation, offset: float, eps: float, width: int, group: int | None, device: torch.device
) -> str:
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
            expected, _ = reference.forward(x, None, weight, make_spec(eps, offset, rounding, group))
            # Values count first, of equal dtypes: one that returns another dtype has its rounding all the same.
            same = float((y.to(expected.dtype) == expected).double().mean())
            scores[rounding] += same * (10 if x_dtype == weight_dtype else 1) + 0.5 * (y.dtype == expected.dtype)
    return max(scores, key=lambda rounding: scores[rounding])
