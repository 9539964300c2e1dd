"""Every class in transformers' model files with "norm" in its name, built small.

`python -m tests.wild.classes` writes docs/families.md: which bodies there are, what each computes, and which classes
have it.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path

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

In the model files of transformers {version}, {classes} classes have *norm* in their names. {norms} of them are
RMSNorms: {plain} plain, {gated} gated, in {bodies} bodies. {others} are something else, and {composed} are layers built
from a configuration.

Each was built with random weights, identified by running it, and its replacement compared with it in float32, bfloat16
and float16. The columns on the right say how the two compare in 16 bits: *equal*; *1 ulp*: one unit in the last place
apart; *nearer*: the module rounds more often, and the replacement is nearer to exact arithmetic. Below the table stand
the bodies. eps is what it is by default.
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


def body(cls):
    """The source of what a class computes: its methods but the constructor, with names and comments out of the way."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    methods = []
    for node in tree.body[0].body:
        if isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "extra_repr"):
            if ast.get_docstring(node):
                node.body = node.body[1:]
            for argument in node.args.args:
                argument.annotation = None
            node.returns = None
            methods.append(ast.unparse(node))
    return "\n".join(methods).replace(cls.__name__, "Norm")


def families(classes):
    """(convention, body) -> classes; reason -> classes; and the classes that are built from a configuration."""
    generator = torch.Generator().manual_seed(0)
    accepted, refused, composed = {}, {}, []
    for cls in classes:
        module = build(cls, generator)
        if module is None:
            composed.append(cls)
            continue
        try:
            convention = examine(module)
        except NotRMSNorm as reason:
            refused.setdefault(str(reason), []).append(cls)
        else:
            accepted.setdefault((body(cls), convention), []).append(cls)
    return accepted, refused, composed


def document(classes):
    import transformers

    accepted, refused, composed = families(classes)
    bodies = {}
    for (source, convention), members in sorted(accepted.items(), key=lambda item: -len(item[1])):
        bodies.setdefault(source, []).append((convention, members))
    count = Counter(convention.activation is not None for _, convention in accepted for _ in accepted[_, convention])
    lines = [
        _INTRODUCTION.format(
            version=transformers.__version__,
            classes=len(classes),
            norms=count[False] + count[True],
            plain=count[False],
            gated=count[True],
            bodies=len(bodies),
            others=sum(map(len, refused.values())),
            composed=len(composed),
        ),
        "| body | classes | for example | convention | bfloat16 | float16 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for number, found in enumerate(bodies.values(), 1):
        for convention, members in found:
            evidence = {e.x: e for e in convention.evidence if e.weight in (None, e.x)}
            marks = [_mark(evidence[dtype]) for dtype in (torch.bfloat16, torch.float16)]
            words = str(convention).replace(f"width {WIDTH}, ", "")
            lines.append(f"| {number} | {len(members)} | {members[0].__name__} | {words} | {' | '.join(marks)} |")
    for number, (source, found) in enumerate(bodies.items(), 1):
        names = ", ".join(sorted(cls.__name__ for _, members in found for cls in members))
        lines += ["", f"## Body {number}", "", "```python", source, "```", "", names]
    lines += ["", "## Not RMSNorm", "", "| classes | why |", "| --- | --- |"]
    for reason, members in sorted(refused.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {', '.join(sorted(cls.__name__ for cls in members))} | {reason} |")
    lines += ["", "## Built from a configuration", "", ", ".join(sorted(cls.__name__ for cls in composed))]
    return "\n".join(lines) + "\n"


def _mark(evidence):
    return "equal" if evidence.equal == 1.0 else "1 ulp" if evidence.apart <= 1 else "nearer"


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "docs" / "families.md"
    path.write_text(document(find()))
    print(f"wrote {path}")
