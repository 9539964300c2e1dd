"""The command line, `rmsnorm` or `python -m rmsnorm`: one module per subcommand.

A subcommand is a module with a docstring, `add_arguments(parser)` and `run(arguments) -> int`.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rmsnorm import __version__
from rmsnorm.cli import bench, check, compare, demo, info, inspect
from rmsnorm.cli.requirements import CannotRun
from rmsnorm.cli.text import printable

COMMANDS = {
    "info": info,
    "demo": demo,
    "bench": bench,
    "compare": compare,
    "inspect": inspect,
    "check": check,
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, whatever was typed."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, 1000))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 good, 1 a finding, 2 wrong usage, 130 interrupted, 141 not read.

    As argparse does, `--help` and arguments that make no sense end in SystemExit, with 0 and 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks stands as its escape
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough. At exit Python flushes once more, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: Sequence[str] | None) -> int:
    parser = _Parser(prog="rmsnorm", description="RMSNorm for PyTorch, the same to the bit everywhere.")
    parser.add_argument("--version", action="version", version=f"rmsnorm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, module in COMMANDS.items():
        summary, _, _ = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except CannotRun as error:
        print(f"rmsnorm {arguments.command}: {printable(str(error), 1000)}", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"rmsnorm {arguments.command}: there is not enough memory for that", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nrmsnorm {arguments.command}: interrupted", file=sys.stderr)
        return 130
