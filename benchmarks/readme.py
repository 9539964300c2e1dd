"""Writes the README's results from the files in benchmarks/results: `make results`.

What stands between the two markers in README.md, and benchmarks/results/forward.svg, are made here and nowhere else.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl

from rmsnorm.cli.bench import plot
from rmsnorm.cli.bench.lines import read
from rmsnorm.cli.bench.measure import COPY, OURS, OURS_OUT, Result

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
PICTURE = FOLDER / "forward.svg"
README = ROOT / "README.md"
BEGIN, END = "<!-- made by `make results`: -->", "<!-- end of what `make results` made -->"

FORWARD, TRAINING = FOLDER / "forward-1-thread.jsonl", FOLDER / "training-1-thread.jsonl"


def section() -> str:
    """What stands between the markers."""
    about, forward = read(FORWARD)
    _, training = read(TRAINING)
    torch = about["torch"].partition("+")[0]
    picture = PICTURE.relative_to(ROOT).as_posix()
    lines = [
        f"One thread, {about['processor']} ({about['isa']}), PyTorch {torch}; microseconds, medians of interleaved "
        "rounds. `copy` is `out.copy_(x)`,",
        "the least there can be; `rmsnorm` is the better of a fresh result and `out=`, as far as a contest has both.",
        "",
        f"![Bandwidth of each kernel against the size of the input]({picture})",
        "",
        *table("inference", forward, (COPY, "best other", "F.rms_norm")),
        "",
        *table("training: forward, dx, dweight", training, ("F.layer_norm", "torch.compile", "F.rms_norm")),
    ]
    return "\n".join(lines)


def table(title: str, results: Iterable[Result], columns: Iterable[str]) -> list[str]:
    """Ours and some others, a line for each shape."""
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for result in results:
        if result.timing is not None:
            key = result.case.shape.size.replace("x", " x "), result.case.dtype
            cases.setdefault(key, {})[result.contestant] = result.timing.median * 1e6
    columns = tuple(columns)
    lines = [
        f"| {' | '.join((title, 'dtype', 'rmsnorm', *columns))} |",
        "| --- | --- |" + " ---: |" * (1 + len(columns)),
    ]
    for (shape, dtype), us in cases.items():
        ours = min(us[name] for name in (OURS, OURS_OUT) if name in us)
        others = {name: t for name, t in us.items() if name not in (OURS, OURS_OUT, COPY)}
        best = min(others, key=others.__getitem__)
        cells = [f"{digits(us[best])} ({best})" if name == "best other" else digits(us[name]) for name in columns]
        lines.append(f"| {' | '.join((shape, dtype, digits(ours), *cells))} |")
    return lines


def digits(us: float) -> str:
    """Three of them, and all before the point."""
    return f"{us:,.{2 if us < 9.995 else 1 if us < 99.95 else 0}f}"


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
    README.write_text(with_section(README.read_text()))
