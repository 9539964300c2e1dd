"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to be called with a description as each of the steps begins."""
    if sys.stderr.isatty() and not os.environ.get("CI"):
        with _bar(steps) as step:
            yield step
    else:
        start = time.monotonic()
        yield lambda text: print(f"{time.monotonic() - start:5.0f} s  {text}", file=sys.stderr, flush=True)


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    # This very stream: others may redirect sys.stderr meanwhile.
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=steps)
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=begun)
            begun += 1

        yield step
