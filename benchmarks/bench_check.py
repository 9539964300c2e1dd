"""Compares the speed of this checkout with that of another commit, and fails where it is slower beyond the noise.

    python -m benchmarks.bench_check [--against HEAD] [--rows forward,add] [--threads 1] [--pairs 3] [--json FILE]

Three processes take turns: this checkout, the other commit, and the other commit once more. What the two that are
equal differ by is the noise of a row, with all that processes have by chance, such as where their memory lies; so
several such triples are started. A row is slower if this checkout lost against both in every triple, by more than the
widest noise and by more than 3 %. It is then measured again, and must be slower again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "bench-check"
WHATS = ("forward", "out", "add", "training")
SHAPES = ((1, 4096), (8, 4096), (1024, 384), (2048, 768), (2048, 4096), (65536, 128))
DTYPES = ("float32", "bfloat16")
# Less is not worth a failure.
LEAST = 0.03
# Turns of each process in a triple: forth and back, so that a drift takes from each what it gives.
ROUNDS = 4


@dataclass(frozen=True)
class Row:
    what: str
    rows: int
    cols: int
    dtype: str
    threads: int

    def __str__(self) -> str:
        return f"{self.what} {self.rows}x{self.cols} {self.dtype}, {self.threads} threads"


class Worker(Protocol):
    """A process that times calls."""

    def prepare(self, row: Row) -> None:
        """Get ready for a row."""

    def turn(self) -> float:
        """Seconds of one call."""


@dataclass(frozen=True)
class Triple:
    """Of one row, the time of this checkout, and those of the other commit's two processes."""

    here: float
    there: float
    twin: float

    @property
    def ratio(self) -> float:
        """By how much this checkout is slower than the slower of the two; below one if it is not."""
        return self.here / max(self.there, self.twin)

    @property
    def noise(self) -> float:
        """What two equal processes differ by, as a factor."""
        return max(self.there / self.twin, self.twin / self.there)


@dataclass(frozen=True)
class Verdict:
    row: Row
    ratio: float
    noise: float
    slower: bool


def judge(row: Row, triples: Sequence[Triple]) -> Verdict:
    """What some triples say of a row: the ratio in the middle, the widest noise, and whether all agree beyond it."""
    noise = max(triple.noise for triple in triples)
    typical = sorted(triple.here / math.sqrt(triple.there * triple.twin) for triple in triples)[len(triples) // 2]
    slower = min(triple.ratio for triple in triples) > max(noise, 1.0 + LEAST)
    return Verdict(row, typical, noise, slower)


def measure(row: Row, here: Worker, there: Worker, twin: Worker) -> Triple:
    """One row in one triple of processes: the least of each one's turns."""
    workers = (here, there, twin)
    for worker in workers:
        worker.prepare(row)
    best = [math.inf] * 3
    for index in range(ROUNDS):
        for place in (0, 1, 2) if index % 2 == 0 else (2, 1, 0):
            best[place] = min(best[place], workers[place].turn())
    return Triple(*best)


def compare(
    rows: Sequence[Row], start: Callable[[ExitStack], tuple[Worker, Worker, Worker]], pairs: int
) -> Iterator[Verdict]:
    """Yield the verdict on each row; those that look slower are measured a second time.

    Args:
        rows: what is timed.
        start: starts a triple of processes, which the stack ends.
        pairs: how many triples.
    """
    first = _verdicts(rows, start, pairs)
    doubtful = [verdict.row for verdict in first if verdict.slower]
    again = {verdict.row: verdict for verdict in _verdicts(doubtful, start, pairs)}
    yield from (again.get(verdict.row, verdict) for verdict in first)


def _verdicts(
    rows: Sequence[Row], start: Callable[[ExitStack], tuple[Worker, Worker, Worker]], pairs: int
) -> list[Verdict]:
    found: dict[Row, list[Triple]] = {row: [] for row in rows}
    for _ in range(pairs if rows else 0):
        with ExitStack() as stack:
            workers = start(stack)
            for row in rows:
                found[row].append(measure(row, *workers))
    return [judge(row, triples) for row, triples in found.items()]


class Process:
    """A worker in a process of its own, with the rmsnorm of a folder, or of this Python."""

    def __init__(self, site: Path | None, stack: ExitStack) -> None:
        command = [sys.executable, str(Path(__file__).with_name("turns.py")), str(site or "")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = stack.enter_context(
            subprocess.Popen(  # noqa: S603 - this very interpreter
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        )
        stack.callback(self._process.kill)
        self.file = self._read()

    def prepare(self, row: Row) -> None:
        self._ask(asdict(row))

    def turn(self) -> float:
        return float(self._ask(None))

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process that times calls has ended; what it said stands above")
        return json.loads(line)


def install(commit: str) -> Path:
    """The folder with a commit's rmsnorm, built with its kernels; as it was left if it is there."""
    name = _output("git", "rev-parse", "--short=12", f"{commit}^{{commit}}").decode().strip()
    folder = FOLDER / name
    site = folder / "site"
    if not (site / "rmsnorm").is_dir():
        source = folder / "source"
        source.mkdir(parents=True, exist_ok=True)
        print(f"building {commit} ({folder.name}): some minutes", file=sys.stderr)
        _output("tar", "-x", "-C", str(source), given=_output("git", "archive", name))
        pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", "install", "--no-build-isolation"]
        environment = {**os.environ, "RMSNORM_REQUIRE_KERNELS": "1"}
        subprocess.run([*pip, "--no-deps", "--target", str(site), "."], cwd=source, env=environment, check=True)  # noqa: S603
    return site


def _output(*command: str, given: bytes | None = None) -> bytes:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, input=given).stdout  # noqa: S603


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", help="a commit; default HEAD: what is not committed is compared")
    parser.add_argument("--rows", default=",".join(WHATS), help=f"of {', '.join(WHATS)}; default all")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--pairs", type=int, default=3, help="triples of processes; default 3")
    parser.add_argument("--json", type=Path, help="write the verdicts as lines of JSON")
    given = parser.parse_args(arguments)
    whats = given.rows.split(",")
    if unknown := set(whats) - set(WHATS):
        parser.error(f"--rows takes {', '.join(WHATS)}; got {', '.join(sorted(unknown))}")
    rows = [Row(what, *shape, dtype, given.threads) for what in whats for dtype in DTYPES for shape in SHAPES]
    site = install(given.against)

    def start(stack: ExitStack) -> tuple[Worker, Worker, Worker]:
        return Process(None, stack), Process(site, stack), Process(site, stack)

    return report(compare(rows, start, given.pairs), given.json)


def report(verdicts: Iterator[Verdict], file: Path | None) -> int:
    """Print a line for each row; 1 if one is slower."""
    found = []
    for verdict in verdicts:
        mark = "SLOWER" if verdict.slower else ""
        print(f"{verdict.row!s:44} {verdict.ratio:6.3f}  noise {verdict.noise - 1:5.1%}  {mark}".rstrip(), flush=True)
        found.append(verdict)
    slower = sum(verdict.slower for verdict in found)
    print(f"{slower} of {len(found)} rows are slower beyond their noise" if slower else "no row is slower")
    if file is not None:
        file.write_text("".join(f"{json.dumps(asdict(verdict))}\n" for verdict in found), encoding="utf-8")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
