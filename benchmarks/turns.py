"""A process that times calls of one rmsnorm when it is told to; bench_check.py starts one for each checkout.

    python benchmarks/turns.py SITE

SITE is a folder that holds an installed rmsnorm, or nothing for the one of this Python. It reads lines of JSON: a row
to get ready for, or null for a turn, which it answers with seconds. It uses what every release has.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of a turn; and of a sample within it, which is as many calls as fit: a clock tells no less apart.
TURN, SAMPLE = 4e-3, 1e-4


def main() -> None:
    site = sys.argv[1]
    if site:
        # An editable installation stands before every folder.
        sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
        sys.path.insert(0, site)
    import rmsnorm

    if site and not Path(rmsnorm.__file__).is_relative_to(site):
        raise SystemExit(f"imported {rmsnorm.__file__}, not what is in {site}")
    print(json.dumps(rmsnorm.__file__), flush=True)
    call: Callable[[], object] = lambda: None  # noqa: E731
    for line in sys.stdin:
        row = json.loads(line)
        if row is not None:
            call = prepare(rmsnorm, **row)
            answer: object = None
        else:
            answer = turn(call)
        print(json.dumps(answer), flush=True)


def prepare(rmsnorm: Any, what: str, rows: int, cols: int, dtype: str, threads: int) -> Callable[[], object]:
    """A call, which has been made once."""
    import torch

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x, residual, dy = (torch.randn(rows, cols, generator=generator).to(getattr(torch, dtype)) for _ in range(3))
    weight = torch.ones(cols, dtype=x.dtype)
    out = torch.empty_like(x)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: rmsnorm.rms_norm(x, weight, 1e-6),
        "out": lambda: rmsnorm.rms_norm(x, weight, 1e-6, out=out),
        "add": lambda: rmsnorm.add_rms_norm(x, residual, weight, 1e-6),
        "training": lambda: torch.autograd.grad(rmsnorm.rms_norm(*leaves, 1e-6), leaves, dy),
    }
    calls[what]()
    return calls[what]


def turn(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call: the least of some samples, because what disturbs it makes it longer."""
    call()
    begin = clock()
    call()
    times = max(1, int(SAMPLE / max(clock() - begin, 1e-7)))
    best, end = float("inf"), clock() + TURN
    while True:
        start = clock()
        for _ in range(times):
            call()
        now = clock()
        best = min(best, (now - start) / times)
        if now >= end:
            return best


if __name__ == "__main__":
    main()
