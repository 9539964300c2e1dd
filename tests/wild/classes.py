"""Every class in transformers' model files with "norm" in its name, built small.

`python -m tests.wild.classes` writes docs/families.md: what each class computes, as formulas of our own.
"""

import importlib
import inspect
import re
import sys
from collections import Counter
from functools import cache
from itertools import groupby
from pathlib import Path
from textwrap import fill

import torch
from torch import nn

from rmsnorm.patching.identifying import examine
from rmsnorm.patching.specimen import NotRMSNorm

WIDTH = 64
# What constructors call the things they need. A class that needs anything else is built from a configuration, and is a
# layer or a model with norms inside; those are patched as parts of whole models (test_models.py).
_SIZES = (
    *("hidden_size", "dim", "normalized_shape", "n", "num_channels", "size", "d_model", "d", "embed_dim", "channels"),
    *("emb_dim", "num_features", "ndim", "in_channels", "out_channels"),
)
_OTHERS = {"group_size": 32, "kernel_size": 3, "stride": 1, "padding": 1}


_INTRODUCTION = """\
# The norms of transformers, by what they compute

Made by `make families`; do not edit.

In the model files of transformers {version}, {classes} classes have *norm* in their names. {norms}
of them are RMSNorms: {plain} plain, {gated} gated, in {forms} forms. {others} are something else,
and {composed} are layers built from a configuration.

The test builds each class with random weights, identifies it by running it (`rmsnorm.identify`),
replaces it (`rmsnorm.patch`) and compares the two in float32, bfloat16 and float16.

| form | classes | for example | eps | arguments | bfloat16 | float16 |
| --- | --- | --- | --- | --- | --- | --- |
"""
_NOTATION = """
- *arguments*: of `rmsnorm.RMSNorm`, or of `rmsnorm.GatedRMSNorm` where there is an `activation`.
  *eps*: the class's default. Groups of 32 are what the test asked for.
- *bfloat16*, *float16*: how module and replacement compare. *equal*: to the bit. *1 ulp*: at most
  one unit in the last place apart. *nearer*: the module rounds more often, and the replacement is
  nearer to exact arithmetic.

The formulas below use

```text
x, w, z       the input, the weight, the gate
rstd(u)       1 / sqrt(mean(u^2) + eps) over the last dimension, or over each group of it, in float32
sigmoid, silu in float32; silu(z) is z * sigmoid(z)
to(dtype, u)  u rounded to a dtype
a * b         in the dtype that those of a and b promote to
```
"""


class _CpmAntConfig:
    """The one norm that takes its size out of a configuration."""

    eps = 1e-6
    hidden_size = WIDTH


@cache
def find():
    """The classes, with progress on standard error: importing three hundred files takes a while."""
    import transformers.models

    found = []
    files = sorted(Path(transformers.models.__file__).parent.glob("*/modeling_*.py"))
    for i, file in enumerate(files):
        if i % 50 == 0:
            print(f"reading model files: {i} of {len(files)}", file=sys.stderr)
        names = re.findall(r"^class (\w*norm\w*)\(", file.read_text(), re.IGNORECASE | re.MULTILINE)
        if names:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            found += [getattr(module, name) for name in names]
    return tuple(cls for cls in found if issubclass(cls, nn.Module))


def build(cls, generator):
    """An instance with random weights, some far from 1; None if it takes more than sizes."""
    arguments = {}
    for p in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        if cls.__name__ == "CpmAntLayerNorm":
            arguments[p.name] = _CpmAntConfig()
        elif p.name in _SIZES and p.default in (p.empty, None):
            arguments[p.name] = WIDTH
        elif p.name in _OTHERS and p.default in (p.empty, None):
            arguments[p.name] = _OTHERS[p.name]
        elif p.default is p.empty:
            return None
    try:
        module = cls(**arguments)
    except TypeError:
        return None
    with torch.no_grad():
        for t in module.parameters():
            t.copy_(torch.randn(t.shape, generator=generator))
    return module


def families(classes):
    """[(convention, class)]; reason -> classes; and the classes that are built from a configuration."""
    generator = torch.Generator().manual_seed(0)
    accepted, refused, composed = [], {}, []
    for cls in classes:
        module = build(cls, generator)
        if module is None:
            composed.append(cls)
            continue
        try:
            accepted.append((examine(module), cls))
        except NotRMSNorm as reason:
            refused.setdefault(str(reason), []).append(cls)
    return accepted, refused, composed


def formula(convention):
    """Lines that say what a convention computes and where it rounds."""
    once = convention.rounding == "once"
    gate = None if convention.activation is None else f"{convention.activation}(z)"
    gate_first = gate is not None and not convention.norm_before_gate
    result = "u * rstd(u)" if gate_first else "x * rstd(x)"
    if not once:
        result = f"to({'x' if convention.rounding == 'before_scale' else 'w'}.dtype, {result})"
    if convention.weight is not None:
        result += f" * (to(float32, w) + {convention.weight_offset:g})" if convention.weight_offset else " * w"
    lines = [f"u = x * {gate}"] if gate_first else []
    if gate is None or gate_first:
        return [*lines, f"y = to(x.dtype, {result})" if once else f"y = {result}"]
    return [f"n = {result}", f"y = to(x.dtype, n * {gate})"]


def result_dtype(convention):
    if convention.weight is None or convention.rounding == "once":
        return "The result has x's dtype."
    if convention.activation is not None and convention.norm_before_gate:
        return "The result has x's dtype."
    if convention.rounding == "weight_dtype":
        return "The result has the weight's dtype."
    return "The result has the dtype that x's and the weight's promote to."


def document(classes):
    import transformers

    accepted, refused, composed = families(classes)
    gated = Counter(convention.activation is not None for convention, _ in accepted)
    by_form = {}
    for convention, cls in accepted:
        by_form.setdefault(_form(convention), []).append((convention, cls))
    forms = sorted(by_form.values(), key=lambda members: (members[0][0].activation is not None, -len(members)))
    lines = []
    for number, members in enumerate(forms, 1):
        members.sort(key=_line)
        for (eps, *marks), same in groupby(members, _line):
            same = list(same)
            cells = (number, len(same), same[0][1].__name__, f"{eps:g}", _arguments(same[0][0]), *marks)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += _NOTATION.splitlines()
    for number, members in enumerate(forms, 1):
        convention = members[0][0]
        lines += ["", f"## Form {number}", "", "```text", *formula(convention), "```", "", result_dtype(convention)]
        if convention.group_size is not None:
            lines.append("Statistics are those of groups of the row.")
        lines += ["", fill(_names(cls for _, cls in members), 100)]
    lines += ["", "## Not RMSNorm", "", "| classes | why |", "| --- | --- |"]
    for reason, others in sorted(refused.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {_names(others)} | {reason} |")
    lines += ["", "## Built from a configuration", "", fill(_names(composed), 100)]
    introduction = _INTRODUCTION.format(
        version=transformers.__version__,
        classes=len(classes),
        norms=len(accepted),
        plain=gated[False],
        gated=gated[True],
        forms=len(forms),
        others=sum(map(len, refused.values())),
        composed=len(composed),
    )
    return introduction + "\n".join(lines) + "\n"


def _form(convention):
    return (*formula(convention), convention.group_size is not None)


def _line(member):
    """What classes of one line of the table have in common."""
    convention, _ = member
    evidence = {e.x: e for e in convention.evidence if e.weight in (None, e.x)}
    return convention.eps, *(_mark(evidence[dtype]) for dtype in (torch.bfloat16, torch.float16))


def _arguments(convention):
    affine = {} if convention.weight is not None else {"elementwise_affine": False}
    options = {**affine, **convention.options}
    if convention.activation is not None and convention.norm_before_gate:
        del options["norm_before_gate"]  # the default
    return " ".join(f"`{name}={value!r}`" for name, value in options.items()) or "defaults"


def _names(classes):
    return ", ".join(sorted(cls.__name__ for cls in classes))


def _mark(evidence):
    return "equal" if evidence.equal == 1.0 else "1 ulp" if evidence.apart <= 1 else "nearer"


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "docs" / "families.md"
    path.write_text(document(find()))
    print(f"wrote {path}")
