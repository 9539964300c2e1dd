"""The norms of a model or a checkpoint: convention, eps, range of the weights, and what looks wrong.

TARGET is a checkpoint folder, a .safetensors or .gguf file, a config.json, or module:callable, where the callable takes
no arguments and returns a model. Conventions are found by running the modules, so they need the model's code: with a
configuration it is transformers' (pip install "rmsnorm[demo]"). Exits with 1 if anything looks wrong, or could not be
examined.
"""

import argparse

from rmsnorm.cli.inspect.findings import examine_weights
from rmsnorm.cli.inspect.report import Report, show
from rmsnorm.cli.inspect.sources import read
from rmsnorm.cli.progress import progress
from rmsnorm.cli.requirements import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="folder, .safetensors, .gguf, config.json, or module:callable")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        require("demo", "rich")
    with progress(4) as step:
        found = read(arguments.target, step)
        step("looking at the weights")
        norms = examine_weights(found.norms, found.offsets_folded)
    report = Report(found.source, found.warnings, found.notes, norms)
    if arguments.json:
        print(report.json())
    else:
        show(report)
    return 1 if report.warnings or report.suspect else 0
