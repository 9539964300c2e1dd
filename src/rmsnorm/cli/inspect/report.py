"""What `rmsnorm inspect` tells: as data, and as a table no wider than the terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rmsnorm.cli.inspect.findings import Norm
from rmsnorm.cli.text import printable

# The numbers in a name that count layers, experts and the like.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Report:
    """The norms of a target, with what was found about the whole."""

    source: str
    warnings: list[str]
    notes: list[str]
    norms: list[Norm]

    @property
    def examined(self) -> int:
        """How many norms have weights that were looked at."""
        return sum(norm.low is not None for norm in self.norms)

    @property
    def suspect(self) -> int:
        """How many norms have something that looks wrong."""
        return sum(bool(norm.warnings) for norm in self.norms)

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        count = f"{len(self.norms)} norm{'' if len(self.norms) == 1 else 's'}"
        if self.suspect:
            return f"{self.suspect} of {count} {'looks' if self.suspect == 1 else 'look'} wrong."
        if self.warnings:
            return f"{count}; something about the whole looks wrong."
        if not self.norms:
            return "No RMSNorm found."
        if not self.examined:
            return f"{count}; there are no weights to examine."
        unknown = sum(norm.convention is None and norm.weight_offset is None for norm in self.norms)
        rest = {"without weights": len(self.norms) - self.examined, "of unknown convention": unknown}
        more = "".join(f"; {number} {what}" for what, number in rest.items() if number)
        return f"{self.examined} norm{'' if self.examined == 1 else 's'} examined, nothing looks wrong{more}."

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def show(report: Report) -> None:
    """Print it, with colours on a terminal and as wide as that is."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    fitted = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if fitted else 10_000, highlight=False)

    def line(text: str, style: str = "", indent: int = 0) -> None:
        console.print(Padding(Text(printable(text, 2000), style), (0, 0, 0, indent), expand=False))

    line(report.source, "bold")
    for text in report.notes:
        line(text, "dim")
    _show_norms(console, _grouped(report.norms))
    for title, style, said in (("Looks wrong", "bold red", "warnings"), ("Notes", "bold", "notes")):
        by_text: dict[str, list[Norm]] = {text: [] for text in (report.warnings if said == "warnings" else ())}
        for norm in report.norms:
            for text in getattr(norm, said):
                by_text.setdefault(text, []).append(norm)
        if by_text:
            console.print()
            line(title, style)
        for text, norms in by_text.items():
            names = [_name(group) for group in _grouped(norms, told=False)]
            line(f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''}{': ' if names else ''}{text}", indent=2)
    console.print()
    line(report.summary, "bold red" if report.suspect or report.warnings else "green" if report.examined else "")


def _show_norms(console: Any, groups: Sequence[list[Norm]]) -> None:
    """A table for each convention; the columns of all stand below each other."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    tables: dict[str, list[tuple[tuple[str, ...], bool]]] = {}
    for group in groups:
        tables.setdefault(_title(group[0]), []).append((_row(group), bool(group[0].warnings)))
    rows = [row for table in tables.values() for row, _ in table]
    widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(len(_HEAD))]
    widths[0] = max(12, min(widths[0], console.width - sum(widths[1:]) - 2 * len(widths)))
    for title, lines in tables.items():
        console.print()
        console.print(Text(title, "bold"))
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i, (head, width) in enumerate(zip(_HEAD, widths, strict=True)):
            table.add_column(head, width=width, justify="right" if i else "left", overflow="fold")
        for (name, *others), wrong in lines:
            table.add_row(Text(_broken(name, widths[0])), *map(Text, others), style="red" if wrong else "")
        console.print(table)


def _title(norm: Norm) -> str:
    convention = norm.convention or ("gains" if norm.weight_offset == 0 else "convention unknown")
    eps = "eps unknown" if norm.eps is None else f"eps {norm.eps:g}"
    return f"{convention}; {eps}; {printable(norm.dtype, 20) if norm.dtype else 'no weights here'}"


def _broken(name: str, width: int) -> str:
    """The name in lines of this width, broken at its dots where that can be done."""
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+$", name):
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def _grouped(norms: Iterable[Norm], told: bool = True) -> list[list[Norm]]:
    """Norms that look alike but for the numbers in their names and the values of their weights."""
    groups: dict[tuple[Any, ...], list[Norm]] = {}
    for norm in norms:
        looks = (norm.width, norm.convention, norm.eps, norm.dtype, norm.low is None, *norm.warnings)
        key = (_NUMBER.sub("*", norm.name), _NUMBER.search(norm.name) is None and norm.name, *(looks if told else ()))
        groups.setdefault(key, []).append(norm)
    return list(groups.values())


_HEAD = ("norm", "count", "width", "from", "median", "to")


def _row(group: Sequence[Norm]) -> tuple[str, ...]:
    spans = (_span([getattr(norm, name) for norm in group], name) for name in ("low", "median", "high"))
    return _name(group), str(len(group)), "any" if group[0].width is None else str(group[0].width), *spans


def _span(values: Sequence[float | None], name: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = f"{min(known):.3g}", f"{max(known):.3g}"
    return {"low": low, "high": high}.get(name, low if low == high else f"{low}..{high}")


def _name(group: Sequence[Norm]) -> str:
    """The common name, with ranges where the numbers differ."""
    numbers = [_NUMBER.findall(norm.name) for norm in group]
    ranges = iter([_ranges({int(n[:18]) for n in column}) for column in zip(*numbers, strict=True)])
    return printable(_NUMBER.sub(lambda _: next(ranges), group[0].name.removesuffix(".weight")), 200)


def _ranges(numbers: set[int]) -> str:
    """`0-2,4` for 0, 1, 2 and 4."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return ",".join(said) if len(said) <= 6 else f"{','.join(said[:4])},..{said[-1]}"
