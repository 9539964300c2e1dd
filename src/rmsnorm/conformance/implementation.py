"""What is checked: somebody's RMSNorm, made to measure for each weight, eps and offset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rmsnorm.conformance.refusal import is_refusal
from rmsnorm.patching.convention import short

# The dtypes of quantised results, and the largest number of each that is used.
QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


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
    """One norm, ready to be called.

    Args:
        call: from x, and from what it takes besides by name, to its result.
        weight: the leaf that its gradient goes to, None without one.
        takes: of "residual" and "gate", those that it takes, and by which names.
    """

    def __init__(
        self, call: Callable[..., Any], weight: Tensor | None, takes: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.call = call
        self.weight = weight
        self.takes = takes

    def __call__(self, x: Tensor, **others: Tensor) -> Tensor:
        """The result for x, and maybe for a residual or a gate.

        Raises:
            Refused, Crashed: it raised, or its result is no tensor of x's shape.
        """
        return as_result(self._returned(x, **others), x)

    def with_residual(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """The result, and the sum if it returns that too.

        Raises:
            Refused, Crashed: it raised, or its result is no tensor of x's shape.
        """
        found = self._returned(x, residual=residual)
        h = found[1] if isinstance(found, (tuple, list)) and len(found) > 1 else None
        return as_result(found, x), h if isinstance(h, Tensor) and h.shape == x.shape else None

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q and its scales.

        Raises:
            Refused, Crashed: it raised, or returned something else.
        """
        found = self._returned(x)
        if (pair := quantized_pair(found)) is None:
            raise Crashed("it returned no quantised tensor with its scales")
        return pair

    def _returned(self, x: Tensor, **others: Tensor) -> Any:
        return returned(self.call, x, **{self.takes[role]: tensor for role, tensor in others.items()})


def returned(call: Callable[..., Any], x: Tensor, **others: Tensor) -> Any:
    """What a call gives.

    Raises:
        Refused, Crashed: it raised.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(x, **others)
    except (Exception, SystemExit) as error:  # a stranger's code may raise anything
        raise raised(error, f" for {size(x)} in {short(x.dtype)}") from error


def raised(error: BaseException, where: str = "") -> Raised:
    """What an exception of the implementation is to a check."""
    return Refused(described(error)) if is_refusal(error) else Crashed(f"{described(error)}{where}")


def as_result(y: Any, x: Tensor) -> Tensor:
    """What a call returned, as a tensor of x's shape.

    Raises:
        Crashed: it is none.
    """
    if (pair := quantized_pair(y)) is not None and pair[0].shape == x.shape and x.numel() % pair[1].numel() == 0:
        q, scale = pair
        return (q.float().reshape(scale.numel(), -1) * scale.float().reshape(-1, 1)).reshape(x.shape)
    if isinstance(y, (tuple, list)) and y:
        y = y[0]
    if not isinstance(y, Tensor):
        raise Crashed(f"it returned {type(y).__name__}, not a tensor")
    if y.shape != x.shape:
        raise Crashed(f"for an input of {size(x)} it returned {size(y)}")
    if not y.is_floating_point():
        raise Crashed(f"it returned {str(y.dtype).removeprefix('torch.')}")
    return y


def quantized_pair(found: Any) -> tuple[Tensor, Tensor] | None:
    """q and scale of a result that begins with them; None if it does not."""
    if not isinstance(found, (tuple, list)) or len(found) < 2:
        return None
    q, scale = found[:2]
    if not isinstance(q, Tensor) or not isinstance(scale, Tensor) or q.dtype not in QUANTIZED:
        return None
    return (q, scale) if scale.numel() and scale.dtype not in (torch.int8, torch.bool) else None


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
        takes: of "residual" and "gate", those that it takes besides x, and by which names.
        in_place: whether the result is written over x, and the sum over the residual.
        plain: whether it can be asked for the norm of x alone, maybe with a residual of zeros or an open gate.
        quantized: whether its result is a quantised tensor and its scales.
        grouped: from a group's size to the implementation with such groups; None if there are none to be asked for.
        offsets: the offsets that can be given, besides none.
        width: the only one it has; None if any can be asked for.
        source: the package it comes from and its version.
        trains: whether it promises gradients at all.
        compiled: whether it is compiled already.
        promises: names of extra checks that it promises to pass, "all" for all of them.
    """

    name: str
    make: Callable[[Tensor | None, float | None, float | None, int], tuple[Callable[..., Any], Tensor | None]]
    calls: str
    has_weight: bool = True
    takes_eps: bool = True
    takes_offset: bool = False
    takes: Mapping[str, str] = field(default_factory=dict)
    in_place: bool = False
    plain: bool = True
    quantized: bool = False
    grouped: Callable[[int], Implementation] | None = None
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
        return Norm(call, leaf, self.takes)
