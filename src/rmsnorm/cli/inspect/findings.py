"""What the weights of a norm say, and what looks wrong about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Trained gains are seldom negative, but for a layer or two; offsets from one are so about half the time, in all layers.
SHARE_BELOW_ZERO = 0.25
SHARE_OF_NORMS = 0.5
# Gains that stay this near to one would, stored as offsets from one, stay this near to zero.
NEAR_ONE = 0.5


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


def examine_weights(norms: Sequence[tuple[Norm, Tensor | None]], eps_of_config: Sequence[float]) -> list[Norm]:
    """The norms with their weights' ranges, and with what was found."""
    plain = [weight for norm, weight in norms if weight is not None and norm.weight_offset != 1.0]
    signed = sum(_below_zero(weight) >= SHARE_BELOW_ZERO for weight in plain)
    offsets = len(plain) > 0 and signed > SHARE_OF_NORMS * len(plain)
    return [_examine(norm, weight, eps_of_config, offsets) for norm, weight in norms]


def _examine(norm: Norm, weight: Tensor | None, eps_of_config: Sequence[float], offsets: bool) -> Norm:
    warnings, notes = list(norm.warnings), list(norm.notes)
    if norm.eps is not None and eps_of_config and not any(abs(norm.eps - e) <= 1e-3 * e for e in eps_of_config):
        configured = " or ".join(f"{e:g}" for e in eps_of_config)
        warnings.append(f"eps is {norm.eps:g}, not the configuration's {configured}")
    if weight is None:
        return replace(norm, warnings=warnings, notes=notes)
    wide = weight.detach().float().flatten()
    warnings += _warnings(wide, norm.weight_offset, offsets)
    notes += _notes(wide, weight.dtype, norm.weight_offset, offsets)
    finite = wide[wide.isfinite()]
    low, median, high = (
        (float(finite.min()), float(finite.median()), float(finite.max())) if len(finite) else (None, None, None)
    )
    return replace(
        norm,
        dtype=str(weight.dtype).removeprefix("torch."),
        low=low,
        high=high,
        median=median,
        warnings=warnings,
        notes=notes,
    )


def _below_zero(w: Tensor) -> float:
    return float((w <= 0).double().mean())


def _warnings(w: Tensor, weight_offset: float | None, offsets: bool) -> list[str]:
    if not w.isfinite().all():
        return [f"{int((~w.isfinite()).sum())} of {w.numel()} weights are not finite"]
    initial = {0.0: (1.0,), None: (1.0, 0.0)}.get(weight_offset, (1.0 - (weight_offset or 0.0),))
    if bool((w == w[0]).all()) and float(w[0]) in initial:
        return [f"all weights are {float(w[0]):g}, their initial value: never trained, or never loaded"]
    if weight_offset == 0.0 and offsets and _below_zero(w) >= SHARE_BELOW_ZERO:
        return ["many weights are not positive, in most layers: offsets from one, loaded as if they were gains?"]
    if weight_offset == 1.0 and bool(((w - 1).abs() < NEAR_ONE).all()):
        return ["all weights are near 1, and 1 is added to them: gains, loaded as if they were offsets from one?"]
    return []


def _notes(w: Tensor, dtype: torch.dtype, weight_offset: float | None, offsets: bool) -> list[str]:
    if weight_offset is None and offsets and _below_zero(w) >= SHARE_BELOW_ZERO:
        return ["many weights are not positive, in most layers: they look like offsets from one (weight_offset=1)"]
    near_one = float(((w >= 0.5) & (w < 2)).double().mean())
    if weight_offset == 1.0 or dtype.itemsize != 2 or near_one < 0.5:
        return []
    step = torch.finfo(dtype).eps
    short = str(dtype).removeprefix("torch.")
    return [
        f"most weights lie within a factor of 2 of 1, where {short} has steps of {step / 2:g} (below) and {step:g}: "
        "training in it loses updates of less than half of that"
    ]
