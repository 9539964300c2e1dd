"""Writes what is said of speed from the files in benchmarks/results: `make results`.

docs/benchmarks.md, what stands between the two markers in README.md, and benchmarks/results/forward.svg are made here
and nowhere else. Figures in sentences are computed, so that no sentence says more than the files do.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import matplotlib as mpl

from benchmarks import training_table
from rmsnorm.cli.bench import plot
from rmsnorm.cli.bench.lines import read
from rmsnorm.cli.bench.measure import COPY, NCNN, OURS, OURS_IN_PLACE, OURS_OUT

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
FORWARD = FOLDER / "forward-1-thread.jsonl"
RACES = (
    FORWARD,
    *(FOLDER / f"{name}.jsonl" for name in ("forward-2-threads", "training-1-thread", "training-2-threads")),
)
GATED = FOLDER / "gated-1-thread.jsonl"
PICTURE = FOLDER / "forward.svg"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- made by `make results`: -->", "<!-- end of what `make results` made -->"

# Contestants that write into memory that is there already or into the input itself; all others return a fresh result
# (rmsnorm/cli/bench). Each is set beside ours that does the same.
IN_PLACE = {COPY: OURS_OUT, OURS_OUT: OURS_OUT, "vllm": OURS_OUT, "onnxruntime": OURS_OUT}
IN_PLACE |= {OURS_IN_PLACE: OURS_IN_PLACE, NCNN: OURS_IN_PLACE}
# Results from here on do not fit the caches of the machine that the files are from.
LARGE = 16 * 2**20
NAMES = {"F.rms_norm": "`F.rms_norm`", "torch.compile": "`torch.compile` of it", "F.layer_norm": "`F.layer_norm`"}
README_ROWS = (
    ("decode", "forward", "1x4096", "bfloat16"),
    ("prefill", "forward", "2048x4096", "bfloat16"),
    ("training", "training", "2048x768", "float32"),
    ("training", "training", "2048x4096", "bfloat16"),
)


class Contest(NamedTuple):
    """One shape, dtype and pass; median microseconds by contestant, either all fresh results or all in place."""

    what: str
    threads: int
    shape: str
    dtype: str
    ours: float
    copy: float
    others: dict[str, float]

    @property
    def large(self) -> bool:
        rows, cols = map(int, self.shape.split("x"))
        return rows * cols * (4 if self.dtype == "float32" else 2) >= LARGE

    @property
    def best(self) -> tuple[str, float]:
        return min(self.others.items(), key=lambda item: item[1])


def contests(*, in_place: bool = False) -> list[Contest]:
    """What the files hold of fresh results beside fresh ones, or of results in place beside results in place."""
    found = []
    for file in RACES:
        cases: dict[tuple[str, int, str, str], dict[str, float]] = {}
        for result in read(file)[1]:
            if result.timing is not None:
                case = result.case
                key = case.what, case.threads, case.shape.size, case.dtype
                cases.setdefault(key, {})[result.contestant] = result.timing.median * 1e6
        for ours in (OURS_OUT, OURS_IN_PLACE) if in_place else (OURS,):
            for key, us in cases.items():
                beside = {name: t for name, t in us.items() if IN_PLACE.get(name, OURS) == ours}
                others = {name: t for name, t in beside.items() if name not in (ours, COPY)}
                if ours in us and others:
                    found.append(Contest(*key, us[ours], us[COPY], others))
    return found


# ---------------------------------------------------------------- sentences


def span(ratios: Iterable[float]) -> str:
    """`0.9 to 4` for the least and the largest of some ratios, to two digits; nothing for none."""
    edges = sorted(ratios)
    low, high = (f"{edge:.2g}" if edge < 10 else f"{edge:.0f}" for edge in (edges[0], edges[-1])) if edges else ("", "")
    return low if low == high else f"{low} to {high}"


def kinds() -> dict[str, list[Contest]]:
    """The contests under the headings of the page."""
    fresh = contests()
    return {
        "a fresh result": [c for c in fresh if c.what == "forward"],
        "in place": contests(in_place=True),
        "training": [c for c in fresh if c.what == "training"],
    }


def summaries() -> list[str]:
    """Two tables: others as multiples of ours, and ours as a multiple of a copy."""
    races = kinds()
    names = dict.fromkeys(name for found in races.values() for c in found for name in c.others)
    header = [f"| | {' | '.join(races)} |", "| --- |" + " ---: |" * len(races)]
    lines = ["The time of others as a multiple of ours, least to most:", "", *header]
    for name in names:
        cells = [span(c.others[name] / c.ours for c in found if name in c.others) for found in races.values()]
        lines.append(f"| {NAMES.get(name, name)} | {' | '.join(cells)} |")
    lines += ["", "Our time as a multiple of the copy's, which is in place:", "", *header]
    for large, size in ((True, "16 MiB and more"), (False, "less than 16 MiB")):
        for dtype in ("float32", "bfloat16"):
            chosen = [[c for c in found if c.large is large and c.dtype == dtype] for found in races.values()]
            cells = [span(c.ours / c.copy for c in found) for found in chosen]
            lines.append(f"| {dtype}, {size} | {' | '.join(cells)} |")
    return [*lines, "", wrapped(where_others_lead())]


def slower() -> Iterator[tuple[str, Contest]]:
    """Contests in which another kernel was faster."""
    for title, races in (("fresh", contests()), ("in place", contests(in_place=True))):
        yield from ((title, c) for c in races if c.best[1] < c.ours)


def where_others_lead() -> str:
    """In how many contests, and by how much."""
    total = len(contests()) + len(contests(in_place=True))
    lost = [c for _, c in slower()]
    if not lost:
        return f"No kernel was faster in any of {total} contests."
    most = max(lost, key=lambda c: c.ours / c.best[1])
    threads = f"{most.threads} thread{'s' if most.threads > 1 else ''}"
    return (
        f"Another kernel was faster in {len(lost)} of {total} contests, most of all {most.best[0]} on "
        f"{most.shape} in {most.dtype}, {threads}: ours took {most.ours / most.best[1]:.2f} times as long."
    )


# ---------------------------------------------------------------- tables


def digits(us: float) -> str:
    """Three of them, and all before the point."""
    return f"{us:,.{2 if us < 9.995 else 1 if us < 99.95 else 0}f}"


def table(races: list[Contest]) -> list[str]:
    """A line for each contest, a column for each contestant; the fastest norm in bold."""
    names = list(dict.fromkeys(name for c in races for name in c.others))
    lines = [f"| threads | shape | dtype | copy | rmsnorm | {' | '.join(names)} |"]
    lines.append("| ---: | --- | --- |" + " ---: |" * (2 + len(names)))
    for c in races:
        times = [c.ours, *(c.others.get(name) for name in names)]
        least = min(t for t in times if t is not None)
        cells = ["" if t is None else f"**{digits(t)}**" if t == least else digits(t) for t in times]
        lines.append(f"| {c.threads} | {c.shape} | {c.dtype} | {digits(c.copy)} | {' | '.join(cells)} |")
    return lines


def gated_table() -> list[str]:
    lines = [
        "| pass | shape | dtype | copy | fresh copy | rmsnorm | Qwen3-Next | rmsnorm | Mamba 2 |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    names = ("copy", "fresh copy", "rmsnorm, qwen3_next", "qwen3_next", "rmsnorm, mamba2", "mamba2")
    for line in map(json.loads, GATED.read_text().splitlines()):
        shape, dtype = "x".join(map(str, line["shape"])), line["dtype"].removeprefix("torch.")
        lines.append(f"| {line['what']} | {shape} | {dtype} | {' | '.join(digits(line['us'][n]) for n in names)} |")
    return lines


def lead_table() -> list[str]:
    lines = [
        "| result | pass | threads | shape | dtype | ours | fastest | |",
        "| --- | --- | ---: | --- | --- | ---: | --- | --- |",
    ]
    for title, c in sorted(slower(), key=lambda item: -item[1].ours / item[1].best[1]):
        name, best = c.best
        cells = (title, c.what, c.threads, c.shape, c.dtype, digits(c.ours), f"{name} {digits(best)}")
        lines.append(f"| {' | '.join(map(str, cells))} | {c.ours / best:.2f} times |")
    return lines


def about() -> str:
    facts, _ = read(FORWARD)
    return f"{facts['processor']} ({facts['isa']}), PyTorch {facts['torch'].partition('+')[0]}"


# ---------------------------------------------------------------- what is written


def section() -> str:
    """What stands between the markers of the README: four rows, and the words for them."""
    columns = tuple(NAMES)
    lines = [
        wrapped(f"Microseconds, one thread, {about()}; medians of interleaved rounds, all of fresh results."),
        "",
        f"| | shape | dtype | rmsnorm | {' | '.join(NAMES.values())} | fastest other |",
        "| --- | --- | --- |" + " ---: |" * (2 + len(columns)),
    ]
    found = {(c.what, c.shape, c.dtype): c for c in contests() if c.threads == 1}
    for label, *key in README_ROWS:
        c = found[tuple(key)]
        name, best = c.best
        ours = f"**{digits(c.ours)}**" if c.ours < best else digits(c.ours)
        cells = [ours, *(digits(c.others[n]) for n in columns), f"{digits(best)} ({name})"]
        lines.append(f"| {label} | {c.shape} | {c.dtype} | {' | '.join(cells)} |")
    in_place = [c for c in contests(in_place=True) if c.large and c.threads == 1]
    copies = {dtype: span(c.ours / c.copy for c in in_place if c.dtype == dtype) for dtype in ("float32", "bfloat16")}
    words = (
        f"{where_others_lead()} Results of 16 MiB and more, written in place, took {copies['float32']} times as long "
        f"as a copy in float32 and {copies['bfloat16']} times in bfloat16. [All figures](docs/benchmarks.md), also in "
        "place and for two threads. Yours: `rmsnorm bench --quick`, within a minute."
    )
    return "\n".join([*lines, "", wrapped(words)])


def page() -> str:
    """docs/benchmarks.md."""
    introduction = (
        f"One machine: {about()}. Microseconds, medians of interleaved rounds; each result was checked before it was "
        "timed. The [files](../benchmarks/results) say by which command, and what to be careful with. A fresh result "
        "of many megabytes is new pages, which the system fills with zeros first, and that can take longer than the "
        "norm. So fresh results stand beside fresh ones, and results in memory that is there already (`out=`) beside "
        "those of kernels that write there. `copy` is `out.copy_(x)`, in place; `naive` is the formula in plain "
        "operations. The fastest norm is in bold."
    )
    lines = ["# Benchmarks", "", "Made by `make results`; do not edit.", "", wrapped(introduction), ""]
    lines += [
        f"![Bandwidth of each kernel against the size of the input](../{PICTURE.relative_to(ROOT).as_posix()})",
        "",
    ]
    lines += ["## In short", "", *summaries()]
    for title, races in kinds().items():
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", *table(races)]
    lines += [
        "",
        "## Gated norms",
        "",
        "One thread: those of transformers, and ours in their place.",
        "",
        *gated_table(),
    ]
    lines += ["", "## A whole model's training step", "", wrapped(training_table.words()), "", *training_table.table()]
    lines += ["", "## Where another kernel is faster", "", *lead_table()]
    return "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)


def picture() -> str:
    """The forward results as SVG: the same text from the same results, by the same version of matplotlib."""
    _, results = read(FORWARD)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "rmsnorm", "font.family": "sans-serif"}
    with mpl.rc_context(settings):
        buffer = io.StringIO()
        metadata = {"Date": None, "Description": f"results: sha256 {digest()}"}
        plot.figure(results, transparent=True).savefig(buffer, format="svg", metadata=metadata)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def digest() -> str:
    """Of the results in the picture."""
    return hashlib.sha256(FORWARD.read_bytes()).hexdigest()


def with_section(readme: str) -> str:
    """The README with what is made here in its place."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README} lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


if __name__ == "__main__":
    PICTURE.write_text(picture())
    PAGE.write_text(page())
    README.write_text(with_section(README.read_text()))
