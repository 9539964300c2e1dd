"""What the weights of a norm say, and what looks wrong about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rmsnorm.cli.inspect.tensors import Stored
from rmsnorm.cli.text import printable

# Trained gains are seldom negative, but for a layer or two; offsets from one are so about half the time, in all layers.
SHARE_BELOW_ZERO = 0.25
SHARE_OF_NORMS = 0.5
# Gains that stay this near to one would, stored as offsets from one, stay this near to zero.
NEAR_ONE = 0.5
# One added once too often shifts every norm; trained weights of one or two norms may lie anywhere.
SHARE_SHIFTED = 0.75
# The largest weight of a norm that is read, and how many elements of all of them; known models have a 64th of either.
LARGEST, LARGEST_OF_ALL = 2**24, 2**28


@dataclass(frozen=True)
class Norm:
    """One norm; what is not known is None. `warnings` say what looks wrong, `notes` what is good to know."""

    name: str
    width: int | None
    convention: str | None
    eps: float | None
    weight_offset: float | None
    dtype: str | None = None
    low: float | None = None
    high: float | None = None
    median: float | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Values:
    """What is asked of a weight's values; shares and quartiles are of the finite ones."""

    count: int
    not_finite: int
    low: float
    quartiles: tuple[float, float, float]
    high: float
    below_zero: float
    near_one: float

    @property
    def only(self) -> float | None:
        """The value that all of them have, if there is one."""
        return self.low if self.low == self.high and not self.not_finite else None

    def around(self, center: float) -> bool:
        """Whether most of them lie near a value."""
        first, median, third = (quartile - center for quartile in self.quartiles)
        return -0.5 <= first <= third <= 0.5 and abs(median) <= 0.25


def eps_problem(eps: float) -> str | None:
    """Why a number can be no eps."""
    if not 0 <= eps < math.inf:
        return f"eps is {eps:g}: no norm can have that"
    return f"eps is {eps:g}: as large as the mean square of ordinary rows" if eps >= 1 else None


def examine_weights(
    norms: Sequence[tuple[Norm, Stored | None]], offsets_folded: bool = False, each: Callable[[], None] = lambda: None
) -> list[Norm]:
    """The norms with their weights' ranges, and with what was found.

    Args:
        norms: each with its weight, if there is one to be read.
        offsets_folded: whether the file has gains of a model that trained offsets from one.
        each: called after each norm.
    """
    left = LARGEST_OF_ALL
    read: list[Values | str | None] = []
    for _, stored in norms:
        if stored is None:
            read.append(None)
        elif stored.count > min(LARGEST, left):
            read.append(f"not examined: {stored.count} elements are more than any norm has")
        else:
            left -= stored.count
            read.append(_read(stored))
        each()
    known = [(norm, values) for (norm, _), values in zip(norms, read, strict=True) if isinstance(values, Values)]
    plain = [values for norm, values in known if norm.weight_offset != 1.0]
    doubts = Doubts(
        offsets=_most((v.below_zero >= SHARE_BELOW_ZERO for v in plain), SHARE_OF_NORMS),
        gains=_most((v.around(1.0) for norm, v in known if norm.weight_offset == 1.0), SHARE_SHIFTED),
        twice=offsets_folded and _most((v.around(2.0) for _, v in known), SHARE_SHIFTED),
    )
    return [_examined(norm, stored, v, doubts) for (norm, stored), v in zip(norms, read, strict=True)]


@dataclass(frozen=True)
class Doubts:
    """What most norms of the model look like: offsets, gains, or offsets with one added twice."""

    offsets: bool
    gains: bool
    twice: bool


def _most(found: Iterable[bool], share: float) -> bool:
    flags = list(found)
    return sum(flags) > share * len(flags)


def _read(stored: Stored) -> Values | str:
    """What its values are, or why that is not known."""
    try:
        t = stored.read()
        if not t.dtype.is_floating_point:
            return f"not examined: {stored.dtype}, which says nothing without its scale"
        return _summary(t.flatten() if t.dtype == torch.float64 else t.float().flatten())
    except Exception as error:  # a stranger's tensor may fail in any way
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"not examined: {stored.dtype}: {printable(said)}"


def _summary(w: Tensor) -> Values:
    finite = w[w.isfinite()].sort().values
    count = len(finite)
    if not count:
        return Values(w.numel(), w.numel(), math.nan, (math.nan,) * 3, math.nan, 0.0, 0.0)
    first, median, third = (float(finite[(count - 1) * quarter // 4]) for quarter in (1, 2, 3))
    return Values(
        count=w.numel(),
        not_finite=w.numel() - count,
        low=float(finite[0]),
        quartiles=(first, median, third),
        high=float(finite[-1]),
        below_zero=float((finite <= 0).double().mean()),
        near_one=float(((finite >= 0.5) & (finite < 2)).double().mean()),
    )


def _examined(norm: Norm, stored: Stored | None, values: Values | str | None, doubts: Doubts) -> Norm:
    if stored is None or values is None:
        return norm
    norm = replace(norm, dtype=stored.dtype)
    if isinstance(values, str):
        return replace(norm, warnings=[*norm.warnings, values])
    warnings = [*norm.warnings, *_warnings(values, norm.weight_offset, doubts)]
    notes = [*norm.notes, *_notes(values, stored.dtype, norm.weight_offset, doubts)]
    if values.not_finite == values.count:
        return replace(norm, warnings=warnings, notes=notes)
    low, median, high = values.low, values.quartiles[1], values.high
    return replace(norm, low=low, high=high, median=median, warnings=warnings, notes=notes)


def _warnings(w: Values, weight_offset: float | None, doubts: Doubts) -> list[str]:
    if not w.count:
        return ["the weight has no elements"]
    if w.not_finite:
        return [f"{w.not_finite} of {w.count} weights are not finite"]
    initial = {0.0: (1.0,), None: (1.0, 0.0)}.get(weight_offset, (1.0 - (weight_offset or 0.0),))
    if w.only in initial:
        return [f"all weights are {w.only:g}, their initial value: never trained, or never loaded"]
    if weight_offset is not None and w.only == -weight_offset:
        return [f"all weights are {w.only:g}: the result of the norm is 0"]
    if weight_offset == 0.0 and doubts.offsets and w.below_zero >= SHARE_BELOW_ZERO:
        return ["many weights are not positive, in most layers: offsets from one, loaded as if they were gains?"]
    near = w.around(1.0) if doubts.gains else max(abs(w.low - 1), abs(w.high - 1)) < NEAR_ONE
    if weight_offset == 1.0 and near:
        share = "most" if doubts.gains else "all"
        return [f"{share} weights are near 1, and 1 is added to them: gains, loaded as if they were offsets from one?"]
    if doubts.twice and w.around(2.0):
        return ["most weights are near 2, in most layers: was the 1 of the offsets from one added twice?"]
    return []


def _notes(w: Values, dtype: str, weight_offset: float | None, doubts: Doubts) -> list[str]:
    if weight_offset is None and doubts.offsets and w.below_zero >= SHARE_BELOW_ZERO:
        return ["many weights are not positive, in most layers: they look like offsets from one (weight_offset=1)"]
    format_ = getattr(torch, dtype, None)
    if weight_offset == 1.0 or not isinstance(format_, torch.dtype) or format_.itemsize > 2 or w.near_one < 0.5:
        return []
    step = torch.finfo(format_).eps
    return [
        f"most weights lie within a factor of 2 of 1, where {dtype} has steps of {step / 2:g} (below) and {step:g}: "
        "training in it loses updates of less than half of that"
    ]
