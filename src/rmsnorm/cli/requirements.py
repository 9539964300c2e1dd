"""What a subcommand needs, of its arguments and beyond torch, and one line on how to get it."""

import argparse
import importlib.util


class CannotRun(Exception):
    """A subcommand cannot do what was asked; its message, of one line, says what to do about it."""


def require(extra: str, *packages: str) -> None:
    """Raise `CannotRun` naming the optional extra if any of its packages is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise CannotRun(f'not installed: {", ".join(missing)}; try: pip install "rmsnorm[{extra}]"')


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def positive(text: str) -> int:
    """Convert an argument to an integer of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)
