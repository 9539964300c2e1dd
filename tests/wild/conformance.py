"""`python -m tests.wild.conformance` writes docs/conformance.md: every installed RMSNorm, taken through the suite."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from rmsnorm.conformance import CHECKS, named

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
MARKS = {"pass": "✓", "fail": "✗", "not promised": "○", "refused": "○", "not applicable": "-", "not run": "?"}
_INTRODUCTION = """\
# RMSNorm under examination

Made by `make conformance`; do not edit.

`rmsnorm check IMPLEMENTATION` takes anybody's RMSNorm through the questions below:
`rmsnorm check torch`, `rmsnorm check mymodel.layers:RMSNorm`, `rmsnorm check norm.py:rms_norm`. It
tells on the terminal, with `--json`, and with `--html FILE` as a page. Exit codes: 0 all scored
checks passed, 1 something was found, 2 nothing was checked or all of it was refused, 130
interrupted.

## What is right

First the *form* is found, by running it: the offset that is added to the weight, eps and where it
stands, where 16-bit values are rounded. Everything else is judged by that very form: an
implementation with eps outside the root fails `eps`, and its accuracy is still measured against the
formula that it computes.

Errors are in *units in the last place* (ulp) of the result, against exact arithmetic: float64 for
float32 and 16-bit inputs, where its own error is below 2^-22 ulp, and rational numbers for float64.
The rows are fixed: normally distributed, large, small, as small as eps, all positive, one outlier,
eight binades, heavy tails, sparse, of one magnitude, powers of two, and just below powers of two;
64, 1024 and 4096 wide. An error passes if it is at most what the convention has to round, and one
unit more:

| | float32, float64 | bfloat16, float16 |
| --- | --- | --- |
| the last product | 0.5 | 0.5 |
| x_hat, where it is rounded before the weight | 1 | 1 |
| the reciprocal root | 1 | |
| under the root, by half: a square, the mean, eps, four roundings of a sum | 3.5 | |
| the gain, with an offset | 1 | |
| one more | 1 | 1 |

An error that is common to all elements of a row is below one unit and still moves a model:
`row-factor` finds it by regression, where independent roundings average out. Its limit is six
standard deviations of those.

Gradients are in *roundings*, half a unit, of the terms that they are made of: dx in 16 bits may
have four (after u = dy gain, x_hat, their difference, the result), in float32 sixteen; dweight has
four of each term, and those of a float32 sum in any order.

What takes a *residual* is the norm of x + residual, and may round the sum before or not: which one
it does is found, and then judged like any norm. The sum that comes back is one addition and one
rounding, to the bit. Its gradient is added to that of the norm: two roundings more, and one where
the sum was not rounded before it was normalised.

What takes a *gate* has an activation, before the norm or after it, which is found. In 16 bits that
is a rounding of the activation, and one of the norm's result; before the norm it is one of x act
too, which moves the mean. In float32 an activation has its exponential, a sum, a quotient and a
product: 6 units, 8 before the norm. Gradients have five roundings more than a norm's.

*Groups* are judged like rows, in sizes that are asked for, or in its own. A norm that always takes
a residual or a gate is asked everything else with a residual of zeros, or a gate that is wide open.

A norm whose result is *quantised* (a tensor of int8 or float8, and its scales) is asked that alone:
the scale is amax / qmax within what the norm may be off by, q is the nearest to y / scale, half to
even. Rows of ones have a norm of exactly the weight, so that ties are known to the bit.

Calls leave nothing behind: sequences of them, in other sizes and dtypes, with weights that changed,
with backwards in other orders and from several threads, must have the answers that each has alone,
and results must be their own memory.

*Fair*: what is refused is not scored, and the score names it. A refusal is a clear error about the
argument, its dtype, shape, layout or device; any other exception is a fault, and so is any for an
input of no rows or in a backward. Checks run in a process of their own, so that a crash is a
finding too. What only some libraries promise is an extra: it is shown, and scored where it is
promised, or with `--strict`.

"""


def examine(name):
    """The report of one name as JSON, from a process of its own: a stranger's kernel may take it down."""
    command = [sys.executable, "-m", "rmsnorm", "check", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "80"})
    if done.returncode in (0, 1) and done.stdout:
        return json.loads(done.stdout)
    _, found, said = done.stderr.partition("rmsnorm check: ")
    # Of what was tried, the first is how it is meant to be called.
    return "; ".join(said.split("; ")[:2]).strip().rstrip(".") if found else f"{name}: {done.returncode}"


def questions():
    """The checks as tables."""
    lines = ["## The questions", ""]
    for title, extra in (("Scored:", False), ("Extras:", True)):
        lines += [title, "", "| check | if all is well |", "| --- | --- |"]
        lines += [f"| {check.name} | {check.meaning} |" for check in CHECKS if check.extra == extra]
        lines.append("")
    return "\n".join(lines)


def document(reports, missing):
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    lines = [_INTRODUCTION + questions(), f"## Results, on the CPU with {where}", ""]
    lines += [
        "| implementation | is | form | passed | extras | ulp: float32 | bfloat16 | float16 |",
        "| --- " * 8 + "|",
    ]
    for name, report in reports.items():
        found = {r["name"]: r for r in report["results"]}
        score = report["score"]
        errors = [found[f"accuracy-{dtype}"]["figures"].get("max") for dtype in ("float32", "bfloat16", "float16")]
        cells = [
            f"`{name}`",
            report["source"],
            found["convention"]["measured"],
            f"{score['passed']} of {score['scored']}",
            f"{score['extras_passed']} of {score['extras']}",
            *("" if e is None else f"{e:.2f}" for e in errors),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "✓ passes, ✗ fails, ○ not promised (refused, or an extra that does not hold), - does not apply.", ""]
    lines += [f"| | {' | '.join(reports)} |", "| --- " * (len(reports) + 1) + "|"]
    for check in CHECKS:
        lines.append(f"| {check.name} | {' | '.join(_mark(report, check.name) for report in reports.values())} |")
    lines += ["", "## Around the norm", "", *_around(reports)]
    lines += ["", "## What was found", ""]
    told = [
        f"- `{name}`, {r['name']}: {r['finding']}."
        for name, report in reports.items()
        for r in report["results"]
        if r["verdict"] == "fail"
    ]
    lines += told or ["Nothing."]
    lines += ["", "## What is refused", ""]
    for name, report in reports.items():
        refused = [r for r in report["results"] if r["verdict"] == "refused"]
        if refused:
            lines.append(f"- `{name}`: " + "; ".join(f"{r['name']} ({_brief(r['measured'])})" for r in refused) + ".")
    if missing:
        lines += ["", "## Not examined here", "", *(f"- {reason}." for reason in missing)]
    return "\n".join(lines) + "\n"


def _around(reports):
    """What those with a residual or a gate do with it."""
    for name, report in reports.items():
        found = {r["name"]: r for r in report["results"]}
        for role in ("residual", "gate"):
            told = [
                f"{r['measured']} in {dtype}"
                for dtype in ("float32", "bfloat16", "float16")
                if (r := found.get(f"{role}-{dtype}")) and r["verdict"] == "pass"
            ]
            if told:
                yield f"- `{name}`, with a {role}: {'; '.join(told)}."


def _brief(measured):
    return measured.partition(". ")[0].removeprefix("refused: ")[:90].rstrip(". ")


def _mark(report, check):
    return MARKS[next(r["verdict"] for r in report["results"] if r["name"] == check)]


def marks(page):
    """The marks of a page: name -> check -> mark."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    start = next(i for i, line in enumerate(lines) if line.startswith("| | rmsnorm |"))
    rows = [line.strip("| ").split(" | ") for line in lines]
    head = rows[start]
    table = [row for row in rows[start + 1 :] if len(row) == len(head) + 1 and not row[0].startswith("---")]
    return {name: {row[0]: row[1 + i] for row in table} for i, name in enumerate(head)}


if __name__ == "__main__":
    reports, missing = {}, []
    for number, name in enumerate(named.NAMES, 1):
        print(f"{number} of {len(named.NAMES)}: {name}", file=sys.stderr, flush=True)
        found = examine(name)
        if isinstance(found, str):
            missing.append(found)
        else:
            reports[name] = found
    PAGE.write_text(document(reports, missing), encoding="utf-8")
    print(f"wrote {PAGE}")
