"""What a subcommand needs, of its arguments and beyond torch, and one line on how to get it."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")

T = TypeVar("T")


class CannotRun(Exception):
    """A subcommand cannot do what was asked; its message, of one line, says what to do about it."""


def require(extra: str, *packages: str) -> None:
    """Raise `CannotRun` naming the optional extra if any of its packages is missing."""
    missing = [package for package in packages if not is_installed(package)]
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


def thread_count(text: str) -> int:
    """Convert an argument to a number of threads that this machine has processors for, for argparse."""
    processors = os.cpu_count() or 1
    if (count := positive(text)) > processors:
        raise argparse.ArgumentTypeError(f"must be at most {processors}, the processors of this machine, got {text}")
    return count


def shape(text: str) -> tuple[int, int]:
    """Convert an argument like 1024x4096 to rows and columns, for argparse."""
    rows, by, columns = text.partition("x")
    if not by:
        raise argparse.ArgumentTypeError(f"must be ROWSxCOLS, as in 1024x4096, got {text!r}")
    return positive(rows), positive(columns)


def one_of(*allowed: str) -> Callable[[str], str]:
    """Return a conversion that lets nothing else pass, for argparse where `choices` does not do: inside a list."""

    def convert(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"takes {', '.join(allowed)}; got {text!r}")
        return text

    return convert


def list_of(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a conversion of parts between commas, for argparse; what is named twice counts once."""
    return lambda text: list(dict.fromkeys(convert(part.strip()) for part in text.split(",")))


def device(text: str) -> torch.device:
    """Convert an argument to a device that is there, for argparse."""
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"is no device of PyTorch: {text!r}; try cpu or cuda") from None
    if found.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator and accelerator.type == found.type else 0
    if (found.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"{text} is not here: torch {torch.__version__} sees {count} such devices")
    return found


def require_writable(*paths: Path | None) -> None:
    """Raise `CannotRun` if one of these files cannot be written: better before it is measured what goes into it."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise CannotRun(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'permission denied'}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `CannotRun` if what is done within fails to write that file."""
    try:
        yield
    except OSError as error:
        raise CannotRun(f"cannot write {path}: {error.strerror or error}") from None


def file_of(*suffixes: str) -> Callable[[str], Path]:
    """Return a conversion to the path of a file to be written, of one of these kinds, for argparse."""

    def convert(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"must end in {' or '.join(suffixes)}, got {text!r}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} does not exist")
        return path

    return convert
