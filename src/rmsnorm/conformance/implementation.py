"""What is checked: somebody's RMSNorm, made to measure for each weight, eps and offset."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rmsnorm.conformance.refusal import is_refusal
from rmsnorm.patching.convention import short


class CannotCheck(Exception):
    """What was given cannot be checked at all; the message says why and what is allowed."""


class Raised(Exception):
    """The implementation raised an exception of its own, or returned no tensor of the input's shape."""


class Refused(Raised):
    """It said that it does not take the argument."""


class Crashed(Raised):
    """It broke down without such a word, or returned something else."""


class NoGradient(Raised):
    """The result, or x, gets no gradient: what comes before would silently stop learning."""


class BackwardRaised(Raised):
    """The backward raised an exception of its own."""


class Norm:
    """One norm, ready to be called; `weight` is the leaf that its gradient goes to, None without one."""

    def __init__(self, call: Callable[[Tensor], Any], weight: Tensor | None) -> None:
        self.call = call
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """The result for x.

        Raises:
            Refused, Crashed: it raised, or its result is no tensor of x's shape.
        """
        return checked(self.call, x)


def checked(call: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """`call(x)` as a tensor of x's shape; of a tuple its first (others are the residual sum, or rstd).

    Raises:
        Refused, Crashed: it raised, or there is none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = call(x)
    except (Exception, SystemExit) as error:  # a stranger's code may raise anything
        raise raised(error, f" for {size(x)} in {short(x.dtype)}") from error
    return as_result(y, x)


def raised(error: BaseException, where: str = "") -> Raised:
    """What an exception of the implementation is to a check."""
    return Refused(described(error)) if is_refusal(error) else Crashed(f"{described(error)}{where}")


def as_result(y: Any, x: Tensor) -> Tensor:
    """What a call returned, as a tensor of x's shape.

    Raises:
        Crashed: it is none.
    """
    if isinstance(y, (tuple, list)) and y:
        y = y[0]
    if not isinstance(y, Tensor):
        raise Crashed(f"it returned {type(y).__name__}, not a tensor")
    if y.shape != x.shape:
        raise Crashed(f"for an input of {size(x)} it returned {size(y)}")
    if not y.is_floating_point():
        raise Crashed(f"it returned {str(y.dtype).removeprefix('torch.')}")
    return y


def described(error: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".strip(": ")


def size(t: Tensor) -> str:
    """`2x3` for a tensor of two rows of three."""
    return "x".join(map(str, t.shape)) or "no dimensions"


@dataclass(frozen=True)
class Implementation:
    """An RMSNorm to be checked.

    Args:
        name: what the user called it.
        make: from weight, eps, offset and width to a callable and the leaf whose gradient is the weight's. None of eps
            and offset means its default; the width is the weight's, and counts alone without one.
        calls: how it is called, for the report.
        has_weight, takes_eps, takes_offset: what can be given to it.
        offsets: the offsets that can be given, besides none.
        width: the only one it has; None if any can be asked for.
        source: the package it comes from and its version.
        trains: whether it promises gradients at all.
        compiled: whether it is compiled already.
        promises: names of extra checks that it promises to pass, "all" for all of them.
    """

    name: str
    make: Callable[[Tensor | None, float | None, float | None, int], tuple[Callable[[Tensor], Any], Tensor | None]]
    calls: str
    has_weight: bool = True
    takes_eps: bool = True
    takes_offset: bool = False
    offsets: tuple[float, ...] = (1.0, 0.5)
    width: int | None = None
    source: str = ""
    trains: bool = True
    compiled: bool = False
    promises: frozenset[str] = field(default=frozenset())

    def norm(
        self,
        weight: Tensor | None,
        eps: float | None = None,
        offset: float | None = None,
        width: int | None = None,
    ) -> Norm:
        """The norm with a copy of this weight.

        Raises:
            Refused, Crashed: it cannot be made.
        """
        length = weight.numel() if weight is not None else width or self.width or 64
        own = weight.detach().clone() if weight is not None and self.has_weight else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call, leaf = self.make(own, eps, offset, length)
        except Exception as error:
            raise raised(error) from error
        return Norm(call, leaf)
