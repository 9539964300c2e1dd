"""A check, what it finds, and the words for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmsnorm.conformance.context import CheckContext

PASS, FAIL = "pass", "fail"
# Of an extra that does not hold.
NOT_PROMISED = "not promised"
# The implementation says that it does not take what was asked, which is not wrong.
REFUSED = "refused"
NOT_APPLICABLE = "not applicable"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Outcome:
    """What one check found: `measured` in a few words, `finding` in a sentence if something is wrong."""

    verdict: str
    measured: str
    finding: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def passed(measured: str, **figures: Any) -> Outcome:
    return Outcome(PASS, measured, "", figures)


def failed(measured: str, finding: str, **figures: Any) -> Outcome:
    return Outcome(FAIL, measured, finding, figures)


def refused(measured: str) -> Outcome:
    return Outcome(REFUSED, measured)


def not_applicable(measured: str) -> Outcome:
    return Outcome(NOT_APPLICABLE, measured)


@dataclass(frozen=True)
class Check:
    """One question: `meaning` is its answer where all is well; an extra is what only some promise.

    `about` is what it gives beside x: a residual, a gate, groups; nothing where it is about the norm of x alone.
    """

    name: str
    meaning: str
    run: Callable[[CheckContext], Outcome]
    extra: bool = False
    about: str = ""


@dataclass(frozen=True)
class Result:
    """The outcome of a check of one implementation."""

    name: str
    meaning: str
    extra: bool
    verdict: str
    measured: str
    finding: str
    figures: dict[str, Any]
