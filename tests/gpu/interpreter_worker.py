"""Runs calls under Triton's interpreter and reports what differs from the CPU's kernels.

    TRITON_INTERPRET=1 python -m tests.gpu.interpreter_worker PART PARTS

prints {group: [text, ...]} as JSON, of every PARTS-th call.
"""

import json
import sys
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

from rmsnorm.gpu import call_cache, configurations, launching, operators
from tests.gpu import cases, forms, interpreter_checks, memory_checks
from tests.support.bits import difference

# One for each form of the sums.
TARGETS = {
    "floor": GPUTarget("hip", "gfx942", 64),
    "double": GPUTarget("cuda", 90, 32),
    "single": GPUTarget("cuda", 120, 32),
}
RESULTS = {
    "forward_train": ("y", "rstd"),
    "add_forward": ("y", "h", "rstd"),
    "residual_forward": ("y", "h", "rstd"),
    "backward": ("dx", "dweight"),
    "gated_forward_train": ("y", "rstd"),
    "gated_backward": ("dx", "dgate", "dweight"),
}
TALLEST, LARGEST = 1024, 1 << 18


def tall(cols, target, gate):
    """All rows in one program, as far as memory allows."""
    block = configurations.power_of_two(cols)
    return configurations.Tile(max(2, min(TALLEST, LARGEST // block)), block, 4)


def compare(form, op, arguments):
    """Every difference between a call interpreted and on the CPU, as text."""
    launching._targets[None] = TARGETS[form]
    call_cache.clear()
    expected = forms.expected(op, arguments)
    before = [a.clone() for a in arguments if isinstance(a, torch.Tensor)]
    found = getattr(operators, op)(*arguments)
    call = f"{form} {op} " + ", ".join(describe(a) for a in arguments)
    for name, f, e in zip(RESULTS[op], found, expected, strict=True):
        if f is None and e is None:
            continue
        if (wrong := difference(f, e)) is not None:
            yield f"{call}: {name}: {wrong}"
        elif f.numel() and f.stride() != e.stride():
            yield f"{call}: {name} has strides {f.stride()}, expected {e.stride()}"
    for b, a in zip(before, (a for a in arguments if isinstance(a, torch.Tensor)), strict=True):
        if difference(a, b) is not None:
            yield f"{call}: an argument was changed"


def describe(argument):
    if not isinstance(argument, torch.Tensor):
        return str(argument)
    return f"{str(argument.dtype).removeprefix('torch.')}{tuple(argument.shape)}"


def run(part, parts):
    """The groups in tall tiles, with every form, and those in the tiles that GPUs get, with one after another."""
    report, number, shipped = {}, 0, vars(configurations).copy()
    tiles = dict.fromkeys(("forward", "backward"), tall)
    tiles["columns"] = lambda itemsize, target: configurations.Tile(1, 8192, 1)
    tiles["fold"] = lambda target: configurations.Tile(16, 8192, 1)
    for group, calls in {**cases.TALL, **cases.SHIPPED}.items():
        is_tall = group in cases.TALL
        vars(configurations).update(tiles if is_tall else {name: shipped[name] for name in tiles})
        report[group] = []
        begin = time.process_time()
        for call in calls():
            number += 1
            if number % parts != part:
                continue
            turn = number // parts
            one_sum = [list(TARGETS)[(turn + turn // 3) % 3]]  # with any period of types
            sums = TARGETS if group in cases.EVERY_SUM else one_sum
            for form, leaves in product(sums, (128,) if is_tall or "backward" not in call[0] else (1, 128)):
                configurations.FUSED_LEAVES = leaves  # 1: dx and dweight in one kernel of any number of rows
                report[group] += compare(form, *call)
        print(f"{group}: {time.process_time() - begin:.1f} s", file=sys.stderr, flush=True)
    checks = {**vars(interpreter_checks), **vars(memory_checks)}
    for number, name in enumerate(cases.CHECKS):
        report[name] = list(checks[name]()) if number % parts == part else []
    return report


def patch_once():
    """Triton's interpreter patches its language at every call of every function, which is half of its time."""
    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function):
        if id(function.__globals__) not in patched:  # what is patched are the modules seen from there
            patched.add(id(function.__globals__))
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang


if __name__ == "__main__":
    patch_once()
    assert launching.INTERPRETED
    np.seterr(all="ignore")  # numpy warns of infinities that rows with infinities have
    torch.set_num_threads(1)
    print(json.dumps(run(*(int(a) for a in sys.argv[1:]))))
