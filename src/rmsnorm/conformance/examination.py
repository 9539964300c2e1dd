"""One examination: what to check and how, and what comes of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TextIO

import torch

from rmsnorm.conformance.loading import load
from rmsnorm.conformance.outcome import Check, Result
from rmsnorm.conformance.suite import Expected, run

Step = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to examine, and how: the command's arguments."""

    target: str
    device: str
    threads: int
    offset: float | None = None
    rounding: str | None = None
    strict: bool = False
    inference: bool = False


@dataclass(frozen=True)
class About:
    """What is examined, for the report."""

    name: str
    calls: str
    source: str


def examine(request: Request, checks: Iterable[Check], step: Step) -> Iterator[About | Result]:
    """Yield what is examined, once, and the result of each check as it is there.

    Raises:
        CannotCheck: there is nothing to check, and why.
    """
    torch.set_num_threads(request.threads)
    implementation = load(request.target)
    torch.set_num_threads(request.threads)  # it was called meanwhile
    if request.inference:
        implementation = replace(implementation, trains=False)
    yield About(implementation.name, implementation.calls, implementation.source)
    expected = Expected(request.offset, request.rounding)
    device = torch.device(request.device)
    yield from run(implementation, checks, device=device, expected=expected, strict=request.strict, step=step)


@contextlib.contextmanager
def output_to_stderr() -> Iterator[TextIO]:
    """Send what an implementation prints to standard error, also from C; yield what standard output was."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as output, contextlib.redirect_stdout(sys.stderr):
            yield output
    finally:
        os.dup2(kept, 1)
        os.close(kept)
