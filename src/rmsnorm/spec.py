"""NormSpec: one record of everything that says which norm is computed, and the checks of those options.

The fields are scalars in the order of the operators' arguments (ops/library.py); choices are indices into the tuples of
names below. A feature that needs an option more is a field more here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Where x_hat is rounded before the weight multiplies it, and which dtype comes out (docs/numerics.md, "Rounding").
ROUNDINGS = ("once", "before_scale", "weight_dtype")
ACTIVATIONS = ("silu", "sigmoid")
# Whether the sum of branch and residual is rounded before it is normalised.
SUMS = ("rounded", "exact")

_INF = float("inf")  # compared with, and not math.isfinite: torch.compile traces a dynamic eps through a comparison


class NormSpec(NamedTuple):
    """Which norm: what `make_spec` has checked.

    Attributes:
        eps, weight_offset: finite numbers.
        rounding: an index into `ROUNDINGS`.
        group_size: how many consecutive elements share their statistics; 0 means the whole row.
        activation: of the gate, an index into `ACTIVATIONS`.
        gate_first: whether the gate multiplies what is normalised, and not the result.
        exact_sum: whether x + residual is normalised before it is rounded.
        alpha: multiplies x before the residual is added.
        partial: how many elements of the row its statistics are of, the first ones; 0 means all of them.
    """

    eps: float
    weight_offset: float = 0.0
    rounding: int = 0
    group_size: int = 0
    activation: int = 0
    gate_first: bool = False
    exact_sum: bool = False
    alpha: float = 1.0
    partial: int = 0

    @property
    def plain_sum(self) -> bool:
        """Whether the narrow `add_forward` computes it: a rounded sum, no groups."""
        return self.group_size == 0 and not self.exact_sum and self.alpha == 1.0


def make_spec(
    eps: Any = 1e-6,
    weight_offset: Any = 0.0,
    rounding: Any = "once",
    group_size: Any = None,
    *,
    activation: Any = "silu",
    norm_before_gate: Any = True,
    sum: Any = "rounded",  # noqa: A002 - the name of the public argument
    alpha: Any = 1.0,
    dtype: torch.dtype | None = None,
) -> NormSpec:
    """The record of options as a user writes them; `dtype` is x's, for eps=None.

    Raises:
        ValueError, TypeError: an option is not what it may be.
    """
    return NormSpec(
        check_eps(eps, dtype),
        check_number(weight_offset, "weight_offset"),
        check_choice(rounding, "rounding", ROUNDINGS),
        check_group_size(group_size),
        check_choice(activation, "activation", ACTIVATIONS),
        not check_flag(norm_before_gate, "norm_before_gate"),
        check_choice(sum, "sum", SUMS) == 1,
        check_number(alpha, "alpha"),
    )


def check_eps(eps: Any, x_dtype: torch.dtype | None = None, name: str = "eps") -> float:
    """A finite float; text is converted, None means finfo of the computation dtype, as in torch.nn.RMSNorm."""
    if eps is None:
        return torch.finfo(torch.float64 if x_dtype == torch.float64 else torch.float32).eps
    try:
        value = _number(eps)
    except (TypeError, ValueError):
        raise (ValueError if isinstance(eps, str) else TypeError)(
            f"{name} must be a number, text that reads as one, or None, got {eps!r}"
        ) from None
    if not -_INF < value < _INF:
        raise ValueError(f"{name} must be finite, got {eps!r}")
    return value


def check_number(value: Any, name: str) -> float:
    """A finite float."""
    try:
        number = float("nan") if isinstance(value, str) else _number(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a finite number, got {value!r}") from None
    if not -_INF < number < _INF:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _number(value: Any) -> float:
    # A bool in a number's place is an argument out of order, as in RMSNorm(8, True). Options have no gradient.
    if isinstance(value, (bool, bytes, bytearray)):
        raise TypeError
    if isinstance(value, Tensor) and (value.dtype == torch.bool or value.requires_grad or value.is_meta):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        return _INF


def check_choice(value: Any, name: str, choices: tuple[str, ...]) -> int:
    """The index of one of the names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return choices.index(value)


def check_flag(value: Any, name: str) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_group_size(group_size: Any, cols: int | None = None) -> int:
    """A positive integer, which divides `cols` where that is known; 0 for None, the whole row."""
    if group_size is None:
        return 0
    if not is_integer(group_size) or group_size < 1 or (cols is not None and cols % group_size):
        divides = "" if cols is None else f" that divides the last dimension {cols}"
        raise ValueError(f"group_size must be a positive integer{divides}, got {group_size!r}")
    return group_size if isinstance(group_size, torch.SymInt) else int(group_size)  # type: ignore[return-value]


def check_partial(partial: Any, cols: int) -> int:
    """How many of the first elements count: an integer up to `cols`, or a share of them; 0 for all."""
    if partial is None:
        return 0
    share = isinstance(partial, float) and 0.0 < partial <= 1.0
    if not share and not (is_integer(partial) and 1 <= partial <= cols):
        raise ValueError(
            f"partial must be an integer from 1 to the last dimension {cols}, or a float in (0, 1], got {partial!r}"
        )
    counted = math.ceil(partial * cols) if share else int(partial)
    return 0 if counted == cols else counted


def check_shape(shape: Any, name: str) -> tuple[int, ...]:
    """At least one dimension, all of them positive."""
    dims = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, (str, bytes)) else (shape,)
    if not dims or not all(is_integer(d) and d > 0 for d in dims):
        raise ValueError(f"{name} must be a positive integer or a non-empty shape of them, got {shape!r}")
    return tuple(d if isinstance(d, torch.SymInt) else int(d) for d in dims)  # type: ignore[misc]


def is_integer(d: Any) -> bool:
    """An integer of any library's kind; a bool is none."""
    return isinstance(d, (int, torch.SymInt, Integral)) and not isinstance(d, bool)
