"""Compiles every shipped configuration and reports what is wrong: `python -m tests.gpu.compile_worker PART PARTS`.

Prints {"faults": [text, ...], "kernels": how many} as JSON, of every PARTS-th call; with `planted` or `foreign`
instead of numbers, {name of a deliberate fault: [text, ...]}.
"""

import importlib
import json
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path

from rmsnorm.gpu import kernels
from rmsnorm.gpu.kernels import fixed_sum
from rmsnorm.gpu.launching import Kernel
from tests.gpu import compiled
from tests.gpu.compiled import (
    BRAIN,
    DTYPES,
    GROUPED,
    GROUPED_WIDTHS,
    PLAIN,
    SINGLE,
    TARGETS,
    WIDTHS,
    compile_all,
    faults,
)


def calls():
    """Targets, operators and widths; types in turn, so that each meets each target and operator."""
    for number, (target, op, cols) in enumerate(product(TARGETS, PLAIN, WIDTHS)):
        if "row" not in op or cols in (64, 1024, 2880, 12288):
            yield target, op, *DTYPES[number % 3], cols
    for number, (target, op, cols) in enumerate(product(TARGETS, GROUPED, GROUPED_WIDTHS)):
        if not op.startswith("groups") or cols in (128, 768, 4096, 12288):
            yield target, op, *DTYPES[(number + number // len(GROUPED_WIDTHS)) % 3], cols


def check(part, parts):
    found, number, known = [], 0, set()
    for call in list(calls())[part::parts]:
        for code in compile_all(*call, known=known):
            number += 1
            found += faults(code)[0]
    return {"faults": found, "kernels": number}


# ---------------------------------------------------------------- deliberate faults

HOPPER, OLD, AMD = TARGETS[1], TARGETS[0], TARGETS[-1]


def planted():
    """Every assertion is shown to bite."""
    plain = ((target, op) for target in (HOPPER, AMD) for op in ("backward", "gate first", "gate first backward"))
    yield "none", [code for call in plain for code in compile_all(*call, BRAIN, BRAIN, 4096)]
    yield "fusion on", compile_all(HOPPER, "backward", BRAIN, BRAIN, 4096, options={"enable_fp_fusion": True})
    yield "fusion on, AMD", compile_all(AMD, "backward", BRAIN, BRAIN, 4096, options={"enable_fp_fusion": True})
    unaligned = {"change": lambda kernel, aligned: (kernel, False)}
    yield "alignment dropped", compile_all(HOPPER, "forward", BRAIN, BRAIN, 4096, **unaligned)
    yield "alignment dropped, AMD", compile_all(AMD, "forward", SINGLE, SINGLE, 4096, **unaligned)
    for name, target, op, file, old, new in (
        ("eps as float32", HOPPER, "forward", "forward", "eps: tl.float64", "eps: tl.float32"),
        (
            *("32-bit offset", HOPPER, "forward", "values"),
            *("offset = row * inner_stride", "offset = row.to(tl.int32) * inner_stride.to(tl.int32)"),
        ),
        (
            *("an approximate square root", OLD, "forward", "forward"),
            *(
                "(1.0 / tl.sqrt(squares * reciprocal + eps)).to(tl.float32)",
                "tl.rsqrt((squares * reciprocal + eps).to(tl.float32))",
            ),
        ),
        (
            *("32-bit leaves", HOPPER, "few rows", "values"),
            *("leaf * rows >> log_leaves", "((leaf * rows).to(tl.int32) >> log_leaves).to(tl.int64)"),
        ),
        ("a sum to nearest", HOPPER, "dx", "fixed_sum", "fma.rz.f64", "fma.rn.f64"),
        ("flushed subnormals", TARGETS[3], "dx", "fixed_sum", "fma.rz.f32", "fma.rz.ftz.f32"),
        (
            *("a library's exponential", OLD, "gate last", "stages"),
            *("(e / ((p - q) + e)).to(tl.float32)", "tl.sigmoid(z)"),
        ),
        (
            *("a library's exponential, AMD", AMD, "gate last backward", "stages"),
            *("(e / ((p - q) + e)).to(tl.float32)", "tl.sigmoid(z)"),
        ),
        (
            *("32-bit offset, gated", HOPPER, "gate last", "values"),
            *("offset = row * inner_stride", "offset = row.to(tl.int32) * inner_stride.to(tl.int32)"),
        ),
    ):
        if old != new:
            with Mutant(file, old, new) as change:
                yield name, compile_all(target, op, BRAIN, BRAIN, 4096, change)
    fused = {"options": {"enable_fp_fusion": True}}
    yield "fusion on, gated", compile_all(HOPPER, "gate first", BRAIN, BRAIN, 4096, **fused)
    yield "fusion on, gated, AMD", compile_all(AMD, "gate first", BRAIN, BRAIN, 4096, **fused)
    yield "alignment dropped, gated", compile_all(HOPPER, "gate first backward", BRAIN, BRAIN, 4096, **unaligned)
    for name, op, table in (
        ("too few warps", "backward", "_BACKWARD"),
        ("too few warps, gated", "gate first backward", "_GATED_BACKWARD"),
    ):
        whole = getattr(compiled.configurations, table)
        setattr(compiled.configurations, table, ((8192, 4),))
        yield name, compile_all(HOPPER, op, BRAIN, BRAIN, 8192)
        setattr(compiled.configurations, table, whole)


def foreign():
    """NVIDIA's instruction on AMD. Some releases of Triton abort the process; others print a line and go on."""
    compiled.configurations.form = lambda target, cols, gate: fixed_sum.DOUBLE.value
    yield "NVIDIA's instruction on AMD", compile_all(AMD, "forward", BRAIN, BRAIN, 4096)


class Mutant:
    """The kernels with one line changed, as modules of their own."""

    number = 0

    def __init__(self, file, old, new):
        Mutant.number += 1
        self.folder = Path(tempfile.mkdtemp())
        self.name = f"mutant_{Mutant.number}"
        shutil.copytree(Path(kernels.__file__).parent, self.folder / self.name)
        for path in (self.folder / self.name).glob("*.py"):
            text = path.read_text()
            if path.stem == file:
                assert old in text, f"{old!r} is not in {file}.py"
                text = text.replace(old, new)
            path.write_text(text.replace("rmsnorm.gpu.kernels", self.name))

    def __enter__(self):
        sys.path.insert(0, str(self.folder))
        return self.change

    def change(self, kernel, aligned):
        module = kernel.function.fn.__module__.replace("rmsnorm.gpu.kernels", self.name)
        return Kernel(getattr(importlib.import_module(module), kernel.name)), aligned

    def __exit__(self, *_):
        sys.path.remove(str(self.folder))
        shutil.rmtree(self.folder)


def texts(planted):
    return {name: [text for code in codes for text in faults(code)[0]] for name, codes in planted}


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0].isdecimal():
        print(json.dumps(check(*(int(a) for a in arguments))))
    else:
        print(json.dumps(texts({"planted": planted, "foreign": foreign}[arguments[0]]())))
