"""Progress on standard error: a bar with the time left on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rmsnorm.cli.requirements import is_installed
from rmsnorm.cli.text import printable


class Step(Protocol):
    """To be called as each step begins, with what it is and its share of the whole; without a text it only counts."""

    def __call__(self, text: str = "", size: float = 1.0, /) -> None:
        """Begin a step."""


@contextmanager
def progress(total: float) -> Iterator[Step]:
    """Yield a function to be called as each step begins; `total` is the sum of the steps' sizes."""
    if sys.stderr.isatty() and not os.environ.get("CI") and is_installed("rich"):
        with _bar(total) as step:
            yield step
    else:
        start = time.monotonic()

        def line(text: str = "", size: float = 1.0, /) -> None:
            if text:
                print(f"{time.monotonic() - start:5.0f} s  {printable(text)}", file=sys.stderr, flush=True)

        yield line


@contextmanager
def _bar(total: float) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    left = TextColumn("left", style="progress.remaining")
    columns = SpinnerColumn(), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), left
    # This very stream: others may redirect sys.stderr meanwhile.
    with Progress(
        *columns, TextColumn("{task.description}", markup=False), console=Console(file=sys.stderr), transient=True
    ) as bar:
        task = bar.add_task("", total=total)
        before = 0.0

        def step(text: str = "", size: float = 1.0, /) -> None:
            nonlocal before
            bar.advance(task, before)
            before = size
            if text:
                bar.update(task, description=printable(text))

        yield step
