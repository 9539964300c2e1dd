"""A conformance suite for anybody's RMSNorm: convention, accuracy, range, gradients, shapes, dtypes, invariance.

IMPLEMENTATION is a known name (--list), module:callable, module:Class, or file.py:callable. A function is called like
f(x, weight, eps), a class made like C(dim, eps=eps); what it takes is found by trying. Each convention of rounding is
judged by itself, and what only some libraries promise is an extra, which is not scored. Exits with 0 if every scored
check passes, 1 if not, 2 if nothing was checked or all was refused, 130 on Ctrl-C, with a report of what had been done.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from rmsnorm import conformance
from rmsnorm.cli.check.page import page
from rmsnorm.cli.check.report import Report, show, show_list
from rmsnorm.cli.progress import progress
from rmsnorm.cli.requirements import CannotRun, require_writable, writing
from rmsnorm.cli.text import printable
from rmsnorm.spec import ROUNDINGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("implementation", nargs="?", metavar="IMPLEMENTATION", help="a name, or module:callable")
    parser.add_argument("--list", action="store_true", help="list the checks and the known names, and exit")
    parser.add_argument(
        "--only", action="append", default=[], metavar="CHECK", help="only this check, or these: dx, eps"
    )
    parser.add_argument("--strict", action="store_true", help="score the extras too")
    parser.add_argument("--inference", action="store_true", help="it promises no gradients")
    parser.add_argument("--offset", type=float, help="what it should add to the weight; other findings are faults")
    parser.add_argument("--rounding", choices=ROUNDINGS, help="where it should round")
    parser.add_argument("--device", default="cpu", help="where to run it (default cpu)")
    parser.add_argument("--in-process", action="store_true", help="run the checks in this process, for a debugger")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        show_list()
        return 0
    require_writable(arguments.html)
    report = examine(arguments)
    if arguments.json:
        print(report.json())
    else:
        show(report)
    if arguments.html is not None:
        with writing(arguments.html):
            arguments.html.write_text(page(report), encoding="utf-8")
        print(f"wrote {printable(str(arguments.html))}", file=sys.stderr)
    return report.exit_code


def examine(arguments: argparse.Namespace) -> Report:
    """Run the checks; on Ctrl-C the report has those that were done."""
    if not arguments.implementation:
        raise CannotRun("say what to check: a name (--list shows them), or module:callable")
    checks = conformance.chosen(arguments.only)
    unknown = [name for name in arguments.only if not conformance.chosen([name])]
    if unknown:
        raise CannotRun(f"there is no check {unknown[0]!r}; --list shows them")
    device = _device(arguments.device)
    request = conformance.Request(
        arguments.implementation,
        arguments.device,
        torch.get_num_threads(),
        arguments.offset,
        arguments.rounding,
        arguments.strict,
        arguments.inference,
    )
    run_checks = conformance.examine if arguments.in_process else conformance.examine_apart
    start, interrupted = time.monotonic(), False
    about = conformance.About(arguments.implementation, "", "")
    results: list[conformance.Result] = []
    with conformance.output_to_stderr(), progress(len(checks)) as step:
        try:
            for found in run_checks(request, checks, step):
                if isinstance(found, conformance.Result):
                    results.append(found)
                else:
                    about = found
        except KeyboardInterrupt:
            interrupted = True
        except conformance.CannotCheck as error:
            raise CannotRun(str(error)) from None
    return Report.of(about, checks, results, device, arguments.strict, interrupted, time.monotonic() - start)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CannotRun(f"there is no device {name!r} here: {str(error).partition(chr(10))[0]}") from None
    return device
