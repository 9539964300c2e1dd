"""Results as tables on the terminal, no wider than it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rmsnorm.benchmarking.timing import duration
from rmsnorm.cli.bench.measure import COPY, OURS, OURS_IN_PLACE, OURS_OUT, OURS_THEN_COMPILED, Result
from rmsnorm.cli.bench.shapes import Shape

# A quartile this far from the median, and the figure is marked.
NOISY = 0.1
_NAME_WIDTH, _CELL_WIDTH = 17, 15


def show(results: Sequence[Result]) -> None:
    """Print a table for each kind of contest, and a list of who was not timed."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False, markup=False, emoji=False)
    for (what, dtype, device, threads, cache), group in groupby(results, _contest):
        where = f"{threads} thread{'s' if threads > 1 else ''}" if device == "cpu" else device
        rows = list(group)
        shapes = list(dict.fromkeys(result.case.shape for result in rows))
        title = f"{what}, {dtype}, {where}, {cache} caches"
        if len(shapes) == 1:
            console.print(_details(f"{title}, {shapes[0]}", rows))
        else:
            fit = max(1, (console.width - _NAME_WIDTH - 2) // _CELL_WIDTH)
            for first in range(0, len(shapes), fit):
                console.print(_matrix(title, rows, shapes[first : first + fit]))
    timed = [result for result in results if result.timing is not None]
    if timed:
        console.print("Medians of interleaved rounds; %: share of the copy's bandwidth, measured in the same rounds.")
        if any(map(_noisy, timed)):
            console.print(f"~: a quartile is more than {NOISY:.0%} away from the median.")
    for line in absentees(results):
        console.print(line, soft_wrap=True)


def _contest(result: Result) -> tuple[str, str, str, int, str]:
    case = result.case
    return case.what, case.dtype, case.device, case.threads, result.cache


def order(results: Iterable[Result]) -> list[Result]:
    """Sort results so that each contest's are together, contests in the order of their first."""
    results = list(results)
    first: dict[Any, int] = {}
    for i, result in enumerate(results):
        first.setdefault(_contest(result), i)
    return sorted(results, key=lambda result: first[_contest(result)])


def absentees(results: Iterable[Result]) -> list[str]:
    """Say who was not timed and why: the wrong ones, then the missing ones."""
    results = list(results)
    wrong = [
        f"WRONG, not timed: {result.contestant}, {result.case}: {result.reason}"
        for result in results
        if result.status == "wrong"
    ]
    contests: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.status == "missing":
            where = contests.setdefault((result.contestant, result.reason or ""), [])
            if result.case.what not in where:
                where.append(result.case.what)
    everywhere = len({result.case.what for result in results})
    names: dict[str, list[str]] = {}
    for (name, reason), whats in contests.items():
        suffix = "" if len(whats) == everywhere else f" ({', '.join(whats)})"
        names.setdefault(reason + suffix, []).append(name)
    return list(dict.fromkeys(wrong)) + [f"not timed: {', '.join(them)}: {why}" for why, them in names.items()]


def _noisy(result: Result) -> bool:
    t = result.timing
    return t is not None and max(t.high - t.median, t.median - t.low) > NOISY * t.median


def _matrix(title: str, rows: Sequence[Result], shapes: Sequence[Shape]) -> Any:
    table = _table(title)
    table.add_column("", min_width=_NAME_WIDTH, no_wrap=True)
    for shape in shapes:
        table.add_column(f"{shape.name.replace(' ', chr(10))}\n{shape.size}".strip(), justify="right", no_wrap=True)
    cells = {(row.contestant, row.case.shape): _cell(row) for row in rows if row.timing is not None}
    for name in dict.fromkeys(name for name, _ in cells):
        table.add_row(name, *(cells.get((name, shape), "") for shape in shapes), style=_style(name))
    return table


def _cell(row: Result) -> str:
    assert row.timing is not None  # noqa: S101 - for the type checker
    share = "" if row.of_copy is None or row.contestant == COPY else f"{row.of_copy:4.0%}"
    return f"{duration(row.timing.median)}{'~' if _noisy(row) else ' '}{share:4}"


def _details(title: str, rows: Sequence[Result]) -> Any:
    table = _table(title)
    table.add_column("", min_width=_NAME_WIDTH, no_wrap=True)
    for head in ("median", "quartiles", "GB/s", "of copy", "/ rmsnorm"):
        table.add_column(head, justify="right", no_wrap=True)
    ours = next((row.timing.median for row in rows if row.contestant == OURS and row.timing), None)
    for row in rows:
        if (t := row.timing) is not None:
            mark = "~" if _noisy(row) else " "
            table.add_row(
                row.contestant,
                duration(t.median) + mark,
                f"{duration(t.low)} to {duration(t.high)}",
                "" if row.gb_per_s is None else f"{row.gb_per_s:.3g}",
                "" if row.of_copy is None else f"{row.of_copy:.0%}",
                "" if ours is None else f"{t.median / ours:.2f}",
                style=_style(row.contestant),
            )
    return table


def _style(name: str) -> str:
    return "bold" if name in (OURS, OURS_OUT, OURS_IN_PLACE, OURS_THEN_COMPILED) else "dim" if name == COPY else ""


def _table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
