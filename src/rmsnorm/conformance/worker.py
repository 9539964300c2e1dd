"""The process that `process.py` starts: it examines one implementation, and tells in lines of JSON."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from typing import Any

from rmsnorm.conformance.examination import Request, examine, output_to_stderr
from rmsnorm.conformance.implementation import CannotCheck
from rmsnorm.conformance.outcome import Result
from rmsnorm.conformance.suite import CHECKS


def main() -> None:
    """Read what to examine from standard input, and write messages to what was standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this is interrupted, and ends it
    order = json.load(sys.stdin)
    names = order.pop("checks")
    checks = [check for check in CHECKS if check.name in names]
    with output_to_stderr() as output:

        def tell(kind: str, content: Any) -> None:
            print(json.dumps([kind, content]), file=output, flush=True)

        try:
            for item in examine(Request(**order), checks, lambda name: tell("step", name)):
                tell("result" if isinstance(item, Result) else "about", asdict(item))
        except CannotCheck as error:
            tell("cannot", str(error))
