"""Checks the GPU kernels on a GPU, in at most eight minutes: bits, variants that must fail, speed, time on the host.

    python benchmarks/gpu_check.py [--minutes 8] [--output FILE]
    python benchmarks/gpu_check.py --dry        the same steps at tiny sizes under Triton's interpreter, without a GPU

Every result is appended to FILE as a line of JSON at once, so that what was measured survives whatever comes after.
Exit codes: 0; 1 where bits differ, or a deliberately wrong variant has the right ones; 2 without a GPU.

The CPU's results are those of the compiled kernels if `rmsnorm._C` is found (copied beside src/rmsnorm, or installed),
and of the reference, slowly, if not. Peers are measured if they can be imported: Liger-Kernel, QuACK.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402

from rmsnorm.gpu import availability, registration  # noqa: E402
from rmsnorm.ops import library  # noqa: E402
from tests.support.bits import difference  # noqa: E402
from tests.support.rows import DTYPES, all_rows, finite_rows, random_rows  # noqa: E402

WIDTHS = (1, 3, 33, 64, 100, 128, 257, 1000, 4096, 4097, 8192, 8193, 16384, 40_000)
FORMS = ("floor", "double", "single")
# What the steps may take, as shares of the whole.
BITS_UNTIL, SPEED_UNTIL = 0.40, 0.90


@dataclass
class Report:
    """Lines of JSON, the clock, and the verdict."""

    path: Path
    seconds: float
    begin: float = field(default_factory=time.perf_counter)
    faults: int = 0

    def line(self, step: str, **facts: Any) -> None:
        """Appends a line, and prints it."""
        line = {"step": step, "at": round(time.perf_counter() - self.begin, 1), **facts}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def past(self, share: float) -> bool:
        """Whether a share of the time is used up."""
        return time.perf_counter() - self.begin > share * self.seconds

    def fault(self, step: str, text: str) -> None:
        """Something that must not be."""
        self.faults += 1
        self.line(step, fault=text)


# ---------------------------------------------------------------- bits


def to(device: torch.device, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same tensors there, with the same strides."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        there = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        return there.copy_(t)

    return tuple(moved(a) if isinstance(a, torch.Tensor) else a for a in arguments)


def calls(width: int, dtype: torch.dtype, dry: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operators and arguments: every kind of row, and one row of many."""
    other = torch.float32 if width % 2 else dtype
    x = all_rows(width, dtype, seed=width)
    weight = (1 + 0.3 * torch.randn(width, generator=torch.Generator().manual_seed(3))).to(other)
    yield "forward_train", (x, weight, 1e-6, 0.0, width % 3)
    yield "forward_train", (x[3:4], weight, 1e-6, 0.0, width % 3)
    yield "add_forward", (x, x.roll(1, 0), weight, 1e-6, 1.0, 0)
    for rows in (16,) if dry else (16, 300):
        x = finite_rows(width, dtype, seed=width + 1).repeat(-(-rows // 16), 1)[:rows]
        rstd = torch.ops.rmsnorm.forward_train(x, weight, 1e-6, 1.0, 0)[1]
        dy = random_rows(rows, width, dtype, seed=width)
        yield "backward", (dy, x, rstd, weight, 1.0, dy.roll(1, 0), None, True, True)
    gate = (3 * dy).to(dtype)
    for number, groups in enumerate(n for n in ((2,) if dry else (1, 2, 5)) if width % n == 0):
        options = width // groups, number % 2, (width + number) % 2 == 0
        yield "gated_forward_train", (x, gate, weight, 1e-6, 1.0, width % 3, *options)
        rstd = torch.ops.rmsnorm.gated_forward_train(x, gate, weight, 1e-6, 1.0, 0, *options)[1]
        yield "gated_backward", (dy, x, gate, rstd, weight, None, 1.0, *options, True, True, True)
        # Groups alone with a residual: another dtype, a scaled branch, and the gradient of the sum.
        size, exact_sum = options[0], number % 2 == 0
        stream = gate.to(other)
        yield "residual_forward", (x, stream, weight, 1e-6, 1.0, width % 3, size, exact_sum, (1.0, 0.22)[number % 2])
        rstd = torch.ops.rmsnorm.gated_forward_train(x, None, weight, 1e-6, 1.0, 0, size, 0, False)[1]
        yield "gated_backward", (dy, x, None, rstd, weight, gate, 1.0, size, 0, False, True, False, True)


def unequal(device: torch.device, op: str, arguments: tuple[Any, ...], expected: Any = None) -> list[str]:
    """What differs between the GPU and the CPU."""
    if expected is None:
        expected = getattr(torch.ops.rmsnorm, op)(*arguments)
    found = registration.implementation(op)(*to(device, arguments))
    wrong = []
    for f, e in zip(found, expected, strict=True):
        if f is None or e is None:  # what is not wanted, such as the gradient of an absent gate
            wrong.append(None if f is e else "a result is absent on one device alone")
        else:
            wrong.append(difference(f.cpu(), e))
    return [text for text in wrong if text is not None]


def forget() -> None:
    """So that what is changed on purpose is compiled."""
    from rmsnorm.gpu import call_cache, launching

    launching._compiled.clear()
    call_cache.clear()


def take(form: int) -> None:
    """A form of the sums, whatever the device would take."""
    from rmsnorm.gpu import configurations

    # Of groups of up to 32 columns SINGLE cannot take the sums.
    configurations.form = lambda target, cols, gate=False: form if cols > 32 else min(form, 1)
    forget()


def cases(target: Any, chosen: Any, dry: bool) -> list[tuple[int, int]]:
    """Forms of the sums and widths; the form that the device takes goes first."""
    forms = sorted(range(3), key=lambda form: form != chosen(target, 4096))
    if target.backend != "cuda" and not dry:
        forms = [0]  # the others are instructions of NVIDIA's
    found = product(forms, (3, 33, 130) if dry else WIDTHS)
    return [(form, width) for form, width in found if form != 2 or width > 32]


def compile_case(case: tuple[Any, int, int]) -> int:
    """Compiles what `check_bits` launches in a case, into Triton's cache on disk; the GPU is not asked."""
    target, form, width = case
    from rmsnorm.gpu import launching

    torch.set_num_threads(1)
    compiled = {}

    def prepare(kernel: Any, device: Any, grid: Any, arguments: Any, aligned: bool, warps: int) -> Any:
        key = kernel, aligned, warps, *kernel.key(arguments)
        if key not in compiled:
            compiled[key] = launching.compile_for(target, kernel, arguments, aligned, warps)
        return lambda *tensors: None

    launching._targets[None], launching.prepare = target, prepare
    take(form)
    for dtype in DTYPES:
        for op, arguments in calls(width, dtype, False):
            registration.implementation(op)(*to(torch.device("cpu"), arguments))
    return len(compiled)


def precompile(report: Report, every: list[tuple[Any, int, int]]) -> None:
    """All cores compile, where one would need more minutes than there are."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        kernels = sum(pool.map(compile_case, every))
    report.line("compiled", kernels=kernels, processes=os.cpu_count())


def check_bits(report: Report, device: torch.device, dry: bool) -> None:
    """Every width, dtype and form of the sums."""
    from rmsnorm.gpu import configurations, launching

    target, chosen = launching.target(device), configurations.form
    every = cases(target, chosen, dry)
    if not dry:
        precompile(report, [(target, *case) for case in every])
    for form, width in every:
        if report.past(BITS_UNTIL):
            report.line("bits", skipped=f"from {FORMS[form]} {width} on, for lack of time")
            break
        take(form)
        number = 0
        for dtype in DTYPES:
            for op, arguments in calls(width, dtype, dry):
                number += 1
                for text in unequal(device, op, arguments):
                    report.fault("bits", f"{FORMS[form]} {width} {dtype} {op}: {text}")
        report.line("bits", form=FORMS[form], width=width, calls=number, faults=report.faults)
    configurations.form = chosen
    forget()
    for name, rows, cols in (
        (("short rows", 1 << 10, 4),) if dry else (("short rows", 1 << 20, 4), ("rows", 4096, 4096))
    ):
        x = random_rows(rows, cols, torch.float32, 5, scale=1e-3)  # of eps's order: every bit of the root counts
        for text in unequal(device, "forward_train", (x, None, 1e-6, 0.0, 0)):
            report.fault("bits", f"{name}: {text}")
        report.line("bits", what=name, rows=rows, cols=cols)
    if not dry:
        check_far_rows(report, device)


def check_far_rows(report: Report, device: torch.device) -> None:
    """Rows more than 2^31 elements apart."""
    from rmsnorm.gpu import operators

    far = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=device).as_strided((2, 4096), (2**31, 1))
    near = random_rows(2, 4096, torch.bfloat16, 1)
    far.copy_(near)
    operators.forward_out(far, None, 1e-6, far)
    if (text := difference(far.cpu(), torch.ops.rmsnorm.forward(near, None, 1e-6))) is not None:
        report.fault("bits", f"far rows: {text}")
    report.line("bits", what="rows 2^31 elements apart")


def check_wrong(report: Report, device: torch.device, dry: bool) -> None:
    """Variants that are wrong on purpose: the comparison must see them."""
    from rmsnorm.gpu import backward, forward, launching

    x = random_rows(64 if dry else 2048, 256, torch.float32, 7, scale=1e-4)
    near_eps = x, None, 1e-6, 0.0, 0
    if dry:
        # The interpreter has no types of arguments, and fuses nothing.
        rounded = torch.tensor(1e-6, dtype=torch.float32).item()
        expected = torch.ops.rmsnorm.forward_train(*near_eps)
        variants = {"eps as float32": unequal(device, "forward_train", (x, None, rounded, 0.0, 0), expected)}
    else:
        forward.FORWARD.scalars["eps"] = "fp32"
        forget()
        variants = {"eps as float32": unequal(device, "forward_train", near_eps)}
        forward.FORWARD.scalars["eps"] = "fp64"

        def fused(target: Any, kernel: Any, arguments: Any, aligned: bool, warps: int) -> Any:
            return launching.triton.compile(
                kernel.source(arguments, aligned), target=target, options={"num_warps": warps, "enable_fp_fusion": True}
            )

        right, launching.compile_for = launching.compile_for, fused
        forget()
        rstd = torch.ops.rmsnorm.forward_train(*near_eps)[1]
        arguments = x.roll(1, 0), x, rstd, None, 0.0, None, None, True, True
        variants["fusion on"] = unequal(device, "backward", arguments)
        launching.compile_for = right
        assert backward.launching is launching  # noqa: S101 - else nothing was changed
    forget()
    for name, found in variants.items():
        if not found:
            report.fault("wrong", f"{name}: bits are equal, so the comparison sees nothing")
        report.line("wrong", variant=name, seen=bool(found), first=found[:1])


def check_surroundings(report: Report, device: torch.device) -> None:
    """Streams, a captured graph, a compiled function, a second device."""
    import rmsnorm

    x, weight = torch.randn(64, 4096, device=device).bfloat16(), torch.ones(4096, device=device).bfloat16()
    y = rmsnorm.rms_norm(x, weight)

    def same(what: str, found: torch.Tensor) -> None:
        if (text := difference(found.cpu(), y.cpu())) is not None:
            report.fault("surroundings", f"{what}: {text}")
        report.line("surroundings", what=what)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        found = rmsnorm.rms_norm(x, weight)
    stream.synchronize()
    same("another stream", found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rmsnorm.rms_norm(x, weight)
    found.zero_()
    graph.replay()
    torch.cuda.synchronize(device)
    same("a captured graph", found)
    same("torch.compile(fullgraph=True)", torch.compile(rmsnorm.rms_norm, fullgraph=True)(x, weight))
    if torch.cuda.device_count() > 1:
        same("a second device", rmsnorm.rms_norm(x.to("cuda:1"), weight.to("cuda:1")))


# ---------------------------------------------------------------- all steps


def facts(device: torch.device) -> dict[str, Any]:
    """What ran, on what."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    import triton

    found = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpu kernels": library.status().isa or "reference",
    }
    found |= {name: version(name) for name in ("liger-kernel", "quack-kernels")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        found |= {"multiprocessors": properties.multi_processor_count}
    return found


def main() -> int:
    """Runs the steps in order of what they are worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.jsonl"))
    parser.add_argument("--dry", action="store_true", help="tiny sizes under Triton's interpreter, on the CPU")
    arguments = parser.parse_args()
    if not arguments.dry and (
        reason := availability.missing() or (None if torch.cuda.is_available() else "no GPU is visible")
    ):
        print(f"gpu_check: {reason}. --dry runs the same steps under Triton's interpreter.", file=sys.stderr)
        return 2
    try:
        import triton  # noqa: F401
    except ImportError:
        print("gpu_check: Triton is not installed; --dry needs it too (make .venv/.triton).", file=sys.stderr)
        return 2
    if arguments.dry:
        import numpy as np

        np.seterr(all="ignore")  # it warns of infinities that rows with infinities have
    import gpu_speed  # after TRITON_INTERPRET is set

    device = torch.device("cpu") if arguments.dry else torch.device("cuda", torch.cuda.current_device())
    report = Report(arguments.output, 60 * arguments.minutes)
    report.line("facts", dry=arguments.dry, **facts(device))
    check_bits(report, device, arguments.dry)
    check_wrong(report, device, arguments.dry)
    if not arguments.dry:
        check_surroundings(report, device)
    gpu_speed.measure(report, device, arguments.dry, SPEED_UNTIL)
    report.line("verdict", faults=report.faults)
    return int(report.faults > 0)


if __name__ == "__main__":
    sys.exit(main())
