"""Times RMSNorm against everything else that is installed, or a whole model on its own norms and on ours.

Every contestant is held to float64 before it is timed, and all take turns. A wrong one has no speed: it is listed with
its error, and the command exits with 1. Ctrl-C keeps what was measured so far.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from rmsnorm.benchmarking.peers import Unavailable
from rmsnorm.cli import info
from rmsnorm.cli.bench import model, page, plot, shapes, table, training
from rmsnorm.cli.bench.lines import open_lines, read
from rmsnorm.cli.bench.measure import CACHES, CONTESTANTS, OURS_THEN_COMPILED, Plan, Result, measure
from rmsnorm.cli.bench.model import Speed
from rmsnorm.cli.bench.shapes import Case, Shape
from rmsnorm.cli.bench.tensors import Inputs
from rmsnorm.cli.bench.training import Training
from rmsnorm.cli.progress import Step, progress
from rmsnorm.cli.requirements import (
    DTYPES,
    CannotRun,
    device,
    file_of,
    list_of,
    one_of,
    positive,
    require,
    require_writable,
    thread_count,
    writing,
)
from rmsnorm.cli.text import printable

# Of racing, in all and for each case and cache; making and checking the contestants comes on top.
QUICK_SECONDS = 30.0
# They take seconds to be ready.
COMPILED = ("torch.compile", OURS_THEN_COMPILED)
PATIENCE = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what, caches, names = (list_of(one_of(*known)) for known in (shapes.WHATS, CACHES, CONTESTANTS))
    dtypes = list_of(one_of(*DTYPES, training.AUTOCAST))
    parser.add_argument(
        "--what",
        type=what,
        metavar="LIST",
        help=f"of {', '.join(shapes.WHATS)} (training is forward and backward, quantized int8 with a scale a row); "
        "default all but quantized",
    )
    parser.add_argument(
        "--shapes",
        type=list_of(shapes.parse),
        metavar="LIST",
        help="of ROWSxCOLS, parts of names (see --list), and all; default " + ", ".join(map(str, shapes.DEFAULT)),
    )
    parser.add_argument(
        "--dtypes", type=dtypes, metavar="LIST", help=f"of {', '.join(DTYPES)}; default float32,bfloat16"
    )
    parser.add_argument(
        "--threads", type=list_of(thread_count), metavar="LIST", help="thread counts; default what torch has"
    )
    parser.add_argument("--caches", type=caches, metavar="LIST", help="of warm, cold; default both")
    parser.add_argument("--contestants", type=names, metavar="LIST", help="see --list; default all that are installed")
    parser.add_argument("--device", type=device, default="cpu", help="default cpu")
    parser.add_argument("--rounds", type=positive, help="default 15, fewer where they take long")
    parser.add_argument("--quick", action="store_true", help="less of everything: within a minute, no torch.compile")
    parser.add_argument("--list", action="store_true", help="list the named shapes and the contestants, and stop")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show what --json wrote, time nothing")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON lines as they come, in place of tables or to a file"
    )
    pictures = file_of(".svg", ".png")
    parser.add_argument("--plot", type=pictures, metavar="FILE", help=".svg or .png: bandwidth against size")
    parser.add_argument("--html", type=file_of(".html"), metavar="FILE", help="one page: tables, and plots that react")
    whole = parser.add_argument_group("a whole model", "takes --dtypes, --threads, --rounds, --quick and --json too")
    whole.add_argument(
        "--model",
        nargs="?",
        const=model.TINY,
        metavar="CONFIG",
        help="tokens per second and the share of norms, before and after rmsnorm.patch, with random weights; "
        "by a config.json of transformers or the folder it is in; default a small Llama",
    )
    whole.add_argument("--prefill", type=positive, help="tokens in its prompt, or of a training step (default 256)")
    whole.add_argument("--decode", type=positive, help="tokens it generates (default 32)")
    whole.add_argument(
        "--train",
        action="store_true",
        help="training steps instead, their time and memory; --dtypes takes autocast too (default all three)",
    )
    whole.add_argument("--compile", action="store_true", help="with --train: also under torch.compile, minutes more")


def run(arguments: argparse.Namespace) -> int:
    refuse_what_would_be_ignored(arguments)
    require("bench", *needs(arguments))
    require_writable(arguments.plot, arguments.html)
    if arguments.model:
        return run_model(arguments)
    if arguments.list:
        print(describe(arguments.device))
        return 0
    results: list[Result] = []
    interrupted = False
    try:
        if arguments.source:
            about, results = read(arguments.source)
        else:
            about = machine()
            contest(arguments, about, results.append)
    except KeyboardInterrupt:
        interrupted = True
    if arguments.json != "-":
        table.show(table.order(results))
    if arguments.plot and any(result.timing for result in results):
        with writing(arguments.plot):
            plot.draw(results, arguments.plot)
    if arguments.html:
        with writing(arguments.html):
            page.write(about, results, arguments.html)
    if interrupted:
        raise KeyboardInterrupt
    return 1 if any(result.status == "wrong" for result in results) else 0


def run_model(arguments: argparse.Namespace) -> int:
    threads = arguments.threads or [torch.get_num_threads()]
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    tokens, new = arguments.prefill or 256, arguments.decode or 32
    dtypes: Sequence[str] = arguments.dtypes or (["bfloat16"] if arguments.quick else ["float32", "bfloat16"])
    if arguments.train:
        dtypes = dtypes if arguments.dtypes or arguments.quick else training.PRECISIONS
        steps = training.count(dtypes, threads, rounds, arguments.compile)
        return _measured(
            lambda step: training.measure(arguments.model, dtypes, threads, tokens, rounds, arguments.compile, step),
            training.show,
            steps,
            arguments.json,
        )
    return _measured(
        lambda step: model.measure(arguments.model, dtypes, threads, tokens, new, rounds, step),
        model.show,
        1 + len(dtypes) * len(threads) * (1 + 2 * rounds),
        arguments.json,
    )


Found = TypeVar("Found", Speed, Training)


def _measured(
    measuring: Callable[[Step], Iterable[Found]], show: Callable[[Sequence[Found]], None], steps: int, json: str | None
) -> int:
    """Show what is found, write it as it comes, and keep what there is on Ctrl-C."""
    found: list[Found] = []
    interrupted = False
    try:
        with open_lines(json) as write, progress(steps) as step:
            write({"about": machine()})
            for one in measuring(step):
                write(one.to_json())
                found.append(one)
    except KeyboardInterrupt:
        interrupted = True
    if json != "-":
        show(found)
    if interrupted:
        raise KeyboardInterrupt
    return 0


def refuse_what_would_be_ignored(arguments: argparse.Namespace) -> None:
    """Raise `CannotRun` if an argument has no meaning beside another."""
    measured = ("what", "shapes", "caches", "contestants")
    for given, others in {
        "model": (*measured, "source", "list", "plot", "html"),
        "source": (*measured, "dtypes", "threads", "rounds", "quick", "list", "json"),
    }.items():
        for other in others:
            if getattr(arguments, given) and getattr(arguments, other):
                names = (f"--{'from' if name == 'source' else name}" for name in (given, other))
                raise CannotRun(" and ".join(names) + " cannot be given together")
    if arguments.model and torch.device(arguments.device).type != "cpu":
        raise CannotRun("--model runs on the CPU: its stopwatch does not wait for other devices")
    for name in ("prefill", "decode", "train"):
        if getattr(arguments, name) and not arguments.model:
            raise CannotRun(f"--{name} is for --model")
    if arguments.compile and not arguments.train:
        raise CannotRun("--compile is for --train")
    if arguments.decode and arguments.train:
        raise CannotRun("--decode and --train cannot be given together")
    if training.AUTOCAST in (arguments.dtypes or ()) and not arguments.train:
        raise CannotRun(f"--dtypes takes {training.AUTOCAST} with --train alone")
    if arguments.train and set(arguments.dtypes or ()) - {*training.PRECISIONS}:
        raise CannotRun(f"--train takes --dtypes of {', '.join(training.PRECISIONS)}")


def needs(arguments: argparse.Namespace) -> list[str]:
    """Return the packages that what was asked for takes beyond torch."""
    wanted = {"rich": arguments.json != "-", "matplotlib": arguments.plot, "plotly": arguments.html}
    return [package for package, want in wanted.items() if want]


def machine() -> dict[str, Any]:
    """Return what the figures depend on, and the command."""
    facts = info.collect()
    names = ("rmsnorm", "torch", "processor", "accelerator", "platform")
    command = printable(shlex.join(["rmsnorm", *sys.argv[1:]]), 1000)
    return {name: facts[name] for name in names} | {
        "isa": facts["kernels"]["isa"],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
    }


def contest(arguments: argparse.Namespace, about: dict[str, Any], found: Callable[[Result], None]) -> None:
    """Measure what was asked for, and hand over and write each result as it comes."""
    cases = choose_cases(arguments)
    plan = choose_plan(arguments, cases)
    with open_lines(arguments.json) as write, progress(plan.size(cases)) as step:
        write({"about": about})
        for result in measure(cases, plan, step):
            write(result.to_json())
            found(result)


def choose_plan(arguments: argparse.Namespace, cases: Sequence[Case]) -> Plan:
    """Return who runs, in which caches, and for how long."""
    quick = arguments.quick
    return Plan(
        names=arguments.contestants or [name for name in CONTESTANTS if not quick or name not in COMPILED],
        caches=arguments.caches or (["warm"] if quick else list(CACHES)),
        rounds=arguments.rounds or (7 if quick else 15),
        budget=1e-3 if quick else 2e-3,
        patience=QUICK_SECONDS / len(cases) if quick else float("inf") if arguments.rounds else PATIENCE,
    )


def choose_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases in the order of the tables."""
    quick = arguments.quick
    chosen: Sequence[Shape] = shapes.QUICK if quick else shapes.DEFAULT
    if arguments.shapes:
        chosen = list(dict.fromkeys(shape for found in arguments.shapes for shape in found))
    whats = arguments.what or (["forward", "training"] if quick else list(shapes.DEFAULT_WHATS))
    return [
        Case(what, shape, dtype, str(arguments.device), threads)
        for threads in arguments.threads or [torch.get_num_threads()]
        for what in whats
        for dtype in arguments.dtypes or ["float32", "bfloat16"]
        for shape in chosen
    ]


def describe(device: torch.device) -> str:
    """Return the named shapes, and the contestants with the reason for each that is missing."""
    case = Case("forward", Shape(1, 64), "float32", str(device), 1)
    lines = ["Shapes", *(f"  {shape.name:20}{shape.size}" for shape in shapes.NAMED), "", f"Contestants ({device})"]
    for name, make in CONTESTANTS.items():
        try:
            make(case, Inputs.of(case))
            state = "ready"
        except Unavailable as reason:
            state = str(reason)
        except Exception as error:  # other people's code may raise anything
            state = printable(f"{type(error).__name__}: {error}".partition("\n")[0])
        lines.append(f"  {name:20}{state}")
    return "\n".join(lines)
