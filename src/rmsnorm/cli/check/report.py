"""What `rmsnorm check` tells: as data, and as a table, with colours on a terminal."""

from __future__ import annotations

import json
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from math import isfinite

import torch

from rmsnorm.benchmarking.peers import PEERS
from rmsnorm.cli.requirements import is_installed
from rmsnorm.cli.text import printable
from rmsnorm.conformance import CHECKS, About, Check, Result, Score, named, suite
from rmsnorm.conformance.outcome import FAIL, NOT_APPLICABLE, NOT_PROMISED, NOT_RUN, PASS, REFUSED

STYLES = {
    PASS: "green",
    FAIL: "bold red",
    NOT_PROMISED: "yellow",
    REFUSED: "yellow",
    NOT_APPLICABLE: "dim",
    NOT_RUN: "dim",
}
EXTRAS = "Extras, which only some libraries promise; not scored unless promised"


@dataclass(frozen=True)
class Report:
    """One implementation's results, and on what they were found."""

    implementation: str
    calls: str
    source: str
    where: str
    strict: bool
    results: list[Result]
    score: Score
    interrupted: bool
    seconds: float

    @classmethod
    def of(
        cls,
        about: About,
        checks: Iterable[Check],
        results: list[Result],
        device: torch.device,
        strict: bool,
        interrupted: bool,
        seconds: float,
    ) -> Report:
        """The report, with the checks that did not come to run."""
        rest = [check for check in checks if check.name not in {result.name for result in results}]
        name, calls, source = map(printable, (about.name, about.calls, about.source))
        where = f"{device}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
        where += f", torch {torch.__version__}, Python {platform.python_version()}"
        everything = [*map(_shown, results), *suite.skipped(rest)]
        score = Score.of(everything)
        return cls(
            name,
            calls,
            source,
            where,
            strict,
            everything,
            score,
            interrupted,
            seconds,
        )

    @property
    def findings(self) -> list[Result]:
        """The checks that failed."""
        return [result for result in self.results if result.verdict == FAIL]

    @property
    def exit_code(self) -> int:
        """130 after an interruption, 1 if something was found, 2 if no check was answered, else 0."""
        answered = any(result.verdict in (PASS, NOT_PROMISED) for result in self.results)
        return 130 if self.interrupted else 1 if self.findings else 0 if answered else 2

    @property
    def groups(self) -> Iterator[tuple[str, list[Result]]]:
        """The scored checks and the extras that have something to tell."""
        for title, extra in (("Scored", False), (EXTRAS, True)):
            aside = {suite.NO_FORM, *suite.NOT_ASKED.values()}
            shown = [r for r in self.results if r.verdict != NOT_RUN and r.measured not in aside]
            if found := [result for result in shown if result.extra == extra]:
                yield title, found

    @property
    def summary(self) -> str:
        """The score in words."""
        said = f"{self.score.passed} of {self.score.scored} scored checks passed"
        if self.score.extras:
            said += f", {self.score.extras_passed} of {self.score.extras} extras hold"
        if self.score.refused:
            said += (
                f"; not answered, because it refused: {', '.join(r.name for r in self.results if r.verdict == REFUSED)}"
            )
        if self.interrupted:
            ran = sum(result.verdict != NOT_RUN for result in self.results)
            said += f"; interrupted after {ran} of {len(self.results)} checks"
        return said

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False)


def _shown(result: Result) -> Result:
    """A result that is fit to be shown: an implementation's exceptions may say anything, and JSON has no infinity."""
    figures = {
        name: str(value) if isinstance(value, float) and not isfinite(value) else value
        for name, value in result.figures.items()
    }
    return replace(result, measured=printable(result.measured), finding=printable(result.finding), figures=figures)


def show(report: Report) -> None:
    """Print it; with colours, and as wide as it is, on a terminal."""
    if sys.stdout.isatty() and is_installed("rich"):
        _show_on_terminal(report)
    else:
        print(as_text(report))


def as_text(report: Report) -> str:
    lines = [report.implementation, *_heading(report)]
    names = max(len(result.name) for result in report.results)
    for title, results in report.groups:
        lines += ["", title, "-" * len(title)]
        lines += [f"{r.name:{names}}  {r.verdict:14}  {r.measured}".rstrip() for r in results]
    for result in _told(report):
        lines += ["", f"{result.name}: {result.finding}"]
    return "\n".join([*lines, "", f"{report.summary}. Took {report.seconds:.0f} s."])


def _heading(report: Report) -> list[str]:
    return [line for line in (report.source, f"called as {report.calls}", report.where) if line]


def _told(report: Report) -> list[Result]:
    return [result for result in report.results if result.finding and result.verdict == FAIL]


def _show_on_terminal(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(Text(f"\n{report.implementation}", "bold"))
    for line in _heading(report):
        console.print(Text(line, "dim"))
    names = max(len(result.name) for result in report.results)
    for title, results in report.groups:
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("check", no_wrap=True, width=names)
        table.add_column("verdict", no_wrap=True, width=14)
        table.add_column("measured")
        for r in results:
            table.add_row(r.name, Text(r.verdict, STYLES[r.verdict]), Text(r.measured))
        console.print(table)
    for result in _told(report):
        console.print(Text.assemble((result.name, "bold red"), f": {result.finding}"))
        console.print(Text(f"{result.meaning}\n", "dim"))
    colour = {0: "green", 1: "red"}.get(report.exit_code, "yellow")
    console.print(Text.assemble((report.summary, f"bold {colour}"), f". Took {report.seconds:.0f} s."))


def show_list() -> None:
    """Print every check with its meaning, and every known name."""
    names = max(len(check.name) for check in CHECKS)
    for title, extra in (("Checks", False), (EXTRAS, True)):
        print(f"{title}\n{'-' * len(title)}")
        for check in CHECKS:
            if check.extra == extra:
                print(_entry(check.name, check.meaning, names))
        print()
    print("Names\n-----")
    for name, entry in named.NAMES.items():
        print(_entry(name, f"{entry.what}{' (not installed)' if PEERS[entry.peer].missing() else ''}", names))


def _entry(name: str, text: str, width: int) -> str:
    indented = textwrap.wrap(text, 78 - width, break_long_words=False)
    return "\n".join(f"{name if i == 0 else '':{width}}  {line}" for i, line in enumerate(indented))
