"""The norms of a model or a checkpoint: convention, eps, range of the weights, and what looks wrong.

TARGET is a checkpoint folder, a .safetensors or .gguf file, a config.json, or module:callable, where the callable takes
no arguments and returns a model. Conventions are found by running the modules, so they need the model's code: with a
configuration it is transformers' (pip install "rmsnorm[demo]"). Exits with 1 if anything looks wrong.
"""

import argparse
import json
from dataclasses import asdict

from rmsnorm.cli.inspect.findings import Norm, examine_weights
from rmsnorm.cli.inspect.sources import read
from rmsnorm.cli.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="folder, .safetensors, .gguf, config.json, or module:callable")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    with progress(3) as step:
        found = read(arguments.target, step)
        step("looking at the weights")
        norms = examine_weights(found.norms, found.eps_of_config)
    if arguments.json:
        print(json.dumps({"source": found.source, "notes": found.notes, "norms": list(map(asdict, norms))}, indent=2))
    else:
        print(table(found.source, found.notes, norms))
    return 1 if any(norm.warnings for norm in norms) else 0


def table(source: str, notes: list[str], norms: list[Norm]) -> str:
    head = ("name", "width", "convention", "eps", "weight", "from", "to", "median")
    rows = [
        (
            norm.name,
            "any" if norm.width is None else str(norm.width),
            norm.convention or "unknown",
            "unknown" if norm.eps is None else f"{norm.eps:g}",
            norm.dtype or "none",
            *("" if value is None else f"{value:.4g}" for value in (norm.low, norm.high, norm.median)),
        )
        for norm in norms
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [source, *notes, ""]
    ruled = (head, tuple("-" * width for width in widths), *rows)
    lines += ["  ".join(c.ljust(width) for c, width in zip(row, widths, strict=True)).rstrip() for row in ruled]
    for title, said in (("Warnings", "warnings"), ("Notes", "notes")):
        by_text: dict[str, list[str]] = {}
        for norm in norms:
            for text in getattr(norm, said):
                by_text.setdefault(text, []).append(norm.name)
        if by_text:
            lines += ["", title]
        for text, names in by_text.items():
            lines.append(f"  {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}")
    if not norms:
        lines += ["", "No RMSNorm found."]
    elif not any(norm.warnings for norm in norms):
        lines += ["", f"{len(norms)} norms, nothing looks wrong."]
    return "\n".join(lines)
