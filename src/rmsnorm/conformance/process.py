"""Checks in a process of their own: a kernel that takes the process down is a finding, not the end of the report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rmsnorm.conformance.examination import About, Request, Step
from rmsnorm.conformance.implementation import CannotCheck
from rmsnorm.conformance.outcome import Check, Result, failed
from rmsnorm.conformance.suite import CONVENTION, result_of, without_form

# The worker sees what this process sees, and nothing of the current folder that this one does not.
_START = "import sys; sys.path[:] = {path!r}; from rmsnorm.conformance.worker import main; main()"


def examine_apart(request: Request, checks: Iterable[Check], step: Step) -> Iterator[About | Result]:
    """As `examine`, in a process that may be taken down: another one goes on with the checks that are left."""
    left = {check.name: check for check in checks}
    known = False
    while left:
        at = ""
        worker = _Worker(request, list(left))
        for kind, content in worker.messages():
            if kind == "cannot":
                raise CannotCheck(content)
            if kind == "step":
                at = content
                step(at)
            elif kind == "result":
                left.pop(content["name"])
                yield Result(**content)
            elif not known:
                known = True
                yield About(**content)
        if not left:
            return
        if not at:
            raise CannotCheck(f"{request.target} takes the process down as it is loaded, with {worker.end}")
        crashed = failed("crashed", f"it takes the process down, with {worker.end}")
        if at == CONVENTION.name:  # what falls over on ordinary rows can be asked nothing else
            yield from without_form(left.values(), crashed)
            return
        yield result_of(left.pop(at), crashed)


class _Worker:
    """A process that examines, until it is done or taken down."""

    def __init__(self, request: Request, checks: list[str]) -> None:
        code = _START.format(path=sys.path)
        self._process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._order = json.dumps({**asdict(request), "checks": checks})

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Kind and content of each message."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - pipes were asked for
        try:
            with process.stdin:
                process.stdin.write(self._order)
            for line in process.stdout:
                kind, content = json.loads(line)
                yield kind, content
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    @property
    def end(self) -> str:
        """How the process ended: the name of a signal, or an exit code."""
        code = self._process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
