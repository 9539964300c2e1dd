"""Writes benchmarks/results/gpu_kernels.md, the machine code of the GPU kernels in figures: `make gpu-table`."""

import sys
from pathlib import Path

import triton

from tests.gpu.compiled import BRAIN, TARGETS, compile_all, facts

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_kernels.md"
CALLS = (
    *(("forward", cols) for cols in (128, 1024, 4096, 8192, 16384, 65536)),
    *(("add", cols) for cols in (4096, 16384)),
    *(("backward", cols) for cols in (128, 1024, 4096, 8192, 16384)),
    *(("gate last", cols) for cols in (128, 4096, 8192)),
    *(("gate first", cols) for cols in (1024, 4096, 8192)),
    *(("gate last backward", cols) for cols in (128, 4096)),
    *(("gate first backward", cols) for cols in (1024, 4096, 8192)),
    *(("groups", 1024), ("groups backward", 1024)),
    *(("exact sum", 4096), ("exact sum", 16384), ("grouped sum", 1024)),
)
HEAD = f"""# What the GPU kernels compile to

Triton {triton.__version__}, bfloat16 input and weight, without a GPU: `make gpu-table`. No measurement of speed.
A backward may take several kernels. Loads and stores are all in the listing, and those of 16 bytes; the others are one
number per row, or a weight that several rows share. Sums are the instructions of the exact sums: float64 FMAs toward
zero on sm_80, sm_90 and sm_100, twice as many float32 FMAs on sm_120, floors on gfx942. Elements are those of each row
tensor that a thread has. Rows with a gate, and those of groups, are two groups of `cols`.
"""


def lines(target):
    """One target's table."""
    name = f"sm_{target.arch}" if target.backend == "cuda" else target.arch
    yield (
        f"\n## {name}\n\n| call | cols | kernel | tile | warps | elements | registers | spills "
        "| instructions | loads, 16 bytes | stores, 16 bytes | sums |\n" + "| --- " * 12 + "|"
    )
    for op, cols in CALLS:
        print(f"{name} {op} {cols}", file=sys.stderr, flush=True)
        for code in compile_all(target, op, BRAIN, BRAIN, cols):
            f = facts(code)
            elements = max(1, code.rows * code.block // (code.warps * target.warp_size))
            yield (
                f"| {op} | {cols} | {code.kernel} | {code.rows} x {code.block} | {code.warps} | {elements} "
                f"| {f['registers']} | {f['spills']} | {f['instructions']} | {f['loads']}, {f['wide loads']} "
                f"| {f['stores']}, {f['wide stores']} | {f['sums']} |"
            )


def main():
    FILE.write_text("\n".join([HEAD, *(line for target in TARGETS for line in lines(target))]) + "\n")
    print(f"written: {FILE}")


if __name__ == "__main__":
    main()
