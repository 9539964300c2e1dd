"""All checks, in order, and an implementation taken through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from rmsnorm.conformance import (
    accuracy,
    calls,
    gated,
    gradients,
    graph,
    groups,
    inputs,
    invariance,
    memory,
    quantized,
    residual,
    settings,
    sizes,
)
from rmsnorm.conformance.context import CheckContext
from rmsnorm.conformance.form import WIDTH, Form, find
from rmsnorm.conformance.implementation import Implementation, Raised, Refused
from rmsnorm.conformance.outcome import (
    FAIL,
    NOT_APPLICABLE,
    NOT_PROMISED,
    NOT_RUN,
    PASS,
    REFUSED,
    Check,
    Outcome,
    Result,
    failed,
    not_applicable,
    passed,
    refused,
)
from rmsnorm.patching.specimen import NotRMSNorm

CONVENTION = Check("convention", "It is an RMSNorm, of this form.", lambda context: passed(str(context.form)))
# What is measured of an implementation that is no RMSNorm.
NO_FORM = "no convention"
# Why an implementation is not asked about what stands around a norm, and about what does not.
NOT_ASKED = {
    "residual": "it takes no residual",
    "gate": "it takes no gate",
    "groups": "it takes no groups",
    "quantized": "its result is not quantised",
    "": "its result is quantised",
}
CHECKS = (
    CONVENTION,
    *accuracy.checks(),
    *settings.checks(),
    *inputs.checks(),
    *sizes.checks(),
    *gradients.checks(),
    *graph.checks(),
    *calls.checks(),
    *memory.checks(),
    *residual.checks(),
    *gated.checks(),
    *groups.checks(),
    *quantized.checks(),
    *invariance.checks(),
    *invariance.extras(),
    *accuracy.extras(),
)


@dataclass(frozen=True)
class Expected:
    """What the user says that the convention is; None where nothing is said."""

    offset: float | None = None
    rounding: str | None = None

    def differs(self, form: Form) -> str:
        """How a form is another one; nothing if it is not."""
        if self.offset is not None and form.offset != self.offset:
            return f"the offset is {form.offset:g}, and {self.offset:g} was expected"
        if self.rounding is not None and form.weighted and form.rounding != self.rounding:
            return f"the rounding is {form.rounding}, and {self.rounding} was expected"
        return ""


def chosen(only: Iterable[str]) -> tuple[Check, ...]:
    """The checks with these names, or whose names begin with one of them and a dash; all of them without any."""
    wanted = tuple(only)
    if not wanted:
        return CHECKS
    return tuple(c for c in CHECKS if any(c.name == name or c.name.startswith(f"{name}-") for name in wanted))


def run(
    implementation: Implementation,
    checks: Iterable[Check] = CHECKS,
    *,
    device: torch.device,
    expected: Expected = Expected(),
    strict: bool = False,
    step: Callable[[str], None] = lambda name: None,
) -> Iterator[Result]:
    """Yield the result of each check as it is there; `step` hears a check's name before it begins.

    Args:
        implementation: what is checked.
        checks: some of CHECKS.
        device: where it runs.
        expected: of the convention.
        strict: extras are scored too, as if the implementation promised them.
        step: for a progress bar.
    """
    step(CONVENTION.name)
    threads = torch.get_num_threads()
    try:
        form = (quantized.find if implementation.quantized else find)(implementation, device)
    except (NotRMSNorm, Raised) as reason:
        why = "no RMSNorm" if isinstance(reason, NotRMSNorm) else "does not run on ordinary rows"
        yield from without_form(checks, failed("not recognised", f"{why}: {reason}"))
        return
    if form.group:  # what other widths would be divided into is not known
        implementation = replace(implementation, width=implementation.width or WIDTH)
    context = CheckContext(implementation, form, device)
    for check in checks:
        if check is not CONVENTION:
            step(check.name)
        if torch.get_num_threads() != threads:  # an earlier call has changed it, which is for a check to say
            torch.set_num_threads(threads)
        yield result_of(check, _outcome(check, context, expected, strict))


def without_form(checks: Iterable[Check], why: Outcome) -> Iterator[Result]:
    """The results where the convention could not be found: that, and no others."""
    yield result_of(CONVENTION, why)
    yield from (result_of(check, not_applicable(NO_FORM)) for check in checks if check is not CONVENTION)


def _not_asked(check: Check, context: CheckContext) -> str:
    """Why a check is not about this implementation; nothing if it is."""
    implementation = context.implementation
    has = {
        "": not implementation.quantized,
        "quantized": implementation.quantized,
        "groups": implementation.grouped is not None or context.form.group is not None,
        **{role: role in implementation.takes for role in ("residual", "gate")},
    }
    if check is CONVENTION:
        return ""
    if implementation.quantized and check.about != "quantized":
        return NOT_ASKED[""]
    if not has[check.about]:
        return NOT_ASKED[check.about]
    return "" if implementation.plain or check.about == "gate" else "asked with its gate alone, which comes first"


def _outcome(check: Check, context: CheckContext, expected: Expected, strict: bool) -> Outcome:
    if reason := _not_asked(check, context):
        return not_applicable(reason)
    if check is CONVENTION and (said := expected.differs(context.form)):
        return failed(str(context.form), said)
    try:
        outcome = check.run(context)
    except Refused as error:
        return refused(f"refused: {error}")
    except Raised as error:
        outcome = failed("raises", f"it raises {error}, which is no clear refusal")
    promises = context.implementation.promises
    if check.extra and outcome.verdict == FAIL and not (strict or "all" in promises or check.name in promises):
        return replace(outcome, verdict=NOT_PROMISED)
    return outcome


def result_of(check: Check, outcome: Outcome) -> Result:
    """An outcome, as that of a check."""
    return Result(
        check.name,
        check.meaning,
        check.extra,
        outcome.verdict,
        outcome.measured,
        outcome.finding,
        outcome.figures,
    )


def skipped(checks: Iterable[Check]) -> list[Result]:
    """Results of checks that did not come to run."""
    return [result_of(check, Outcome(NOT_RUN, "")) for check in checks]


@dataclass(frozen=True)
class Score:
    """How many of the scored checks passed, how many of the extras hold, and how many were not answered: refused."""

    passed: int
    scored: int
    extras_passed: int
    extras: int
    refused: int

    @classmethod
    def of(cls, results: Iterable[Result]) -> Score:
        """Count them; what does not apply counts nowhere, what is refused apart."""
        counted = [(r.extra, r.verdict) for r in results if r.verdict not in (NOT_APPLICABLE, NOT_RUN)]
        scored = [verdict for extra, verdict in counted if not extra and verdict != REFUSED]
        extras = [verdict for extra, verdict in counted if extra]
        refusals = [verdict for _, verdict in counted if verdict == REFUSED]
        return cls(scored.count(PASS), len(scored), extras.count(PASS), len(extras), len(refusals))
