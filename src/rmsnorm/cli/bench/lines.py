"""The file of a benchmark: a line about the machine, then one for each result, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rmsnorm.cli.bench.measure import Result
from rmsnorm.cli.requirements import CannotRun, writing
from rmsnorm.cli.text import printable

Write = Callable[[dict[str, Any]], None]


@contextmanager
def open_lines(where: str | None) -> Iterator[Write]:
    """Yield a function that writes a line at once: to a file, to standard output for `-`, or nowhere for None."""
    if where is None:
        yield lambda line: None
    elif where == "-":
        yield lambda line: print(json.dumps(line), flush=True)
    else:
        path = Path(where)
        with writing(path):
            file = path.open("wb", buffering=0)  # each line at once, and nothing left to fail when it is closed

        def write(line: dict[str, Any]) -> None:
            with writing(path):
                file.write(f"{json.dumps(line)}\n".encode())

        with file:
            yield write


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Return what a file says about the machine, and its results.

    Raises:
        CannotRun: it cannot be read, or was not written by `rmsnorm bench --json`.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        about = {
            key: None if value is None else printable(str(value), 1000)
            for line in lines
            for key, value in line.get("about", {}).items()
        }
        return about, [Result.from_json(line) for line in lines if "about" not in line]
    except OSError as error:
        raise CannotRun(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise CannotRun(f"{path} has not the lines of `rmsnorm bench --json` ({problem})") from None
